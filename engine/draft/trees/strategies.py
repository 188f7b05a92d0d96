"""Which node of one tree gets how many children next: the Protocol, and the trees whose shape is known beforehand.

Knows one tree and draft probabilities; does not know drafters, other trees, or how tokens are drawn. A decision is made before
the token it concerns is drawn, and a drawn token stays: every verifier that the table of exact pairs allows is exact on these
trees (docs/verification.md).
"""

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from engine.core.tree import ROOT, Expansion, TokenTree
from engine.draft.drafter import FrontierNode, GrowingTree
from engine.draft.trees.grown import Worth
from engine.draft.trees.sampling import Offer
from engine.draft.trees.topology import Topology


@dataclass(frozen=True)
class Grown:
    """A finished tree, the kept law of each inner node's draws, the nodes whose keys the drafter has cached, and their offers.

    `worth` is what its nodes are worth if it is noise-aware.
    """

    tree: TokenTree
    probs_rows: tuple[int | None, ...]
    fed: frozenset[int]
    offers: dict[int, Offer]
    worth: Worth | None = None


class Strategy(Protocol):
    """Grows one tree, round by round. Each node is asked for once."""

    tree: GrowingTree

    def asks(self) -> list[FrontierNode]:
        """Return the nodes that are to get children now; none ends the tree."""
        ...

    def take(self, node: int, offer: Offer) -> None:
        """Give an asked node its children. Nodes the drafter says nothing of are not told of: they stay leaves."""
        ...

    def grown(self) -> Grown:
        """Return the finished tree."""
        ...


class Keeping:
    """A strategy that keeps every node it adds."""

    def __init__(self, tree: GrowingTree) -> None:
        self.tree = tree
        self.expansion: Expansion = tree.row.expansion

    @property
    def num_left(self) -> int:
        """Nodes that may still be added."""
        return self.expansion.max_nodes - (len(self.tree.parents) - 1)

    def grown(self) -> Grown:
        """Return the tree as it is."""
        tree = self.tree.frozen()
        probs_rows = tuple(row if drawn else None for row, drawn in zip(self.tree.probs_rows, tree.draws, strict=True))
        return Grown(tree, probs_rows, frozenset(self.tree.fed), {})


def num_draws(expansion: Expansion, depth: int, num_paths: int) -> int:
    """Return how many children are drawn for a node at `depth` through which `num_paths` sampled paths pass."""
    if depth >= expansion.max_depth:
        return 0
    return num_paths * expansion.branches if depth == expansion.trunk else num_paths


class Delayed(Keeping):
    """A trunk, then branches: level by level, as many draws for a node as paths pass through it."""

    def __init__(self, tree: GrowingTree) -> None:
        super().__init__(tree)
        self._frontier = Counter({ROOT: 1})  # paths through each node of the last level

    def asks(self) -> list[FrontierNode]:
        """Return the level, but for nodes at the end."""
        level, self._frontier = self._frontier, Counter()
        counts = {node: num_draws(self.expansion, self.tree.depths[node], paths) for node, paths in level.items()}
        return [FrontierNode(self.tree, node, count) for node, count in counts.items() if count]

    def take(self, node: int, offer: Offer) -> None:
        """Add all."""
        self._frontier.update(self.tree.add(node, token_id) for token_id in offer.token_ids)


class Static(Keeping):
    """A given shape, level by level: the first child of a node takes the first place below it, and so on (Sequoia)."""

    def __init__(self, tree: GrowingTree, topology: Topology) -> None:
        super().__init__(tree)
        self._places: dict[int, Topology] = {ROOT: topology}
        self._level = [ROOT]

    def asks(self) -> list[FrontierNode]:
        """Return the level's nodes that have places below them."""
        level, self._level = self._level, []
        return [FrontierNode(self.tree, node, count) for node in level if (count := len(self._places[node].children))]

    def take(self, node: int, offer: Offer) -> None:
        """Add all."""
        for token_id, place in zip(offer.token_ids, self._places[node].children, strict=False):
            child = self.tree.add(node, token_id)
            self._places[child] = place
            self._level.append(child)
