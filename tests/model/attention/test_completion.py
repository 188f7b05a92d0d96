"""Tables that the device completes with trees which the host has not read: the tables that a host makes of these trees."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.attention.packing import PackedBatch, pack
from engine.attention.paged.completion import GrownNodes, complete_by_kernel, complete_by_torch, rooms_of
from engine.attention.paged.graphs import TablePass
from engine.attention.paged.table import Room, Shape, TableColumns, table_of
from engine.attention.segments import tree_segment
from engine.core.rng_keys import Stream, stream_key
from engine.core.tree import TokenTree
from engine.sampling.device_choice import NodeDraws
from engine.sampling.noise import signed
from tests.model.paged import DEVICE, needs_triton, random_tree
from tests.model.passes import CPU

COLUMNS = TableColumns(tokens=(0, 0, 999), outputs=(0,) * 5)
Complete = Callable[[TablePass, GrownNodes, Any], None]


class Step:
    """Rows with trees of random shapes, roots alone and chunks of prompts; each tree is smaller than its room or fills it."""

    def __init__(self, seed: int, most_nodes: int = 6, most_chain: int = 3) -> None:
        rng = self._rng = random.Random(seed)
        self._rows: list[tuple[int, list[int], bool, TokenTree, int]] = []
        for _ in range(rng.randint(1, 4)):
            context, certain = rng.randrange(5), [rng.randrange(99) for _ in range(rng.randint(1, most_chain))]
            room, is_decoding = rng.choice((0, rng.randint(1, most_nodes))), rng.random() < 0.8
            tree = random_tree(rng, rng.randint(1, room + 1) if is_decoding else 1)
            ids = (certain[-1], *rng.sample(range(99), tree.num_nodes - 1))
            self._rows.append((context, certain, is_decoding, TokenTree(tree.parents, ids, tree.draws), room * is_decoding))
        self._order = rng.sample(range(900), 900)
        self.deepest = max((max(tree.depths) for *_, tree, _ in self._rows), default=0)

    def table(self, trees: Sequence[TokenTree], keys: Callable[[int, int], int]) -> tuple[PackedBatch, list[int], TablePass]:
        """Return the table with these trees, whose nodes have keys by row and depth."""
        rows: list[int] = []
        of_nodes: list[int] = []
        segments, start, slots = [], 0, iter(self._order)
        for index, ((context, certain, is_decoding, *_), tree) in enumerate(zip(self._rows, trees, strict=True)):
            own = [next(slots) for _ in range(context + len(certain) + tree.num_nodes - 1)]
            segments.append(tree_segment(certain, tree, context, own))
            root = start + len(certain) - 1
            start = root + tree.num_nodes
            if is_decoding:
                rows.extend(range(root, start))
                of_nodes.extend(keys(index, depth) for depth in tree.depths)
        batch, shape = pack(segments, CPU), Shape(start + 2, start)
        draws = NodeDraws([0.5] * len(rows), of_nodes)
        numbers = table_of(batch, shape, COLUMNS, outputs=[rows, *draws.columns(len(rows))])
        return batch, rows, TablePass(torch.from_numpy(numbers), shape, COLUMNS, torch.empty(0, 0), lambda: None)

    def expected(self) -> Tensor:
        """Return the host's table of the trees; absent nodes are children of their roots without a token and a key."""
        trees = [_padded(tree, room) for *_, tree, room in self._rows]
        batch, rows, one = self.table(trees, _key)
        first = 3 * one.shape.num_tokens
        row_of = {row: output for output, row in enumerate(rows)}
        for (*_, certain, _, tree, room), start in zip(self._rows, batch.starts, strict=False):
            for node in range(tree.num_nodes, room + 1):
                packed = start + len(certain) - 1 + node
                one.table[packed] = 0
                for half in (3, 4):
                    one.table[first + half * one.shape.num_outputs + row_of[packed]] = 0
        return one.table

    def completed(self, complete: Complete) -> Tensor:
        """Return the table that a device completes from room for the largest trees."""
        stars = [TokenTree.star(tree.token_ids[0], room) for *_, tree, room in self._rows]
        batch, rows, one = self.table(stars, lambda row, depth: _key(row, 0) if depth == 0 else 7)
        with_room = [(index, tree, room) for index, (*_, tree, room) in enumerate(self._rows) if room]
        width = 1 << max((room - 1).bit_length() for *_, room in self._rows) if with_room else 1
        columns = [torch.full((len(with_room) + 1, width), padding) for padding in (0, 0, 1, 0)]
        for place, (index, tree, _) in enumerate(with_room):
            keys = [signed(_key(index, depth)) for depth in tree.depths]
            for column, numbers in zip(columns, (tree.token_ids, tree.parents, tree.depths, keys), strict=True):
                column[place, : tree.num_nodes - 1] = torch.tensor(numbers[1:], dtype=torch.int64)
        complete(one, GrownNodes._make([*columns, max(1, self.deepest)]), rooms_of(batch, one, rows))
        return one.table


def _key(row: int, depth: int) -> int:
    return stream_key(row, depth, Stream.TOKEN)


def _padded(tree: TokenTree, room: int) -> TokenTree:
    absent = tuple(range(tree.num_nodes, room + 1))
    draws = ((*tree.draws[0], *absent), *tree.draws[1:], *(() for _ in absent))
    return TokenTree((*tree.parents, *(0 for _ in absent)), (*tree.token_ids, *(500 + node for node in absent)), draws)


def by_kernel(one: TablePass, nodes: GrownNodes, rooms: Any) -> None:
    if len(rooms):
        copy = replace(one, table=one.table.to(DEVICE))
        there = GrownNodes._make([*(column.to(DEVICE) for column in nodes[:4]), nodes.most_depth])
        complete_by_kernel(copy, there, torch.from_numpy(rooms).to(DEVICE))
        one.table.copy_(copy.table)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(6, 3), (40, 2), (9, 70)]))
def test_completed_tables_are_the_hosts(seed, sizes):
    """Trees of more nodes than a word has bits, and prompts that fill words before the tree."""
    step = Step(seed, *sizes)
    assert torch.equal(step.completed(complete_by_torch), step.expected())


@needs_triton
@pytest.mark.parametrize("sizes", [(6, 3), (40, 2), (9, 70)])
def test_kernel_completes_as_the_reference(sizes):
    """By Triton's interpreter."""
    for seed in range(12):
        step = Step(seed, *sizes)
        assert torch.equal(step.completed(by_kernel), step.completed(complete_by_torch))


def changed_nodes(**changes: Callable[[GrownNodes], Any]) -> Callable[[Complete], Complete]:
    """Return a mutation of the nodes."""

    def mutant(complete: Complete) -> Complete:
        return lambda one, nodes, rooms: complete(
            one, nodes._replace(**{name: change(nodes) for name, change in changes.items()}), rooms
        )

    return mutant


def changed_rooms(**changes: int) -> Callable[[Complete], Complete]:
    """Return a mutation of the rooms, in which numbers are added to fields."""

    def mutant(complete: Complete) -> Complete:
        def wrongly(one: TablePass, nodes: GrownNodes, rooms: Any) -> None:
            added = np.array([changes.get(name, 0) for name in Room._fields])
            complete(one, nodes, np.maximum(rooms + added, 0))

        return wrongly

    return mutant


def rooms_of_others(complete: Complete) -> Complete:
    return lambda one, nodes, rooms: complete(one, nodes, np.concatenate([rooms[1:], rooms[:1]]))


def one_level_less(complete: Complete) -> Complete:
    return lambda one, nodes, rooms: complete(one, nodes._replace(most_depth=nodes.most_depth - 1), rooms)


MUTANTS = {
    "tokens": changed_nodes(tokens_BN=lambda nodes: nodes.tokens_BN + 1),
    "ancestors": changed_nodes(parents_BN=lambda nodes: (nodes.parents_BN - 1).clamp(min=0)),
    "positions": changed_nodes(depths_BN=lambda nodes: nodes.depths_BN + 1),
    "keys": changed_nodes(keys_BN=lambda nodes: nodes.keys_BN ^ (1 << 40)),
    "padding is a parent": changed_nodes(parents_BN=lambda nodes: torch.where(nodes.parents_BN == 1, 2, nodes.parents_BN)),
    "levels": one_level_less,
    "rooms of other trees": rooms_of_others,
    **{name: changed_rooms(**{name: -1}) for name in Room._fields},
}


@needs_triton
@pytest.mark.parametrize("way", [complete_by_torch, by_kernel])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_completions_are_detected(mutant, way):
    found = []
    for seed in range(12):
        step = Step(seed)
        try:
            found.append(torch.equal(step.completed(MUTANTS[mutant](way)), step.expected()))
        except (RuntimeError, IndexError):  # sizes that do not fit
            found.append(False)
    assert not all(found)
