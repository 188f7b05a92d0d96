"""Index tables of a forest: the nodes tried after each node, by packed node number.

The tables depend on shapes only and are built on the host before any tensor is computed. Packed nodes are numbered tree after
tree. Number N, one past the last, is a dummy that pads ragged tables and has no probability.

Shape key: N packed nodes, M nodes of one level, C the most tries of a node, Y = M C.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from engine.utils.host_transfer import integers
from engine.verify.forest import Forest

# Entries of distributions computed at once: on a CPU a few rows that fit its cache, on other devices a memory bound.
_CPU_ENTRIES, _DEVICE_ENTRIES = 1 << 20, 1 << 24

_T = TypeVar("_T")


@dataclass(frozen=True)
class TreeLevel:
    """Nodes that are processed together, most tries first.

    `probs_rows_M` is the row of the distribution from which a node's children were drawn, 0 if there is none. Try j of node m has
    token `tokens_MC[m, j]` and leads to packed node `children_Y[m C + j]`; a missing try has token 0 and the dummy. The first
    `num_tried[j]` nodes have more than j tries, so a loop over sibling ranks runs on ever shorter prefixes.
    """

    nodes_M: Int[Tensor, " M"]
    probs_rows_M: Int[Tensor, " M"]
    tokens_MC: Int[Tensor, "M C"]
    children_Y: Int[Tensor, " Y"]
    is_try_MC: Bool[Tensor, "M C"]
    num_tried: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The tries after each packed node, on the host. All levels are built from it in one transfer.

    `groups` are the nodes with tries, level by level, parents before children.
    """

    tries: tuple[tuple[int, ...], ...]
    token_ids: tuple[int, ...]
    probs_rows: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    device: torch.device

    @property
    def dummy(self) -> int:
        """The packed number of the dummy, N."""
        return len(self.tries)

    @cached_property
    def all_levels(self) -> TreeLevel:
        """The levels end to end: a table of every try. Unlike a level, it cannot be looped over by rank."""
        return self._end_to_end(self.groups)

    @cached_property
    def levels(self) -> tuple[TreeLevel, ...]:
        """The nodes with tries, parents before children."""
        return self._cut(self.all_levels, self.groups)

    def level(self, nodes: Iterable[int]) -> TreeLevel:
        """Return these packed nodes as a level, reordered by their tries, most first."""
        group = _most_tries_first(nodes, self.tries)
        return self._cut(self._end_to_end([group]), [group])[0]

    def num_tries(self, node: int) -> int:
        """Return how many tries a packed node has."""
        return len(self.tries[node])

    def by_node(self, values: Sequence[float]) -> list[Sequence[float]]:
        """Return the values of each packed node's tries; `values` has one for every entry of `all_levels`."""
        nodes = [*chain.from_iterable(self.groups)]
        width = len(values) // max(1, len(nodes))
        found: list[Sequence[float]] = [()] * len(self.tries)
        for row, node in enumerate(nodes):
            found[node] = values[row * width : row * width + len(self.tries[node])]
        return found

    def _end_to_end(self, groups: Sequence[Sequence[int]]) -> TreeLevel:
        nodes = [*chain.from_iterable(groups)]
        width = max((len(self.tries[node]) for node in nodes), default=0) or 1
        children = [child for node in nodes for child in _padded(self.tries[node], width, self.dummy)]
        tokens = [self.token_ids[child] for child in children]
        table = integers([*nodes, *(self.probs_rows[node] for node in nodes), *tokens, *children], self.device)
        nodes_M, probs_rows_M, tokens_Y, children_Y = table.split_with_sizes([len(nodes), len(nodes), len(tokens), len(tokens)])
        is_try_Y = children_Y != self.dummy
        return TreeLevel(nodes_M, probs_rows_M, tokens_Y.view(-1, width), children_Y, is_try_Y.view(-1, width), ())

    def _cut(self, whole: TreeLevel, groups: Sequence[Sequence[int]]) -> tuple[TreeLevel, ...]:
        sizes, width = [len(group) for group in groups], whole.tokens_MC.shape[1]
        parts = zip(
            _cut(whole.nodes_M, sizes),
            _cut(whole.probs_rows_M, sizes),
            _cut(whole.tokens_MC, sizes),
            _cut(whole.children_Y, [size * width for size in sizes]),
            _cut(whole.is_try_MC, sizes),
        )
        return tuple(TreeLevel(*part, _num_tried(group, self.tries)) for part, group in zip(parts, groups))


def rows_at_once(vocab_size: int, device: torch.device) -> int:
    """Return how many distributions to compute together."""
    return max(1, (_CPU_ENTRIES if device.type == "cpu" else _DEVICE_ENTRIES) // vocab_size)


def chunks(items: Sequence[_T], size: int) -> list[Sequence[_T]]:
    """Return the items in runs of at most `size`."""
    return [items[i : i + size] for i in range(0, len(items), size)]


def build_layout(forest: Forest, tries: Sequence[Sequence[Sequence[int]]], max_rows: int, device: torch.device) -> Layout:
    """Build the layout; `tries[b][v]` are the children of node v of tree b that a plan tries, in its order.

    A level has at most `max_rows` nodes of one depth; they do not depend on each other.
    """
    packed = tuple(
        tuple(offset + child for child in kids) for offset, tree_tries in zip(forest.offsets, tries) for kids in tree_tries
    )
    depths = [depth for tree in forest.trees for depth in tree.depths]
    return Layout(
        tries=packed,
        token_ids=(*chain.from_iterable(tree.token_ids for tree in forest.trees), 0),
        probs_rows=tuple(row or 0 for rows in forest.probs_rows for row in rows),
        groups=_nodes_by_level(depths, packed, max_rows),
        device=device,
    )


def _nodes_by_level(depths: Sequence[int], tries: Sequence[Sequence[int]], max_rows: int) -> tuple[tuple[int, ...], ...]:
    """Return the nodes with tries in groups of one depth and at most `max_rows`, most tries first."""
    by_depth: list[list[int]] = [[] for _ in range(max(depths, default=0) + 1)]
    for node, depth in enumerate(depths):
        if tries[node]:
            by_depth[depth].append(node)
    return tuple(tuple(part) for nodes in by_depth for part in chunks(_most_tries_first(nodes, tries), max_rows))


def _most_tries_first(nodes: Iterable[int], tries: Sequence[Sequence[int]]) -> list[int]:
    return sorted(nodes, key=lambda node: -len(tries[node]))


def _num_tried(ordered: Sequence[int], tries: Sequence[Sequence[int]]) -> tuple[int, ...]:
    counts = [len(tries[node]) for node in ordered]
    return tuple(sum(count > rank for count in counts) for rank in range(max(counts, default=0)))


def _padded(row: Sequence[int], width: int, filler: int) -> tuple[int, ...]:
    return (*row, *(filler,) * (width - len(row)))


def _cut(tensor: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Return the parts of a tensor; a single part is the tensor itself, which saves a view."""
    return (tensor,) if len(sizes) == 1 else tensor.split_with_sizes(sizes)
