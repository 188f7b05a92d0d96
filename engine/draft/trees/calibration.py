"""Acceptance statistics of past steps: by sibling rank, by draft probability, and by score with the position's noise.

Tree growth that depends on the past alone is lossless, so these are learned while serving. Owned by the engine thread.
Shape key: N nodes, S best tokens of a node, W weights.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.core.step_plan import Row
from engine.core.tree import TokenTree

_DECAY = 0.999  # of the weight of past nodes for each new node
_FIT_BATCH = (16, 64)  # least and most observations of a fit of AgreementWeights, else an eighth of those before


class RankAcceptance:
    """The probability that the sibling of each rank is accepted, given that the parent is, with exponential decay.

    Probabilities are positive multiples of a step. So shapes change rarely, and every rank keeps a chance to be tried. The last
    counted rank represents all further ranks.
    """

    _STEP = 0.02

    def __init__(self, prior: Sequence[float] = (0.65, 0.12, 0.05, 0.03, 0.02, 0.02, 0.02, 0.02), weight: float = 50.0) -> None:
        self._accepted = weight * np.asarray(prior)
        self._tried = np.full(len(prior), weight)

    def chances(self, num_ranks: int) -> tuple[float, ...]:
        """Return the probabilities of the first ranks."""
        steps = np.maximum(1.0, np.round(self._accepted / self._tried / self._STEP))
        chances = [float(step * self._STEP) for step in steps]
        return (*chances[:num_ranks], *chances[-1:] * (num_ranks - len(chances)))

    def observe(self, tree: TokenTree, path: Sequence[int]) -> None:
        """Learn from each node of the path that had children: at most one of them is on the path."""
        for node, following in zip(path, [*path[1:], None], strict=True):
            children = tree.children[node][: len(self._tried)]
            tried = slice(len(children))
            self._tried[tried] = _DECAY * self._tried[tried] + 1.0
            self._accepted[tried] *= _DECAY
            if following in children:
                self._accepted[children.index(following)] += 1.0


class ProbAcceptance:
    """The probability that a child is accepted after its earlier siblings were rejected, by rank and draft probability.

    The draft probability is conditional: earlier siblings are excluded. DySpec uses it directly as acceptance probability. But a
    sampled token is accepted with probability 1 - TV on average, far above its draft probability if the distribution is flat.
    """

    _EDGES = np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95, 0.99])
    _NUM_RANKS = 4  # the last represents all further ranks

    def __init__(self, weight: float = 10.0) -> None:
        probs = np.concatenate([[0.01], (self._EDGES[1:] + self._EDGES[:-1]) / 2, [0.97, 0.995]])
        prior = [0.4 + 0.58 * probs, *(0.15 + 0.75 * probs for _ in range(self._NUM_RANKS - 1))]
        self._accepted = weight * np.stack(prior)
        self._tried = np.full(self._accepted.shape, weight)

    def chance(self, rank: int, prob: float) -> float:
        """Return the acceptance probability of a child of this rank and conditional draft probability."""
        index = self._bin(rank, prob)
        return float(self._accepted[index] / self._tried[index])

    def observe(self, rank: int, prob: float, is_accepted: bool) -> None:
        """Learn from a child that was verified."""
        index = self._bin(rank, prob)
        self._tried[index] = _DECAY * self._tried[index] + 1.0
        self._accepted[index] = _DECAY * self._accepted[index] + is_accepted

    def _bin(self, rank: int, prob: float) -> tuple[int, int]:
        return min(rank, self._NUM_RANKS - 1), int(np.searchsorted(self._EDGES, prob))


Numbers = Sequence[float] | NDArray[np.float32] | NDArray[np.float64]


class _Observation(msgspec.Struct, frozen=True, eq=False):
    """A node's best tokens, best first, and the index of the token that the target `selected`."""

    probs: Numbers
    noise: Numbers
    temperature: float
    selected: int


class AgreementWeights:
    """A logistic model of the token that the target selects, by draft probability and the position's known noise.

    With noise g and temperature t the target selects the token with the largest log p + t g. Here p and q are the target's and
    the drafter's distributions at temperature 1. The model selects token j with probability proportional to
    exp(a log q_j + b t g_j). A better drafter has larger weights. A draft distribution is usually flatter than the target's, so
    `sharpness`, a / b, is above 1. Ranking by sharpness * log q + t g is ranking by the modelled probability. Greedy rows have no
    noise and use only a.

    Both weights are fitted while serving by maximum likelihood: the log-likelihood is concave. Each batch of observations is one
    step of Newton's method with exponentially decaying information. The initial weights are optimistic: a drafter with low
    weights gets no trees, and then nothing could be learned. One pair of weights serves all temperatures.
    """

    _START = (2.0, 2.0)
    _PRIOR_INFORMATION = 20.0  # of the start, in observations of unit information
    _LOG_PROB_BOUNDS = (0.02, 20.0)  # of a
    _SHARPNESS_BOUNDS = (0.25, 8.0)
    _MAX_CHANGE = 1.5  # of a weight in one step, as a factor

    def __init__(self) -> None:
        self.log_prob_weight, self.noise_weight = self._START  # a and b
        self._information_WW = self._PRIOR_INFORMATION * np.eye(2)
        self._observations: list[_Observation] = []  # since the last step
        self._num_fitted = 0

    @property
    def sharpness(self) -> float:
        """The weight of log q relative to the noise."""
        return self.log_prob_weight / self.noise_weight

    def score_scale(self, temperature: float) -> float:
        """Return the scale of scores sharpness * log q_t + g: probabilities are proportional to exp(score / scale).

        q_t is the draft distribution at this temperature, log q_t = log q / t + constant.
        """
        return 1.0 / (self.noise_weight * temperature)

    def chances(self, probs: Sequence[float], noise: Sequence[float], temperature: float) -> NDArray[np.float64]:
        """Return the probability that the target selects each of a node's best tokens.

        `probs` are draft probabilities at this temperature; `noise` may be empty.
        """
        scores_S = _features(probs, noise, temperature) @ (self.log_prob_weight, self.noise_weight)
        weights_S = np.exp(scores_S - scores_S.max())
        return np.asarray(weights_S / weights_S.sum())

    def observe(self, probs: Numbers, noise: Numbers, temperature: float, index: int | None) -> None:
        """Learn that the target selected the token of this index, or (None) a token that is not among the best.

        The last of the best tokens represents all others, so that misses count against the first tokens.
        """
        self._observations.append(_Observation(probs, noise, temperature, len(probs) - 1 if index is None else index))
        if len(self._observations) == min(max(_FIT_BATCH[0], self._num_fitted // 8), _FIT_BATCH[1]):
            self._num_fitted += len(self._observations)
            self._fit()

    def _fit(self) -> None:
        batch, self._observations = self._observations, []
        probs_NS, noise_NS = np.zeros((2, len(batch), max(len(one.probs) for one in batch)))
        for probs_S, noise_S, one in zip(probs_NS, noise_NS, batch, strict=True):
            probs_S[: len(one.probs)] = one.probs
            noise_S[: len(one.noise)] = one.noise
        units_N1 = np.array([[one.temperature] for one in batch])
        features_WNS = np.stack((np.log(np.maximum(probs_NS, MIN_PROB)), noise_NS)) * units_N1
        weights_W = np.array([self.log_prob_weight, self.noise_weight])
        scores_NS = np.tensordot(weights_W, features_WNS, 1)
        for scores_S, one in zip(scores_NS, batch, strict=True):
            scores_S[len(one.probs) :] = -np.inf
        chances_NS = np.exp(scores_NS - scores_NS.max(1, keepdims=True))
        chances_NS /= chances_NS.sum(1, keepdims=True)
        centered_WNS = features_WNS - (features_WNS * chances_NS).sum(2, keepdims=True)
        selected_WN = centered_WNS[:, np.arange(len(batch)), [one.selected for one in batch]]
        decay_N = _DECAY ** np.arange(len(batch) - 1, -1, -1)
        self._information_WW *= _DECAY ** len(batch)
        self._information_WW += np.tensordot(centered_WNS * (decay_N[:, None] * chances_NS), centered_WNS, ((1, 2), (1, 2)))
        step_W = np.linalg.solve(self._information_WW + 1e-6 * np.eye(2), selected_WN @ decay_N)
        log_prob, noise = np.clip(weights_W + step_W, weights_W / self._MAX_CHANGE, weights_W * self._MAX_CHANGE).tolist()
        self.log_prob_weight = min(max(log_prob, self._LOG_PROB_BOUNDS[0]), self._LOG_PROB_BOUNDS[1])
        lowest, highest = (self.log_prob_weight / bound for bound in reversed(self._SHARPNESS_BOUNDS))
        self.noise_weight = min(max(noise, lowest), highest)


MIN_PROB = 1e-40  # keeps the logarithm finite where a probability was rounded to zero


def _features(probs: Sequence[float], noise: Sequence[float], temperature: float) -> NDArray[np.float64]:
    """Return log q and the noise of each token, at the scale of temperature 1. [S, W]"""
    features_SW = np.zeros((len(probs), 2))
    features_SW[:, 0] = temperature * np.log(np.maximum(probs, MIN_PROB))
    if len(noise):
        features_SW[:, 1] = np.multiply(temperature, noise)
    return features_SW


class Reliability:
    """Corrects the probabilities of AgreementWeights by the observed ratio of accepted to expected tokens, by bins.

    Tokens of the model and tokens of cached text have separate ratios. A mixture overestimates cached text, because cached tokens
    are accepted less often where the model disagrees with them.
    """

    EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.92, 0.985)
    _START = (1.0, 0.75)  # ratios, of the model's tokens and of cached tokens
    _WEIGHTS = (40.0, 8.0)  # of the start, in expected tokens

    def __init__(self) -> None:
        self._accepted = [
            [start * weight] * (1 + len(self.EDGES)) for start, weight in zip(self._START, self._WEIGHTS, strict=True)
        ]
        self._expected = [[weight] * (1 + len(self.EDGES)) for weight in self._WEIGHTS]
        # The ratios by bin: a row for the model's tokens and a row for cached tokens.
        self.shares = [[start] * (1 + len(self.EDGES)) for start in self._START]

    def corrected(self, chance: float, is_cached: bool) -> float:
        """Return the corrected acceptance probability."""
        return min(1.0, chance * self.shares[is_cached][bisect_right(self.EDGES, chance)])

    def observe(self, chance: float, is_cached: bool, is_accepted: bool) -> None:
        """Learn from a token of this uncorrected probability whose parent was accepted."""
        index, accepted, expected = bisect_right(self.EDGES, chance), self._accepted[is_cached], self._expected[is_cached]
        accepted[index] = _DECAY * accepted[index] + is_accepted
        expected[index] = _DECAY * expected[index] + chance
        self.shares[is_cached][index] = accepted[index] / expected[index]


class RuleCalibration:
    """Acceptance statistics under one verification rule."""

    def __init__(self) -> None:
        self.by_rank = RankAcceptance()
        self.by_prob = ProbAcceptance()
        self.agreement = AgreementWeights()
        self.reliability = Reliability()


class Calibrations:
    """A RuleCalibration for each verification rule, because acceptance depends on the rule."""

    def __init__(self) -> None:
        self._by_rule: dict[str, RuleCalibration] = defaultdict(RuleCalibration)

    @property
    def by_rule(self) -> Mapping[str, RuleCalibration]:
        """The calibrations of the rules seen so far."""
        return self._by_rule

    def of(self, row: Row) -> RuleCalibration:
        """Return the calibration of a row's rule."""
        return self._by_rule["greedy" if row.sampling.is_greedy else row.verifier]
