"""What past steps taught about acceptance: by sibling rank, and how far a draft law and a position's noise can be trusted.

Every growth policy that looks at the past alone is lossless, so this may learn while it serves. Owned by the engine's one thread.
Shape key: N nodes, S best tokens of a node, W weights.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.plan import Row
from engine.tree import TokenTree

_MEMORY = 0.999  # weight of a past node for each new one
_FITTED_TOGETHER = 16  # observations of an agreement


class RankAcceptance:
    """The chance that the sibling of each rank is the accepted one, given that the parent is. Forgets slowly.

    Chances are steps of .02 and never less, so that shapes change seldom and no rank is given up for good. The last rank that is
    counted stands for all further ones.
    """

    _STEP = 0.02

    def __init__(self, prior: Sequence[float] = (0.65, 0.12, 0.05, 0.03, 0.02, 0.02, 0.02, 0.02), weight: float = 50.0) -> None:
        self._accepted = weight * np.asarray(prior)
        self._tried = np.full(len(prior), weight)

    def chances(self, num_ranks: int) -> tuple[float, ...]:
        """Return the chances of the first ranks."""
        steps = np.maximum(1.0, np.round(self._accepted / self._tried / self._STEP))
        chances = [float(step * self._STEP) for step in steps]
        return (*chances[:num_ranks], *chances[-1:] * (num_ranks - len(chances)))

    def observe(self, tree: TokenTree, path: Sequence[int]) -> None:
        """Learn from each node of the path that had children: one of them is on the path, or none is."""
        for node, following in zip(path, [*path[1:], None], strict=True):
            children = tree.children[node][: len(self._tried)]
            tried = slice(len(children))
            self._tried[tried] = _MEMORY * self._tried[tried] + 1.0
            self._accepted[tried] *= _MEMORY
            if following in children:
                self._accepted[children.index(following)] += 1.0


class OddsAcceptance:
    """The chance that a child is accepted, its elder siblings refused, by rank and draft probability among what they left.

    DySpec takes that probability itself for the chance. But a drawn token was likely to be drawn: even from a flat law it is
    accepted with 1 - TV, far more often than its own probability says. How often, the past tells.
    """

    _EDGES = np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95, 0.99])
    _NUM_RANKS = 4  # the last stands for all further ones

    def __init__(self, weight: float = 10.0) -> None:
        odds = np.concatenate([[0.01], (self._EDGES[1:] + self._EDGES[:-1]) / 2, [0.97, 0.995]])
        prior = [0.4 + 0.58 * odds, *(0.15 + 0.75 * odds for _ in range(self._NUM_RANKS - 1))]
        self._accepted = weight * np.stack(prior)
        self._tried = np.full(self._accepted.shape, weight)

    def chance(self, rank: int, odds: float) -> float:
        """Return the chance for the child of a rank with these odds among what was left."""
        place = self._place(rank, odds)
        return float(self._accepted[place] / self._tried[place])

    def observe(self, rank: int, odds: float, is_accepted: bool) -> None:
        """Learn what became of a child that was tried."""
        place = self._place(rank, odds)
        self._tried[place] = _MEMORY * self._tried[place] + 1.0
        self._accepted[place] = _MEMORY * self._accepted[place] + is_accepted

    def _place(self, rank: int, odds: float) -> tuple[int, int]:
        return min(rank, self._NUM_RANKS - 1), int(np.searchsorted(self._EDGES, odds))


class Agreement:
    """Which token the target takes where its noise is known: how much a draft law says about that, and how much the noise.

    With noise g and temperature t the target takes the token with the largest log p + t g, p and q being laws at temperature 1. What is
    known of it before is q: the target takes token j with a probability in proportion to exp(a log q_j + b t g_j). Were q the target's
    own law, both weights would be large. It is not, and a target is surer than a drafter that is right about what it cannot know: its
    law's best token then takes more noise to miss than the draft's would, so b is less than a. `sharpness` is a / b: tokens ranked by
    sharpness * log q + t g are ranked by their chances. Of a greedy row, which has no noise, log q alone counts.

    Both are fitted while it serves, by the likelihood of what came out, which has one maximum: a step of Newton's method for some
    observations together, from what was known of the weights before them. One pair serves all temperatures.
    """

    _START = np.array([0.9, 0.5])
    _WEIGHT = 20.0  # of the start, in observations that say one unit of information each
    _LEAST, _MOST = 0.02, 20.0  # of a weight
    _STEP = 1.5  # by which factor a weight changes at most in one step
    _SHARPNESS = (0.25, 8.0)

    def __init__(self) -> None:
        self._weights_W = self._START.copy()
        self._information_WW = self._WEIGHT * np.eye(2)
        self._seen: list[tuple[Sequence[float], Sequence[float], float, int]] = []  # since the last step

    @property
    def weights(self) -> tuple[float, float]:
        """What a law's log-probabilities weigh, and what noise does: a and b."""
        law, noise = self._weights_W.tolist()
        return law, noise

    @property
    def sharpness(self) -> float:
        """How many times log q counts beside the noise."""
        law, noise = self.weights
        least, most = self._SHARPNESS
        return min(max(law / noise, least), most)

    def of_rank(self, temperature: float) -> float:
        """Return the scale of what ranks tokens, sharpness * log q at this temperature + g: chances are in proportion to exp(rank / scale)."""
        return self.sharpness / (temperature * self.weights[0])

    def chances(self, odds: Sequence[float], noise: Sequence[float], temperature: float) -> NDArray[np.float64]:
        """Return for each of a node's best tokens the chance that the target agrees on it.

        `odds` are the law's at this temperature; `noise` may be empty.
        """
        features_SW = _features(odds, noise, 1.0)
        ranks_S = features_SW @ np.array([self.sharpness, 1.0]) / self.of_rank(temperature)
        weights_S = np.exp(ranks_S - ranks_S.max())
        return np.asarray(weights_S / weights_S.sum())

    def observe(self, odds: Sequence[float], noise: Sequence[float], temperature: float, rank: int | None) -> None:
        """Learn that the target took the token of this rank, or (None) one that is not among the best: the last stands for it."""
        self._seen.append((odds, noise, temperature, len(odds) - 1 if rank is None else rank))
        if len(self._seen) == _FITTED_TOGETHER:
            self._step()

    def _step(self) -> None:
        seen, self._seen = self._seen, []
        features_NSW = np.zeros((len(seen), max(len(odds) for odds, _, _, _ in seen), 2))
        is_there_NS = np.zeros(features_NSW.shape[:2], dtype=bool)
        for own_SW, is_there_S, (odds, noise, temperature, _) in zip(features_NSW, is_there_NS, seen, strict=True):
            own_SW[: len(odds)] = _features(odds, noise, temperature)
            is_there_S[: len(odds)] = True
        ranks_NS = np.where(is_there_NS, features_NSW @ self._weights_W, -np.inf)
        chances_NS = np.exp(ranks_NS - ranks_NS.max(1, keepdims=True))
        chances_NS /= chances_NS.sum(1, keepdims=True)
        expected_NW = np.einsum("ns,nsw->nw", chances_NS, features_NSW)
        taken_NW = features_NSW[np.arange(len(seen)), [place for *_, place in seen]]
        beside_NSW = features_NSW - expected_NW[:, None]
        memory_N = _MEMORY ** np.arange(len(seen) - 1, -1, -1)
        self._information_WW *= _MEMORY ** len(seen)
        self._information_WW += np.einsum("n,ns,nsw,nsv->wv", memory_N, chances_NS, beside_NSW, beside_NSW)
        gradient_W = memory_N @ (taken_NW - expected_NW)
        step_W = np.linalg.solve(self._information_WW + 1e-6 * np.eye(2), gradient_W)
        moved_W = np.clip(self._weights_W + step_W, self._weights_W / self._STEP, self._weights_W * self._STEP)
        self._weights_W = np.clip(moved_W, self._LEAST, self._MOST)


_LEAST_ODDS = 1e-40  # of a token that can come: what is less was lost in rounding


def _features(odds: Sequence[float], noise: Sequence[float], temperature: float) -> NDArray[np.float64]:
    """Return what a token is judged by, in units of the law at temperature 1: log q, and the noise."""
    features_SW = np.zeros((len(odds), 2))
    features_SW[:, 0] = temperature * np.log(np.maximum(odds, _LEAST_ODDS))
    if len(noise):
        features_SW[:, 1] = np.multiply(temperature, noise)
    return features_SW


class Reliability:
    """What came of tokens beside the chance that Agreement gave them, given that their parents came: a share by chance.

    A model's tokens and those that are rather cached text's are told apart: a mixture trusts the cache more than it has earned,
    because what the cache says where a model doubts it comes less often than what it says anywhere.
    """

    EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.92, 0.985)
    _START = (1.0, 0.75)  # shares, of a model's and of cached ones
    _WEIGHTS = (40.0, 8.0)  # of which so many expected tokens are believed

    def __init__(self) -> None:
        self._came = [[start * weight] * (1 + len(self.EDGES)) for start, weight in zip(self._START, self._WEIGHTS, strict=True)]
        self._expected = [[weight] * (1 + len(self.EDGES)) for weight in self._WEIGHTS]

    @property
    def shares(self) -> list[list[float]]:
        """A row of the model's and one of the cache's, by chance: a share more than there are edges."""
        return [
            [one / other for one, other in zip(came, expected, strict=True)]
            for came, expected in zip(self._came, self._expected, strict=True)
        ]

    def corrected(self, chance: float, is_cached: bool) -> float:
        """Return what a chance has been worth."""
        place = bisect_right(self.EDGES, chance)
        return min(1.0, chance * (self._came[is_cached][place] / self._expected[is_cached][place]))

    def observe(self, chance: float, is_cached: bool, is_accepted: bool) -> None:
        """Learn what became of a token that had this chance, uncorrected; its parent was accepted."""
        place = bisect_right(self.EDGES, chance)
        for sums, seen in ((self._came, float(is_accepted)), (self._expected, chance)):
            sums[is_cached][place] = _MEMORY * sums[is_cached][place] + seen


class Calibration:
    """All that growth has learnt of one rule."""

    def __init__(self) -> None:
        self.ranks = RankAcceptance()
        self.odds = OddsAcceptance()
        self.agreement = Agreement()
        self.reliability = Reliability()


class Calibrations:
    """What was learnt, by the rule that judges: what NSS refuses, Traversal may accept."""

    def __init__(self) -> None:
        self._by_rule: dict[str, Calibration] = defaultdict(Calibration)

    @property
    def known(self) -> Mapping[str, Calibration]:
        """What was learnt by each rule."""
        return self._by_rule

    def of(self, row: Row) -> Calibration:
        """Return what concerns a row."""
        return self._by_rule["greedy" if row.sampling.is_greedy else row.verifier]
