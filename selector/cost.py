"""What a step costs: seconds as a line in features of its work, with a prior from a profile, corrected by steps that run.

A step is drafting and the rest. Each is a sum of non-negative prices times features: the target's pass over N packed tokens is a
piecewise linear curve T(N) (a roofline's flat part and slope, and whatever lies between), to which rows, keys, scores and drawn
nodes add their own; drafting pays for each round of growth, each pass of the model that drafts, each token fed in it and each key
that a pass sees. Units: seconds.

Prices are learnt by a Kalman filter on their relative errors: x of price = prior x (1 + x). The prior covariance says how
machines change. One part is common to all prices: a machine that is slow is slow in everything. One is memory's: where what a
pass reads comes slower, products that run meanwhile stay hidden longer, so that a step becomes dearer and a token more in it
cheaper, up to where products take longer than reading (the roofline's corner). Both follow within a few steps; a small part of
each price's own moves slowly. A price that is not seen moves with the others and forgets. What is far from what the filter
expects is clipped: a step during which another program ran teaches no more than a slow one. Where one such surprise follows
another it is the filter that is wrong, as after a profile that was disturbed, and it becomes unsure of itself.

Shape key: K prices, F features of one part, C steps.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf, isfinite
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.core.policy import StepWork

Array = NDArray[np.float64]

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # numbers of packed tokens between which T(N) is a line
KNOTS_F = np.array(KNOTS, dtype=np.float64)
_WIDTHS = np.diff(KNOTS_F)
_SEGMENTS = tuple(zip(KNOTS, (*KNOTS[1:], inf), strict=True))
REST_PRICES = ("step", *(f"token_from_{knot}" for knot in KNOTS), "row", "drawn", "key", "score")
DRAFT_PRICES = ("round", "pass", "draft_token", "pass_key")
NUM_REST = len(REST_PRICES)
_NO_REST, _NO_DRAFT = (0.0,) * NUM_REST, (0.0,) * len(DRAFT_PRICES)
_REST, _DRAFTING = range(2)  # parts of a step
KEYS = 1000.0  # keys and scores are counted in thousands, so that all features are of like size

# Without a profile: a token costs 2 % of a step and a round with its pass 10 %. Their scale is that of the first step seen.
GENERIC_REST = (1.0, *(0.02,) * len(KNOTS), 0.002, 0.002, 0.01, 0.01)
GENERIC_DRAFT = (0.01, 0.09, 0.005, 0.005)

_COMMON_VARIANCE, _MEMORY_VARIANCE, _OWN_VARIANCE = 0.75, 0.25, 0.09
_READ = ("step", "key", "pass", "pass_key")  # prices of what is read from memory, whatever is computed with it
FORGETTING = 0.9995  # of the filter's covariance, towards the prior's, each step
NOISE = 0.15  # standard deviation of a step's seconds, relative
MOST_SIGMAS = 2.5
LEAST_FACTOR = 0.002  # no price falls below this share of its prior
FORGOTTEN = 0.5  # of what the filter has become sure of, each time that one surprise after another is out of bounds
_PULL = 1e-5  # of fitted prices towards the generic ones


class StageSeconds(NamedTuple):
    """What a step cost: drafting, and all else."""

    draft_s: float
    rest_s: float


def rest_features(works: Iterable[StepWork]) -> Array:
    """Return float64 [C, F] of the part that is not drafting of steps that ran, in the order of REST_PRICES."""
    return np.array([_rest_of(work) for work in works])


def draft_features(works: Iterable[StepWork]) -> Array:
    """Return float64 [C, F] of drafting of steps that ran, in the order of DRAFT_PRICES."""
    return np.array([_draft_of(work) for work in works])


def _rest_of(work: StepWork) -> list[float]:
    """Numbers of Python: one step's are few, and what numpy would need for them is not in the processor's caches after a step."""
    tokens = work.num_tokens
    of_tokens = [max(0.0, min(tokens, end) - begin) for begin, end in _SEGMENTS]
    return [1.0, *of_tokens, work.num_rows, work.num_drawn, work.num_keys / KEYS, work.num_scores / KEYS]


def _draft_of(work: StepWork) -> list[float]:
    return [work.num_rounds, work.num_passes, work.num_draft_tokens, work.num_passes * work.num_keys / KEYS]


class CostModel:
    """Predicts a step's seconds and learns from each. Owns its state; prices are a profile's, or the generic ones."""

    def __init__(self, rest: Sequence[float] | None = None, draft: Sequence[float] | None = None) -> None:
        self._has_scale = rest is not None
        rest, draft = rest or GENERIC_REST, draft or GENERIC_DRAFT
        if len(rest) != NUM_REST or len(draft) != len(DRAFT_PRICES):
            raise ValueError(f"{NUM_REST} prices of the rest and {len(DRAFT_PRICES)} of drafting are needed")
        self._prior_K = np.array([*rest, *draft], dtype=np.float64)
        if not np.isfinite(self._prior_K).all() or (self._prior_K <= 0.0).any():
            raise ValueError("prices must be positive")
        self._error_K = np.zeros(len(self._prior_K))
        self._prior_KK = _prior_covariance(self._prior_K)
        self._covariance_KK = self._prior_KK.copy()
        self._prices_K = self._prior_K.copy()
        self._by_name: Mapping[str, float] | None = None  # the same, until something else is learnt, and T(N) at the knots
        self._curve: Array | None = None
        self._was_clipped = np.zeros(2, dtype=np.int64)  # the rest, drafting

    @property
    def prices(self) -> Mapping[str, float]:
        """Seconds by name, as learnt so far."""
        if self._by_name is None:
            self._by_name = dict(zip((*REST_PRICES, *DRAFT_PRICES), self._prices_K.tolist(), strict=True))
        return self._by_name

    def step_s(self, work: StepWork) -> float:
        """Return the predicted seconds of a step; its numbers may be expectations."""
        return float(sum(map(mul, self.prices.values(), (*_rest_of(work), *_draft_of(work)))))

    def pass_s(self, num_keys: float) -> float:
        """Return the predicted seconds of a pass of the model that drafts, what is fed in it aside."""
        return self.prices["pass"] + num_keys * (self.prices["pass_key"] / KEYS)

    def tokens_s(self, num_tokens: Array) -> Array:
        """Return T(N) of so many packed tokens, less T(1), elementwise."""
        slopes_F = self._prices_K[1 : 1 + len(KNOTS)]
        if self._curve is None:
            self._curve = np.append(0.0, np.cumsum(slopes_F[:-1] * _WIDTHS))
        beyond = np.maximum(num_tokens - KNOTS_F[-1], 0.0)
        seconds: Array = np.interp(num_tokens, KNOTS_F, self._curve) + beyond * slopes_F[-1]
        return seconds

    @property
    def score_s(self) -> float:
        """What one pair of a token and a key costs."""
        return self.prices["score"] / KEYS

    def observe(self, work: StepWork, seconds: StageSeconds) -> None:
        """Learn from a step that ran."""
        if not self._has_scale and seconds.rest_s > 0.0:
            self._prior_K *= (seconds.draft_s + seconds.rest_s) / self.step_s(work)
            self._has_scale = True
        self._learn(work, seconds)
        self._by_name = self._curve = None

    def _learn(self, work: StepWork, seconds: StageSeconds) -> None:
        """Correct the prices in place, and all that they are corrected by."""
        self._forget(1.0 - FORGETTING)
        self._correct(_REST, [*_rest_of(work), *_NO_DRAFT], seconds.rest_s)
        if work.num_passes or work.num_rounds:
            self._correct(_DRAFTING, [*_NO_REST, *_draft_of(work)], seconds.draft_s)
        np.multiply(self._prior_K, np.maximum(1.0 + self._error_K, LEAST_FACTOR), out=self._prices_K)

    def _forget(self, share: float) -> None:
        """Become as unsure as the prior, by that share."""
        self._covariance_KK *= 1.0 - share
        self._covariance_KK += share * self._prior_KK

    def _correct(self, part: int, features: Sequence[float], seen_s: float) -> None:
        """Move prices towards what would have predicted the seconds seen of a part; errors are relative to the prior's."""
        weights_K = np.array(features) * self._prior_K
        scale_s = float(weights_K.sum())
        if scale_s <= 0.0 or not isfinite(seen_s):
            return
        weights_K /= scale_s
        expected = 1.0 + float(weights_K @ self._error_K)
        towards_K = self._covariance_KK @ weights_K
        noise = (NOISE * max(expected, LEAST_FACTOR)) ** 2
        variance = float(weights_K @ towards_K) + noise
        surprise = seen_s / scale_s - expected
        bound = MOST_SIGMAS * variance**0.5
        is_clipped = abs(surprise) > bound
        if is_clipped and self._was_clipped[part]:
            # Back towards the prior and no farther: what is not seen would become unsure without bound.
            self._forget(FORGOTTEN)
        self._was_clipped[part] = is_clipped
        gain_K = towards_K / variance
        self._error_K += gain_K * min(bound, max(-bound, surprise))
        self._covariance_KK -= gain_K[:, None] * towards_K


def _prior_covariance(prior_K: Array) -> Array:
    """Return the covariance of prices' relative errors before anything is seen, [K, K]."""
    slower_K = _by_slower_memory(prior_K)
    common_KK = np.full((len(prior_K), len(prior_K)), _COMMON_VARIANCE)
    return common_KK + _MEMORY_VARIANCE * np.outer(slower_K, slower_K) + _OWN_VARIANCE * np.eye(len(prior_K))


def _by_slower_memory(prior_K: Array) -> Array:
    """Return by how much each price changes, relative to itself, for each part that memory is slower, [K].

    What is read is that much dearer. Tokens are cheaper up to the roofline's corner, where a pass takes what it took before: that
    is where tokens take as long as reading does, or the last knot.
    """
    step, slopes_F = prior_K[0], prior_K[1 : 1 + len(KNOTS)]
    added = np.cumsum(slopes_F[:-1] * _WIDTHS)  # by tokens up to each knot but the first
    corner = min(int(np.searchsorted(added, step)), len(added) - 1)
    slower_K = np.isin((*REST_PRICES, *DRAFT_PRICES), _READ).astype(np.float64)
    slower_K[1 : 2 + corner] = -min(1.0, step / added[corner])
    return slower_K


def fitted_prices(features_CF: Array, seconds_C: Array, generic: Sequence[float]) -> list[float]:
    """Return positive prices that fit measured seconds best, by relative error.

    Non-negative least squares by coordinate descent (the features are few), with a light pull towards the generic prices at the
    scale of what was measured: they decide where features were seen together or not at all, and no price falls far below them.
    """
    generic_F = np.array(generic)
    generic_F = generic_F * float(np.median(seconds_C / (features_CF @ generic_F)))
    weighted_CF = features_CF * generic_F / seconds_C[:, None]
    pull = _PULL * len(seconds_C)
    gram_FF = weighted_CF.T @ weighted_CF + pull * np.eye(len(generic_F))
    wanted_F = weighted_CF.sum(0) + pull
    factors_F = np.ones(len(generic_F))
    for _ in range(1000):
        for feature in range(len(generic_F)):
            rest = wanted_F[feature] - gram_FF[feature] @ factors_F + gram_FF[feature, feature] * factors_F[feature]
            factors_F[feature] = max(LEAST_FACTOR, rest / gram_FF[feature, feature])
    return [float(price) for price in factors_F * generic_F]
