"""Grows many delayed trees of one family as one tree: its expansion alone would have grown each from the same samples.

A node gets as many children as the largest of the trees needs. A smaller tree takes the first of these children. They have the
distribution of fewer samples (i.i.d. or without replacement), or are the best of a ranking. So one deep tree shows the outcome of
each of its truncations without sampling noise between them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.tree import ROOT, Expansion, TokenTree
from engine.draft.drafter import FrontierNode, GrowingTree
from engine.draft.trees.sampling import ChildCandidates
from engine.draft.trees.strategies import AppendOnlyStrategy, num_draws


@dataclass(frozen=True)
class Truncation:
    """One of the trees. Its node v is node `nodes[v]` of the full tree."""

    tree: TokenTree
    nodes: tuple[int, ...]


class Nested(AppendOnlyStrategy):
    """Grows the trees of `expansions`, which differ in trunk, branches and depth; the row's own expansion names the family."""

    def __init__(self, tree: GrowingTree, expansions: Sequence[Expansion]) -> None:
        super().__init__(tree)
        self._expansions = expansions
        self._levels = [Counter({ROOT: 1}) for _ in expansions]  # paths of each tree through each node of the last level
        self._num_children: list[dict[int, int]] = []
        self._children: list[dict[int, list[int]]] = [{} for _ in expansions]

    def frontier(self) -> list[FrontierNode]:
        """Return the level's nodes, each with the most children that a tree needs."""
        depths = self.tree.depths
        self._num_children = [
            {node: count for node, paths in level.items() if (count := num_draws(expansion, depths[node], paths))}
            for expansion, level in zip(self._expansions, self._levels, strict=True)
        ]
        self._levels = [Counter() for _ in self._expansions]
        most: dict[int, int] = {}
        for counts in self._num_children:
            for node, count in counts.items():
                most[node] = max(count, most.get(node, 0))
        return [FrontierNode(self.tree, node, count) for node, count in most.items()]

    def expand(self, node: int, candidates: ChildCandidates) -> None:
        """Add all candidates; each tree continues with the first candidates."""
        children = [self.tree.add(node, token_id) for token_id in candidates.token_ids]
        for counts, level, children_of in zip(self._num_children, self._levels, self._children, strict=True):
            if node in counts:
                children_of[node] = children[: counts[node]]
                level.update(children_of[node])

    def truncations(self) -> list[Truncation]:
        """Return the trees, in the order of the expansions."""
        return [self._truncation(children_of) for children_of in self._children]

    def _truncation(self, children_of: dict[int, list[int]]) -> Truncation:
        nodes = sorted({ROOT, *(child for children in children_of.values() for child in children)})
        number = {node: index for index, node in enumerate(nodes)}
        parents = tuple(-1 if node == ROOT else number[self.tree.parents[node]] for node in nodes)
        draws = tuple(tuple(number[child] for child in children_of.get(node, ())) for node in nodes)
        return Truncation(TokenTree(parents, tuple(self.tree.token_ids[node] for node in nodes), draws), tuple(nodes))
