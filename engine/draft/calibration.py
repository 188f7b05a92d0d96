"""What past steps taught about acceptance: by sibling rank, and how far perturbed scores can be trusted.

Every growth policy that looks at the past alone is lossless, so this may learn while it serves. Owned by the engine's one thread.
Shape key: S best scores of a node, G grid of scales.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.plan import Row
from engine.tree import TokenTree

_MEMORY = 0.999  # weight of a past node for each new one
_FITTED_TOGETHER = 16  # of a scale's observations


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


class AgreementScale:
    """How the target's perturbed scores scatter around the drafter's: one scale, fitted while it serves.

    At a position with noise g the drafter scores s = log q + g, the target log p + g. If their difference log p - log q were
    independent Gumbel noise of scale b at every token, the target's best token would be drawn from softmax(s / b): a wide gap of
    the best two scores then means certain agreement. b, `scale`, is the one of a grid with the largest likelihood of what came
    out. Of a greedy row, without noise, the scores are log q, and b says how much likelier its best tokens are than the drafter
    believes.
    """

    def __init__(self, start: float = 0.5, weight: float = 20.0) -> None:
        self._scales_G = np.geomspace(0.05, 4.0, 24)
        self._fit_G = -weight * np.log(self._scales_G / start) ** 2
        self._seen: list[tuple[Sequence[float], int]] = []  # since the last fit: scores, and the place of what was taken
        self.scale = self._likeliest()

    def _likeliest(self) -> float:
        return float(self._scales_G[self._fit_G.argmax()])

    def chances(self, scores: Sequence[float]) -> NDArray[np.float64]:
        """Return for each of a node's best scores, best first, the chance that the target agrees on its token."""
        scaled_S = np.asarray(scores) / self.scale
        weights_S = np.exp(scaled_S - scaled_S[0])
        return np.asarray(weights_S / weights_S.sum())

    def observe(self, scores: Sequence[float], rank: int | None) -> None:
        """Learn that the target took the token of this rank, or (None) one that is not among the best.

        The fit is made anew when some have come together: one or many take as long.
        """
        self._seen.append((scores, len(scores) - 1 if rank is None else rank))
        if len(self._seen) == _FITTED_TOGETHER:
            self._fit()

    def _fit(self) -> None:
        seen, self._seen = self._seen, []
        scores_NS = np.full((len(seen), max(len(scores) for scores, _ in seen)), -np.inf)
        for row_S, (scores, _) in zip(scores_NS, seen, strict=True):
            row_S[: len(scores)] = scores
        shifted_GNS = (scores_NS - scores_NS[:, :1]) / self._scales_G[:, None, None]
        taken_GN = shifted_GNS[:, np.arange(len(seen)), [place for _, place in seen]] - np.log(np.exp(shifted_GNS).sum(-1))
        memory_N = _MEMORY ** np.arange(len(seen) - 1, -1, -1)
        self._fit_G = _MEMORY ** len(seen) * self._fit_G + taken_GN @ memory_N
        self.scale = self._likeliest()


class Reliability:
    """What came of tokens beside the chance that the scale gave them, given that their parents came: a share by chance.

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
        self.agreement = AgreementScale()
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
