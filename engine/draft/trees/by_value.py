"""Sampled trees whose shape depends on the values of their places: a place is valued before its token is sampled.

A place is the next child below a node. Its value depends on tokens sampled before, never on its own token, so these trees are
non-anticipating. A sampled token is never dropped. Source of threshold and heap: DySpec (arXiv 2410.11744).
"""

import heapq
import itertools
import math
from dataclasses import replace

from engine.core.tree import ROOT
from engine.draft.drafter import FrontierNode, GrowingTree
from engine.draft.trees.calibration import ProbAcceptance
from engine.draft.trees.sampling import ChildCandidates
from engine.draft.trees.strategies import AppendOnlyStrategy, FinishedTree


class Threshold(AppendOnlyStrategy):
    """Samples siblings level by level while the remainder of their parent's value exceeds a threshold (DySpec).

    A node's value is the product of the draft probabilities on its path. The threshold is 1 / (max_nodes + 1).
    """

    def __init__(self, tree: GrowingTree) -> None:
        super().__init__(tree)
        self._threshold = 1.0 / (self.expansion.max_nodes + 1)
        self._values = {ROOT: 1.0}
        self._level = [ROOT]

    def frontier(self) -> list[FrontierNode]:
        """Return the level's nodes above the threshold, best first."""
        level, self._level = self._level, []
        chosen = [
            node for node in level if self.tree.depths[node] < self.expansion.depth and self._values[node] > self._threshold
        ]
        chosen.sort(key=lambda node: -self._values[node])
        return [FrontierNode(self.tree, node, self.expansion.branches) for node in chosen[: max(0, self.num_left)]]

    def expand(self, node: int, candidates: ChildCandidates) -> None:
        """Add children while the next place is above the threshold; its own token does not influence that."""
        mass = 1.0  # of the draft distribution without the earlier siblings
        for token_id, prob in zip(candidates.token_ids, candidates.probs, strict=True):
            if self._values[node] * mass <= self._threshold or self.num_left < 1:
                return
            child = self.tree.add(node, token_id)
            self._values[child] = self._values[node] * prob
            self._level.append(child)
            mass -= prob


class Heap(AppendOnlyStrategy):
    """Samples the next token at the place of the highest value until `max_nodes` is reached (DySpec's greedy tree).

    A node's value is the product of the draft probabilities on its path. A place's value is its parent's value times the draft
    probability that the earlier siblings left.
    """

    def __init__(self, tree: GrowingTree) -> None:
        super().__init__(tree)
        self._values = {ROOT: 1.0}
        self._candidates: dict[int, ChildCandidates] = {}
        self._places = [(-1.0, ROOT, 0)]  # (-value, node, rank of the next child)

    def frontier(self) -> list[FrontierNode]:
        """Sample until the best place is below a node without candidates; return all such nodes that could still get children."""
        while self._places and self.num_left > 0:
            if self._places[0][1] not in self._candidates:
                best = heapq.nsmallest(self.num_left, self._places)
                nodes = sorted(node for _, node, _ in best if node not in self._candidates)
                self._candidates.update(dict.fromkeys(nodes, _NO_CANDIDATES))  # nodes without a proposal stay leaves
                return [FrontierNode(self.tree, node, self.expansion.branches) for node in nodes]
            self._add_best()
        return []

    def expand(self, node: int, candidates: ChildCandidates) -> None:
        """Keep the candidates and value the node's first place anew."""
        self._candidates[node] = candidates
        self._places = [place for place in self._places if place[1] != node]
        self._places.append((-self._place_value(node, 0), node, 0))
        heapq.heapify(self._places)

    def finish(self) -> FinishedTree:
        """Return the tree with its candidates."""
        return replace(super().finish(), candidates=self._candidates)

    def _add_best(self) -> None:
        _, node, rank = heapq.heappop(self._places)
        token_ids = self._candidates[node].token_ids
        if rank == len(token_ids):
            return
        child = self.tree.add(node, token_ids[rank])
        self._values[child] = self._child_value(node, rank)
        if self.tree.depths[child] < self.expansion.depth:
            heapq.heappush(self._places, (-self._new_place_value(child), child, 0))
        heapq.heappush(self._places, (-self._place_value(node, rank + 1), node, rank + 1))

    def _child_value(self, node: int, rank: int) -> float:
        return self._values[node] * self._candidates[node].probs[rank]

    def _place_value(self, node: int, rank: int) -> float:
        """Return the value of a place before its token is sampled: it depends on the earlier siblings' tokens alone."""
        return self._values[node] * (1.0 - sum(self._candidates[node].probs[:rank]))

    def _new_place_value(self, node: int) -> float:
        """Return the value of the first place below a node whose draft distribution is not known yet."""
        return self._values[node]


class CalibratedHeap(Heap):
    """A heap tree with observed acceptance rates in place of draft probabilities.

    A node's value is its acceptance probability. A place's value is the acceptance probability of its token before it is sampled.
    It is estimated at the mean probability of a sample from the remaining distribution.
    """

    def __init__(self, tree: GrowingTree, acceptance: ProbAcceptance) -> None:
        super().__init__(tree)
        self._acceptance = acceptance

    def _rejection(self, node: int, rank: int) -> float:
        """Return the probability that the first `rank` children are rejected."""
        probs = conditional_probs(self._candidates[node])[:rank]
        return math.prod(1.0 - self._acceptance.chance(earlier, prob) for earlier, prob in enumerate(probs))

    def _child_value(self, node: int, rank: int) -> float:
        chance = self._acceptance.chance(rank, conditional_probs(self._candidates[node])[rank])
        return self._values[node] * self._rejection(node, rank) * chance

    def _place_value(self, node: int, rank: int) -> float:
        candidates = self._candidates[node]
        left = 1.0 - sum(candidates.probs[:rank])
        collision = candidates.collision - sum(prob * prob for prob in candidates.probs[:rank])
        mean_prob = collision / (left * left) if left > 1e-6 else 1.0
        return self._values[node] * self._rejection(node, rank) * self._acceptance.chance(rank, min(1.0, max(0.0, mean_prob)))

    def _new_place_value(self, node: int) -> float:
        return self._values[node] * self._acceptance.chance(0, 0.6)


def conditional_probs(candidates: ChildCandidates) -> list[float]:
    """Return each child's draft probability given that its earlier siblings are excluded."""
    left = [1.0 - before for before in itertools.accumulate(candidates.probs, initial=0.0)]
    return [min(1.0, prob / rest) if rest > 1e-9 else 1.0 for prob, rest in zip(candidates.probs, left, strict=False)]


class GreedySample(AppendOnlyStrategy):
    """Gives each node above a threshold its most likely tokens and one sample from the others, all in one round.

    A node's value is the product of the draft probabilities on its path. The threshold starts at 1 / max_nodes. It is lowered
    when no node is above it, so that all nodes are used.
    """

    def __init__(self, tree: GrowingTree) -> None:
        super().__init__(tree)
        self._threshold = 1.0 / self.expansion.max_nodes
        self._values = {ROOT: 1.0}
        self._leaves = [ROOT]
        self._num_rounds = 0

    def frontier(self) -> list[FrontierNode]:
        """Return the leaves above the threshold, best first, while the node budget lasts."""
        self._leaves = [node for node in self._leaves if self.tree.depths[node] < self.expansion.depth]
        self._num_rounds += 1
        if not self._leaves or self._num_rounds > 2 * self.expansion.depth:
            return []
        self._threshold = min(self._threshold, max(self._values[node] for node in self._leaves) / 2)
        frontier, left = [], self.num_left
        for node in sorted(self._leaves, key=lambda node: -self._values[node]):
            if (value := self._values[node]) > self._threshold and left > 0:
                frontier.append(FrontierNode(self.tree, node, min(self.expansion.branches, left), self._threshold / value))
                left -= frontier[-1].num_draws
        expanded = {one.node for one in frontier}
        self._leaves = [node for node in self._leaves if node not in expanded]
        return frontier

    def expand(self, node: int, candidates: ChildCandidates) -> None:
        """Add all candidates."""
        for token_id, prob in zip(candidates.token_ids, candidates.probs, strict=True):
            child = self.tree.add(node, token_id)
            self._values[child] = self._values[node] * prob
            self._leaves.append(child)


_NO_CANDIDATES = ChildCandidates((), ())
