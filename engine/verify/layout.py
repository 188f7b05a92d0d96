"""Index tables of a forest: which node is tried after which, by packed node number.

Knows shapes only, no laws: everything here is decided on the host before any tensor is computed. Packed nodes are numbered
tree after tree; number N, one past the last, is a dummy that pads ragged tables and carries no probability.

Shape key: B trees, N packed nodes, P = N + 1 (the dummy included), M nodes of one level, C tries of a node, W the most nodes
of a tree.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from engine.forest import Forest

# Entries of laws worked on at once: on a CPU a few rows that stay in its cache (twice as fast as 64), elsewhere a memory bound.
_CPU_ENTRIES, _DEVICE_ENTRIES = 1 << 20, 1 << 24

_T = TypeVar("_T")


@dataclass(frozen=True)
class Level:
    """Nodes that are handled together, those with most tries first.

    `num_tried[j]` nodes, the first ones, have more than j tries: a loop over sibling ranks runs on ever shorter prefixes.
    """

    nodes_M: Int[Tensor, " M"]
    num_tried: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The tables. `levels` holds the nodes with tries, parents before children.

    `children_PC[v, j]` is the packed node that the j-th try of node v would enter, the dummy where there is none;
    `tokens_PC` is its token. `law_rows_P` is the row of the law that v's children were drawn from, 0 where there is none.
    `nodes_BW` lists each tree's packed nodes in node order, `post_order_BW` in post-order.
    """

    tries: tuple[tuple[int, ...], ...]
    levels: tuple[Level, ...]
    children_PC: Int[Tensor, "P C"]
    tokens_PC: Int[Tensor, "P C"]
    law_rows_P: Int[Tensor, " P"]
    depths_P: Int[Tensor, " P"]
    nodes_BW: Int[Tensor, "B W"]
    post_order_BW: Int[Tensor, "B W"]

    @property
    def dummy(self) -> int:
        """The packed number that stands for no node, N."""
        return len(self.tries)

    @property
    def is_try_PC(self) -> Bool[Tensor, "P C"]:
        """Which entries of the tables are tries rather than padding."""
        return self.children_PC != self.dummy

    def level(self, nodes: Iterable[int]) -> Level:
        """Return these packed nodes as a level, reordered so that those with most tries come first."""
        return _level(nodes, self.tries, self.nodes_BW.device)

    def num_tries(self, node: int) -> int:
        """Return how many tries a packed node has."""
        return len(self.tries[node])


def rows_at_once(vocab_size: int, device: torch.device) -> int:
    """Return how many rows of laws to work on together."""
    return max(1, (_CPU_ENTRIES if device.type == "cpu" else _DEVICE_ENTRIES) // vocab_size)


def chunks(items: Sequence[_T], size: int) -> list[Sequence[_T]]:
    """Return the items in runs of at most `size`."""
    return [items[i : i + size] for i in range(0, len(items), size)]


def lay_out(forest: Forest, tries: Sequence[Sequence[Sequence[int]]], max_rows: int, device: torch.device) -> Layout:
    """Build the tables; `tries[b][v]` are the children of node v of tree b that a plan tries, in its order.

    A level holds nodes of one depth, at most `max_rows`; they do not depend on each other.
    """
    num_nodes = forest.num_nodes
    packed = tuple(
        tuple(offset + child for child in kids) for offset, tree_tries in zip(forest.offsets, tries) for kids in tree_tries
    )
    token_ids = [*chain.from_iterable(tree.token_ids for tree in forest.trees), 0]
    children_PC = _padded([*packed, ()], num_nodes)
    law_rows = [row or 0 for rows in forest.law_rows for row in rows]
    depths = [depth for tree in forest.trees for depth in tree.depths]

    def table(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Layout(
        tries=packed,
        levels=tuple(_level(nodes, packed, device) for nodes in _nodes_by_level(depths, packed, max_rows)),
        children_PC=table(children_PC),
        tokens_PC=table([[token_ids[child] for child in kids] for kids in children_PC]),
        law_rows_P=table([*law_rows, 0]),
        depths_P=table([*depths, 0]),
        nodes_BW=table(_padded(_orders(forest, [range(tree.num_nodes) for tree in forest.trees]), num_nodes)),
        post_order_BW=table(_padded(_orders(forest, [tree.post_order for tree in forest.trees]), num_nodes)),
    )


def _orders(forest: Forest, orders: Sequence[Iterable[int]]) -> list[list[int]]:
    return [[offset + node for node in order] for offset, order in zip(forest.offsets, orders)]


def _padded(rows: Sequence[Sequence[int]], filler: int) -> list[list[int]]:
    """Return rows of equal length, one entry at least."""
    width = max(1, *map(len, rows))
    return [[*row, *[filler] * (width - len(row))] for row in rows]


def _nodes_by_level(depths: Sequence[int], tries: Sequence[Sequence[int]], max_rows: int) -> list[Sequence[int]]:
    """Return the nodes with tries in groups of one depth and at most `max_rows`, most tries first."""
    by_depth: list[list[int]] = [[] for _ in range(max(depths, default=0) + 1)]
    for node, depth in enumerate(depths):
        if tries[node]:
            by_depth[depth].append(node)
    return [part for nodes in by_depth for part in chunks(_most_tries_first(nodes, tries), max_rows)]


def _most_tries_first(nodes: Iterable[int], tries: Sequence[Sequence[int]]) -> list[int]:
    return sorted(nodes, key=lambda node: -len(tries[node]))


def _level(nodes: Iterable[int], tries: Sequence[Sequence[int]], device: torch.device) -> Level:
    ordered = _most_tries_first(nodes, tries)
    counts = [len(tries[node]) for node in ordered]
    num_tried = tuple(sum(count > rank for count in counts) for rank in range(max(counts, default=0)))
    return Level(torch.tensor(ordered, dtype=torch.int64, device=device), num_tried)
