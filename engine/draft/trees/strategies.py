"""Growth strategies: which nodes of a tree get children, and how many. The Protocol, and the trees of fixed shape.

A strategy sees one tree and its draft probabilities, neither drafters nor other trees. It decides about a token before the token
is sampled, and a sampled token is never dropped. So every allowed pair of verifier and tree is exact (docs/verification.md).
"""

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from engine.core.tree import ROOT, Expansion, TokenTree
from engine.draft.drafter import FrontierNode, GrowingTree
from engine.draft.trees.grower import NodeValues
from engine.draft.trees.sampling import ChildCandidates
from engine.draft.trees.topology import Topology


@dataclass(frozen=True)
class FinishedTree:
    """A finished tree.

    `probs_rows` are the rows of the distributions from which children were sampled. `fed` are the nodes whose keys the drafter
    has cached. `candidates` are by node; `node_values` are set for a noise-aware tree.
    """

    tree: TokenTree
    probs_rows: tuple[int | None, ...]
    fed: frozenset[int]
    candidates: dict[int, ChildCandidates]
    node_values: NodeValues | None = None


class Strategy(Protocol):
    """Grows one tree, round by round. Each node is in the frontier once."""

    tree: GrowingTree

    def frontier(self) -> list[FrontierNode]:
        """Return the nodes to expand in this round; an empty list ends the tree."""
        ...

    def expand(self, node: int, candidates: ChildCandidates) -> None:
        """Add children to a frontier node. It is not called for nodes without a proposal: they stay leaves."""
        ...

    def finish(self) -> FinishedTree:
        """Return the finished tree."""
        ...


class AppendOnlyStrategy:
    """A strategy that keeps every node it adds."""

    def __init__(self, tree: GrowingTree) -> None:
        self.tree = tree
        self.expansion: Expansion = tree.row.expansion

    @property
    def num_left(self) -> int:
        """Nodes that may still be added."""
        return self.expansion.max_nodes - (len(self.tree.parents) - 1)

    def finish(self) -> FinishedTree:
        """Return the tree."""
        tree = self.tree.frozen()
        probs_rows = tuple(row if drawn else None for row, drawn in zip(self.tree.probs_rows, tree.draws, strict=True))
        return FinishedTree(tree, probs_rows, frozenset(self.tree.fed), {})


def num_draws(expansion: Expansion, depth: int, num_paths: int) -> int:
    """Return how many children to sample for a node at `depth` through which `num_paths` sampled paths pass."""
    if depth >= expansion.max_depth:
        return 0
    return num_paths * expansion.branches if depth == expansion.trunk else num_paths


class Delayed(AppendOnlyStrategy):
    """A trunk, then branches: level by level, one sample for each path through a node."""

    def __init__(self, tree: GrowingTree) -> None:
        super().__init__(tree)
        self._frontier = Counter({ROOT: 1})  # paths through each node of the last level

    def frontier(self) -> list[FrontierNode]:
        """Return the level without the nodes at full depth."""
        level, self._frontier = self._frontier, Counter()
        counts = {node: num_draws(self.expansion, self.tree.depths[node], paths) for node, paths in level.items()}
        return [FrontierNode(self.tree, node, count) for node, count in counts.items() if count]

    def expand(self, node: int, candidates: ChildCandidates) -> None:
        """Add all candidates."""
        self._frontier.update(self.tree.add(node, token_id) for token_id in candidates.token_ids)


class Static(AppendOnlyStrategy):
    """A given shape, level by level: child i of a node takes place i of the shape (Sequoia)."""

    def __init__(self, tree: GrowingTree, topology: Topology) -> None:
        super().__init__(tree)
        self._places: dict[int, Topology] = {ROOT: topology}
        self._level = [ROOT]

    def frontier(self) -> list[FrontierNode]:
        """Return the level's nodes that have places below them."""
        level, self._level = self._level, []
        return [FrontierNode(self.tree, node, count) for node in level if (count := len(self._places[node].children))]

    def expand(self, node: int, candidates: ChildCandidates) -> None:
        """Add all candidates."""
        for token_id, place in zip(candidates.token_ids, self._places[node].children, strict=False):
            child = self.tree.add(node, token_id)
            self._places[child] = place
            self._level.append(child)
