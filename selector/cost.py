"""Predicts the seconds of a step from its work. The prior is a profile of the machine; measured steps correct it.

A step has two parts, drafting and the rest. The seconds of each are a sum of non-negative coefficients times features. The
target's pass over N packed tokens is a piecewise linear curve T(N): flat, then rising, as in a roofline. Rows, sampled nodes,
keys and scores add to it, and the call of the library, which steps of plain decoding in a row share. Drafting adds up rounds of
growth, passes of the draft model, tokens fed to it and keys that its passes read.

A Kalman filter learns relative errors x of the coefficients: coefficient = prior x (1 + x). A slower machine is slower in
everything, so errors have a common part, which unseen coefficients follow. Outliers are clipped: a step during which another
program ran counts no more than a slow one. Two outliers in a row mean that the filter is wrong, for example after a disturbed
profile. Then it is as uncertain as at the start.

Shape key: K coefficients, F features of one part, C steps. Units: seconds.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf, isfinite
from operator import mul

import numpy as np
from numpy.typing import NDArray

from engine.core.policy import MOST_UNOBSERVED, StepWork

Array = NDArray[np.float64]

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # numbers of packed tokens between which T(N) is a line: powers of 2
_SEGMENTS = tuple(pairwise((*KNOTS, inf)))
REST_COEFFICIENTS = ("step", *(f"token_from_{knot}" for knot in KNOTS), "row", "drawn", "key", "score", "call")
DRAFT_COEFFICIENTS = ("round", "pass", "draft_token", "pass_key")
_NAMES = (*REST_COEFFICIENTS, *DRAFT_COEFFICIENTS)
NUM_REST, _NUM_DRAFT = len(REST_COEFFICIENTS), len(DRAFT_COEFFICIENTS)
KEYS = 1000.0  # keys and scores are counted in thousands, so that all features have a similar size

# Without a profile a token costs 2 % of a step, and a round with its pass 10 %. The first step sets the scale.
GENERIC_REST = (1.0, *(0.02,) * len(KNOTS), 0.002, 0.002, 0.01, 0.01, 0.1)
GENERIC_DRAFT = (0.01, 0.09, 0.005, 0.005)

_COMMON_VARIANCE, _OWN_VARIANCE = 0.75, 0.2  # of relative errors before any step: of all coefficients together, of each alone
FORGETTING = 0.9995  # factor of the covariance at each step; the prior covariance fills the rest
NOISE = 0.15  # standard deviation of a step's seconds, relative
MOST_SIGMAS = 2.5  # beyond which a step is an outlier
LEAST_FACTOR = 0.002  # lower bound of a coefficient, as a share of its prior


def rest_features(work: StepWork) -> list[float]:
    """Return the features of a step without its drafting, in the order of REST_COEFFICIENTS."""
    tokens = work.num_tokens
    of_tokens = [max(0.0, min(tokens, end) - begin) for begin, end in _SEGMENTS]
    return [1.0, *of_tokens, work.num_rows, work.num_drawn, work.num_keys / KEYS, work.num_scores / KEYS, work.num_calls]


def draft_features(work: StepWork) -> list[float]:
    """Return the features of a step's drafting, in the order of DRAFT_COEFFICIENTS."""
    return [work.num_rounds, work.num_passes, work.num_draft_tokens, work.num_passes * work.num_keys / KEYS]


class CostModel:
    """Predicts a step's seconds and learns from measured steps. `coefficients` are seconds per unit, by name.

    Steps of plain decoding, and steps with drafts, run in a row for `longest_runs_s`, and singly if it is 0.
    """

    longest_runs_s = 0.0, 0.0

    def __init__(self, rest: Sequence[float] | None = None, draft: Sequence[float] | None = None) -> None:
        self._has_scale = rest is not None
        rest, draft = rest or GENERIC_REST, draft or GENERIC_DRAFT
        if len(rest) != NUM_REST or len(draft) != _NUM_DRAFT:
            raise ValueError(f"{NUM_REST} coefficients of the rest and {_NUM_DRAFT} of drafting are needed")
        self._prior = [float(one) for one in (*rest, *draft)]
        if not all(0.0 < one < inf for one in self._prior):
            raise ValueError("coefficients must be positive")
        self._errors = [0.0] * len(_NAMES)
        self._prior_KK = _COMMON_VARIANCE + _OWN_VARIANCE * np.eye(len(_NAMES))
        self._covariance_KK = self._prior_KK.copy()
        self._was_clipped = {"rest": False, "drafting": False}
        self._update()

    def _update(self) -> None:
        """Derive the coefficients and the curve T(N) from the errors."""
        coefficients = [prior * max(1.0 + error, LEAST_FACTOR) for prior, error in zip(self._prior, self._errors, strict=True)]
        self.coefficients: dict[str, float] = dict(zip(_NAMES, coefficients, strict=True))
        slopes = coefficients[1 : 1 + len(KNOTS)]
        begins = accumulate(map(mul, slopes, KNOTS), initial=0.0)  # a knot is as far from the next as from 0
        self._lines: list[tuple[int, float, float]] = [(1, 0.0, 0.0), *zip(KNOTS, begins, slopes)]  # below and from each knot

    def step_s(self, work: StepWork) -> float:
        """Return the predicted seconds of a step; its numbers may be expectations."""
        return float(sum(map(mul, self.coefficients.values(), (*rest_features(work), *draft_features(work)))))

    def saved_s(self, step_s: float, has_drafts: bool = False) -> float:
        """Return the part of a step's seconds that it saves by sharing its call with others like it."""
        num_steps = max(1.0, min(MOST_UNOBSERVED, self.longest_runs_s[has_drafts] // step_s))
        return self.coefficients["call"] * (1.0 - 1.0 / num_steps)

    def pass_s(self, num_keys: float) -> float:
        """Return the predicted seconds of a pass of the draft model, without the tokens fed to it."""
        return self.coefficients["pass"] + num_keys * (self.coefficients["pass_key"] / KEYS)

    def tokens_s(self, num_tokens: float) -> float:
        """Return T(N) - T(1) for a number of packed tokens, which may be an expectation."""
        knot, begin_s, slope_s = self._lines[min(int(num_tokens).bit_length(), len(KNOTS))]
        return begin_s + (num_tokens - knot) * slope_s

    def rises_s(self, num_tokens: float, count: int) -> list[float]:
        """Return how much T(N) rises with each of `count` further tokens."""
        first, rises_s = int(num_tokens), list[float]()
        for end, (_, _, slope_s) in zip((*KNOTS, inf), self._lines, strict=True):
            rises_s += [slope_s] * int(min(end, first + count + 1) - first - len(rises_s))
        share = num_tokens - first
        return [(1.0 - share) * one + share * other for one, other in pairwise(rises_s)]

    def observe(self, work: StepWork, draft_s: float, rest_s: float) -> None:
        """Learn from the measured seconds of a step."""
        if not self._has_scale and rest_s > 0.0:
            scale = (draft_s + rest_s) / self.step_s(work)
            self._prior, self._has_scale = [scale * one for one in self._prior], True
        self._covariance_KK = FORGETTING * self._covariance_KK + (1.0 - FORGETTING) * self._prior_KK
        self._correct("rest", [*rest_features(work), *(0.0,) * _NUM_DRAFT], rest_s)
        if work.num_passes or work.num_rounds:
            self._correct("drafting", [*(0.0,) * NUM_REST, *draft_features(work)], draft_s)
        self._update()

    def _correct(self, part: str, features: Sequence[float], measured_s: float) -> None:
        """Update the filter from the measured seconds of one part of a step."""
        seconds = [*map(mul, features, self._prior)]
        scale_s = sum(seconds)
        if scale_s <= 0.0 or not isfinite(measured_s):
            return
        weights = [one / scale_s for one in seconds]
        expected = 1.0 + sum(map(mul, weights, self._errors))
        towards_K = self._covariance_KK @ np.array(weights)
        towards = towards_K.tolist()
        noise = (NOISE * max(expected, LEAST_FACTOR)) ** 2
        variance = sum(map(mul, weights, towards)) + noise
        surprise = measured_s / scale_s - expected
        bound = MOST_SIGMAS * variance**0.5
        is_clipped = abs(surprise) > bound
        if is_clipped and self._was_clipped[part]:
            self._covariance_KK = self._prior_KK.copy()
        self._was_clipped[part] = is_clipped
        correction = min(bound, max(-bound, surprise)) / variance
        self._errors = [error + correction * one for error, one in zip(self._errors, towards, strict=True)]
        self._covariance_KK -= np.multiply.outer(towards_K / variance, towards_K)


def fitted_coefficients(features: Sequence[Sequence[float]], seconds_C: Array, generic: Sequence[float]) -> list[float]:
    """Return the positive coefficients with the least relative error for measured steps.

    Non-negative least squares by coordinate descent, as the features are few. A light pull towards the generic coefficients, at
    the scale of the measurement, decides where features are absent or always appear together.
    """
    features_CF, generic_F = np.array(features), np.array(generic)
    generic_F = generic_F * float(np.median(seconds_C / (features_CF @ generic_F)))
    weighted_CF = features_CF * generic_F / seconds_C[:, None]
    pull = LEAST_FACTOR**2 * len(seconds_C)
    gram_FF = weighted_CF.T @ weighted_CF + pull * np.eye(len(generic_F))
    wanted_F = weighted_CF.sum(0) + pull
    factors_F = np.ones(len(generic_F))
    for _ in range(1000):
        for feature in range(len(generic_F)):
            rest = wanted_F[feature] - gram_FF[feature] @ factors_F + gram_FF[feature, feature] * factors_F[feature]
            factors_F[feature] = max(LEAST_FACTOR, rest / gram_FF[feature, feature])
    return [float(one) for one in factors_F * generic_F]
