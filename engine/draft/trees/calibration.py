"""What past steps taught about acceptance: by sibling rank, and how far a draft law and a position's noise can be trusted.

Every growth policy that looks at the past alone is lossless, so this may learn while it serves. Owned by the engine's one thread.
Shape key: N nodes, S best tokens of a node, W weights.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.core.step_plan import Row
from engine.core.tree import TokenTree

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


class _Taken(NamedTuple):
    """What a node was offered (`odds` and `noise` of its best tokens, best first), and the place of what the target took."""

    odds: Sequence[float]
    noise: Sequence[float]
    temperature: float
    place: int


class AgreementWeights:
    """Which token the target takes where its noise is known: what a draft law says of that, and what the noise does.

    With noise g and temperature t the target takes the token with the largest log p + t g, p and q being laws at temperature 1.
    That is taken to be token j with a probability in proportion to exp(a log q_j + b t g_j). The better a drafter, the larger are
    both weights. Its law is a mean over what it cannot know, and flatter than the target's: noise decides less than it would if
    q were p, so that `sharpness`, a / b, is above 1 (1.2 and 2.0 for the heads that ship). Tokens ranked by
    sharpness * log q + t g are ranked by their chances. Of a greedy row, which has no noise, a alone counts.

    Both are fitted while it serves, by the likelihood of what came out, which has one maximum: a step of Newton's method for some
    observations together, from what was known of the weights before them. At first a drafter is thought better than most are:
    who is thought worse is not asked, and nothing is learnt of it. One pair serves all temperatures but the lowest: below .05 a
    law is cut so short that hardly a second token is offered.
    """

    _START = (2.0, 2.0)
    _WEIGHT = 20.0  # of the start, in observations that say one unit of information each
    _LAW = (0.02, 20.0)  # bounds of its weight
    _SHARPNESS = (0.25, 8.0)
    _MOST_CHANGE = 1.5  # of a weight in one step, as a factor

    def __init__(self) -> None:
        self.distribution, self.noise = self._START  # a and b
        self._information_WW = self._WEIGHT * np.eye(2)
        self._seen: list[_Taken] = []  # since the last step

    @property
    def sharpness(self) -> float:
        """How many times log q counts beside the noise."""
        return self.distribution / self.noise

    def score_scale(self, temperature: float) -> float:
        """Return the scale of scores: chances are in proportion to exp(score / scale) by score sharpness * log q_t + g.

        q_t is the law at this temperature, log q_t = log q / t + some number.
        """
        return 1.0 / (self.noise * temperature)

    def chances(self, odds: Sequence[float], noise: Sequence[float], temperature: float) -> NDArray[np.float64]:
        """Return for each of a node's best tokens the chance that the target agrees on it.

        `odds` are the law's at this temperature; `noise` may be empty.
        """
        scores_S = _features(odds, noise, temperature) @ (self.distribution, self.noise)
        weights_S = np.exp(scores_S - scores_S.max())
        return np.asarray(weights_S / weights_S.sum())

    def observe(self, odds: Sequence[float], noise: Sequence[float], temperature: float, place: int | None) -> None:
        """Learn that the target took the token in this place, or (None) one that is not among the best.

        The last stands for those: the likeliest token's chance is thus what it is with misses counted.
        """
        self._seen.append(_Taken(odds, noise, temperature, len(odds) - 1 if place is None else place))
        if len(self._seen) == _FITTED_TOGETHER:
            self._fit()

    def _fit(self) -> None:
        seen, self._seen = self._seen, []
        features_NSW = np.zeros((len(seen), max(len(one.odds) for one in seen), 2))
        is_there_NS = np.zeros(features_NSW.shape[:2], dtype=bool)
        for own_SW, is_there_S, one in zip(features_NSW, is_there_NS, seen, strict=True):
            own_SW[: len(one.odds)] = _features(one.odds, one.noise, one.temperature)
            is_there_S[: len(one.odds)] = True
        weights_W = np.array([self.distribution, self.noise])
        scores_NS = np.where(is_there_NS, features_NSW @ weights_W, -np.inf)
        chances_NS = np.exp(scores_NS - scores_NS.max(1, keepdims=True))
        chances_NS /= chances_NS.sum(1, keepdims=True)
        expected_NW = np.einsum("ns,nsw->nw", chances_NS, features_NSW)
        taken_NW = features_NSW[np.arange(len(seen)), [one.place for one in seen]]
        beside_NSW = features_NSW - expected_NW[:, None]
        memory_N = _MEMORY ** np.arange(len(seen) - 1, -1, -1)
        self._information_WW *= _MEMORY ** len(seen)
        self._information_WW += np.einsum("n,ns,nsw,nsv->wv", memory_N, chances_NS, beside_NSW, beside_NSW)
        step_W = np.linalg.solve(self._information_WW + 1e-6 * np.eye(2), memory_N @ (taken_NW - expected_NW))
        distribution, noise = np.clip(weights_W + step_W, weights_W / self._MOST_CHANGE, weights_W * self._MOST_CHANGE).tolist()
        self.distribution = min(max(distribution, self._LAW[0]), self._LAW[1])
        self.noise = min(max(noise, self.distribution / self._SHARPNESS[1]), self.distribution / self._SHARPNESS[0])


_LEAST_ODDS = 1e-40  # of a token that can come: what is less was lost in rounding


def _features(odds: Sequence[float], noise: Sequence[float], temperature: float) -> NDArray[np.float64]:
    """Return what tokens are judged by, in units of the law at temperature 1: log q, and the noise. [S, W]"""
    features_SW = np.zeros((len(odds), 2))
    features_SW[:, 0] = temperature * np.log(np.maximum(odds, _LEAST_ODDS))
    if len(noise):
        features_SW[:, 1] = np.multiply(temperature, noise)
    return features_SW


class Reliability:
    """What came of tokens beside the chance that AgreementWeights gave them, given that their parents came: a share by chance.

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
        self.agreement = AgreementWeights()
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
