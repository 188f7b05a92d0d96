"""Trees that find their shape while they are drawn: each place is valued before its token is, and the best ones are drawn from.

Knows one tree, draft probabilities and what acceptance was observed. What a place is worth depends on tokens drawn before, never
on its own: these trees are non-anticipating, and a drawn token stays. Source of threshold and heap: DySpec (arXiv 2410.11744).
"""

import heapq
import itertools
import math
from dataclasses import replace

from engine.core.tree import ROOT
from engine.draft.drafter import FrontierNode, GrowingTree
from engine.draft.trees.calibration import OddsAcceptance
from engine.draft.trees.sampling import Offer
from engine.draft.trees.strategies import Grown, Keeping


class Threshold(Keeping):
    """Level by level, siblings are drawn while what is left of their parent's value exceeds a threshold (DySpec).

    A node is worth the product of the draft probabilities on its path. The threshold is 1 / (max_nodes + 1).
    """

    def __init__(self, tree: GrowingTree) -> None:
        super().__init__(tree)
        self._least = 1.0 / (self.expansion.max_nodes + 1)
        self._values = {ROOT: 1.0}
        self._level = [ROOT]

    def asks(self) -> list[FrontierNode]:
        """Return the level's nodes above the threshold, best first, while there are nodes left."""
        level, self._level = self._level, []
        worthy = [node for node in level if self._values[node] > self._least and self.tree.depths[node] < self.expansion.depth]
        worthy.sort(key=lambda node: -self._values[node])
        return [FrontierNode(self.tree, node, self.expansion.branches) for node in worthy[: max(0, self.num_left)]]

    def take(self, node: int, offer: Offer) -> None:
        """Add children while the next one's place is worth it; whether it is does not depend on its own token."""
        mass = 1.0  # of the draft law without the elder siblings
        for token_id, odds in zip(offer.token_ids, offer.odds, strict=True):
            if self._values[node] * mass <= self._least or self.num_left < 1:
                return
            child = self.tree.add(node, token_id)
            self._values[child] = self._values[node] * odds
            self._level.append(child)
            mass -= odds


class Heap(Keeping):
    """The most valuable place anywhere gets the next token, until the nodes are used up (DySpec's greedy tree).

    A place is the next sibling below a node, worth the node's value times the draft mass its elder siblings left. A node is worth
    the product of the draft probabilities on its path.
    """

    def __init__(self, tree: GrowingTree) -> None:
        super().__init__(tree)
        self._values = {ROOT: 1.0}
        self._offers: dict[int, Offer] = {}
        self._places = [(-1.0, ROOT, 0)]  # (-value, node, rank of the next child)

    def asks(self) -> list[FrontierNode]:
        """Draw until the best place is below a node not asked for; return all such nodes that could still be drawn from."""
        while self._places and self.num_left > 0:
            if self._places[0][1] not in self._offers:
                best = heapq.nsmallest(self.num_left, self._places)
                nodes = sorted(node for _, node, _ in best if node not in self._offers)
                self._offers.update(dict.fromkeys(nodes, _NOTHING))  # until they are answered
                return [FrontierNode(self.tree, node, self.expansion.branches) for node in nodes]
            self._draw()
        return []

    def take(self, node: int, offer: Offer) -> None:
        """Note what can be drawn there, and what the place is worth now that its law is known."""
        self._offers[node] = offer
        self._places = [place for place in self._places if place[1] != node]
        self._places.append((-self._place_value(node, 0), node, 0))
        heapq.heapify(self._places)

    def grown(self) -> Grown:
        """Return the tree as it is, with what its nodes were offered."""
        return replace(super().grown(), offers=self._offers)

    def _draw(self) -> None:
        _, node, rank = heapq.heappop(self._places)
        offer = self._offers[node]
        if rank == len(offer.token_ids):
            return
        child = self.tree.add(node, offer.token_ids[rank])
        self._values[child] = self._child_value(node, rank)
        if self.tree.depths[child] < self.expansion.depth:
            heapq.heappush(self._places, (-self._new_place_value(child), child, 0))
        heapq.heappush(self._places, (-self._place_value(node, rank + 1), node, rank + 1))

    def _child_value(self, node: int, rank: int) -> float:
        return self._values[node] * self._offers[node].odds[rank]

    def _place_value(self, node: int, rank: int) -> float:
        """Return the worth of a place before its token is drawn: it depends on the elder siblings' tokens alone."""
        return self._values[node] * (1.0 - sum(self._offers[node].odds[:rank]))

    def _new_place_value(self, node: int) -> float:
        """Return the worth of the first place below a node whose law is not known yet."""
        return self._values[node]


class CalibratedHeap(Heap):
    """The same with chances of acceptance as they were observed, in place of draft probabilities.

    A node is worth the chance that it is accepted; a place the chance that its token will be, before that is drawn: by the mean
    probability of a draw from what is left.
    """

    def __init__(self, tree: GrowingTree, acceptance: OddsAcceptance) -> None:
        super().__init__(tree)
        self._acceptance = acceptance

    def _refused(self, node: int, rank: int) -> float:
        """Return the chance that the first `rank` children are refused."""
        chances = conditional_odds(self._offers[node])[:rank]
        return math.prod(1.0 - self._acceptance.chance(elder, odds) for elder, odds in enumerate(chances))

    def _child_value(self, node: int, rank: int) -> float:
        chance = self._acceptance.chance(rank, conditional_odds(self._offers[node])[rank])
        return self._values[node] * self._refused(node, rank) * chance

    def _place_value(self, node: int, rank: int) -> float:
        offer = self._offers[node]
        left = 1.0 - sum(offer.odds[:rank])
        mean_odds = (offer.collision - sum(odds * odds for odds in offer.odds[:rank])) / (left * left) if left > 1e-6 else 1.0
        return self._values[node] * self._refused(node, rank) * self._acceptance.chance(rank, min(1.0, max(0.0, mean_odds)))

    def _new_place_value(self, node: int) -> float:
        return self._values[node] * self._acceptance.chance(0, 0.6)


def conditional_odds(offer: Offer) -> list[float]:
    """Return each child's draft probability among what its elder siblings left."""
    left = [1.0 - before for before in itertools.accumulate(offer.odds, initial=0.0)]
    return [min(1.0, odds / rest) if rest > 1e-9 else 1.0 for odds, rest in zip(offer.odds, left, strict=False)]


class GreedySample(Keeping):
    """Round by round, nodes above a threshold get their likeliest tokens and one sample off them, all at once.

    A node is worth the product of the draft probabilities on its path. The threshold begins at 1 / max_nodes and sinks when no
    node is above it, so that all nodes are used.
    """

    def __init__(self, tree: GrowingTree) -> None:
        super().__init__(tree)
        self._least = 1.0 / self.expansion.max_nodes
        self._values = {ROOT: 1.0}
        self._waiting = [ROOT]
        self._num_rounds = 0

    def asks(self) -> list[FrontierNode]:
        """Return the waiting nodes above the threshold, best first, as many as may all get their children."""
        self._waiting = [node for node in self._waiting if self.tree.depths[node] < self.expansion.depth]
        self._num_rounds += 1
        if not self._waiting or self._num_rounds > 2 * self.expansion.depth:
            return []
        self._least = min(self._least, max(self._values[node] for node in self._waiting) / 2)
        asks, left = [], self.num_left
        for node in sorted(self._waiting, key=lambda node: -self._values[node]):
            if self._values[node] > self._least and left > 0:
                asks.append(FrontierNode(self.tree, node, min(self.expansion.branches, left), self._least / self._values[node]))
                left -= asks[-1].num_draws
        asked = {ask.node for ask in asks}
        self._waiting = [node for node in self._waiting if node not in asked]
        return asks

    def take(self, node: int, offer: Offer) -> None:
        """Add all."""
        for token_id, odds in zip(offer.token_ids, offer.odds, strict=True):
            child = self.tree.add(node, token_id)
            self._values[child] = self._values[node] * odds
            self._waiting.append(child)


_NOTHING = Offer((), ())
