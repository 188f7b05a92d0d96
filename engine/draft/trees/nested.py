"""Many delayed trees of one family grown as one: every tree is what its expansion would have grown from the same draws.

A node is drawn as many children as the tree that wants most; a tree that wants fewer takes the first of them, which have the law
of fewer draws (i.i.d. or without replacement) and are the better of a ranking. So one deep tree shows what each of its
truncations would have brought, and the differences between them are not chance. Knows no tensors.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.tree import ROOT, Expansion, TokenTree
from engine.draft.drafter import FrontierNode, GrowingTree
from engine.draft.trees.sampling import Offer
from engine.draft.trees.strategies import Keeping, num_draws


@dataclass(frozen=True)
class Truncation:
    """One of the trees: `nodes[v]` is the node of the whole tree that its node v is."""

    tree: TokenTree
    nodes: tuple[int, ...]


class Nested(Keeping):
    """Grows the trees of `expansions`, which differ in trunk, branches and depth; the row's own expansion names the family."""

    def __init__(self, tree: GrowingTree, expansions: Sequence[Expansion]) -> None:
        super().__init__(tree)
        self._expansions = expansions
        self._levels = [Counter({ROOT: 1}) for _ in expansions]  # paths of each tree through each node of the last level
        self._wishes: list[dict[int, int]] = []
        self._drawn: list[dict[int, list[int]]] = [{} for _ in expansions]

    def asks(self) -> list[FrontierNode]:
        """Return the level's nodes, each for the tree that wants most of it."""
        depths = self.tree.depths
        self._wishes = [
            {node: count for node, paths in level.items() if (count := num_draws(expansion, depths[node], paths))}
            for expansion, level in zip(self._expansions, self._levels, strict=True)
        ]
        self._levels = [Counter() for _ in self._expansions]
        most: dict[int, int] = {}
        for wish in self._wishes:
            for node, count in wish.items():
                most[node] = max(count, most.get(node, 0))
        return [FrontierNode(self.tree, node, count) for node, count in most.items()]

    def take(self, node: int, offer: Offer) -> None:
        """Add all; each tree goes on with the first of them."""
        children = [self.tree.add(node, token_id) for token_id in offer.token_ids]
        for wish, level, drawn in zip(self._wishes, self._levels, self._drawn, strict=True):
            if node in wish:
                drawn[node] = children[: wish[node]]
                level.update(drawn[node])

    def truncations(self) -> list[Truncation]:
        """Return the trees, in the order of the expansions."""
        return [self._truncation(drawn) for drawn in self._drawn]

    def _truncation(self, drawn: dict[int, list[int]]) -> Truncation:
        nodes = sorted({ROOT, *(child for children in drawn.values() for child in children)})
        number = {node: index for index, node in enumerate(nodes)}
        parents = tuple(-1 if node == ROOT else number[self.tree.parents[node]] for node in nodes)
        draws = tuple(tuple(number[child] for child in drawn.get(node, ())) for node in nodes)
        return Truncation(TokenTree(parents, tuple(self.tree.token_ids[node] for node in nodes), draws), tuple(nodes))
