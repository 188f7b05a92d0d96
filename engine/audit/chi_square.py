"""Tests of observed against expected counts, by likelihood ratio or Poisson's tail, and their power. All sums are float64."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_MIN_EXPECTED = 10.0  # cells with a smaller expected count are pooled, to keep small p-values accurate
POWER_QUANTILE = 1.2815515655446004  # the .9 quantile of the standard normal
_BISECTIONS = 200


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """A test of `num_counted` observations in `freedom` + 1 cells; with no degree of freedom the p-value is 1."""

    statistic: float
    freedom: int
    num_counted: int

    @property
    def p_value(self) -> float:
        """Probability of a statistic at least as large under the expected distribution."""
        return survival(self.statistic, self.freedom)

    def detectable(self, level: float) -> float:
        """Return the total variation distance that a test at this level detects with probability .9, or 1 if there is none.

        Approximate: the noncentral chi-square distribution is taken as normal. A distribution at total variation d from the
        expected one has noncentrality at least 4 n d^2 (Cauchy and Schwarz). So any change of the pooled cells of this size is
        detected.
        """
        if not self.freedom:
            return 1.0
        return min(1.0, math.sqrt(_noncentrality(self.freedom, level) / (4.0 * self.num_counted)))


@dataclass(frozen=True, slots=True)
class RareTest:
    """A test that unlikely tokens are no more frequent than expected: a count against a bound of its tail, Poisson's.

    Hoeffding 1956: of independent trials with one mean, equal chances spread the count most.
    """

    num_observed: int
    expected: float
    num_counted: int

    @property
    def p_value(self) -> float:
        """Probability of a count at least as large."""
        return _poisson_tail(self.num_observed, self.expected)

    def detectable(self, level: float) -> float:
        """Return the share of replaced tokens that a test at this level detects with probability .9, approximately."""
        least = next(count for count in itertools.count(1) if _poisson_tail(count, self.expected) < level)
        return min(1.0, (least + POWER_QUANTILE * math.sqrt(least) - self.expected) / max(1, self.num_counted))


def _poisson_tail(count: int, mean: float) -> float:
    """Return P(X >= count)."""
    both = torch.tensor([count, mean], dtype=torch.float64)
    return float(torch.special.gammainc(both[0], both[1])) if count else 1.0


def survival(statistic: float, freedom: int) -> float:
    """Return P(X >= statistic) for a chi-square X with `freedom` degrees of freedom."""
    if freedom == 0:
        return 1.0
    half = torch.tensor([freedom / 2.0, statistic / 2.0], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def likelihood_ratio_test(observed: Sequence[float], expected: Sequence[float]) -> ChiSquare:
    """Test observed against expected counts, both of the same total, by the likelihood ratio with Williams' correction.

    The statistic is G = 2 sum o log(o / e), not Pearson's sum (o - e)^2 / e. Many simultaneous tests have low levels, and there
    Pearson's false alarm rate on small cells exceeds its level. Williams, "Improved likelihood ratio tests for complete
    contingency tables", Biometrika 1976.
    """
    cells = pooled_cells(observed, expected)
    num_counted, freedom = round(sum(observed)), len(cells) - 1
    if freedom < 1:
        return ChiSquare(0.0, 0, num_counted)
    ratio = 2.0 * sum(o * math.log(o / e) for o, e in cells if o)
    correction = 1.0 + (sum(num_counted / e for _, e in cells) - 1.0) / (6.0 * num_counted * freedom)
    return ChiSquare(max(0.0, ratio / correction), freedom, num_counted)


def pooled_cells(observed: Sequence[float], expected: Sequence[float]) -> list[tuple[float, float]]:
    """Return (observed, expected) by cell; cells with a small expected count are pooled, if necessary with the next larger."""
    pairs = sorted(zip(observed, expected, strict=True), key=lambda pair: pair[1])
    rest_observed = rest_expected = 0.0
    while pairs and (pairs[0][1] < _MIN_EXPECTED or 0.0 < rest_expected < _MIN_EXPECTED):
        cell = pairs.pop(0)
        rest_observed, rest_expected = rest_observed + cell[0], rest_expected + cell[1]
    return [(rest_observed, rest_expected), *pairs] if rest_expected else pairs


def combined_test(tests: Sequence[ChiSquare]) -> ChiSquare:
    """Return the sum of independent tests, which detects small deviations common to all of them."""
    return ChiSquare(sum(t.statistic for t in tests), sum(t.freedom for t in tests), sum(t.num_counted for t in tests))


def _noncentrality(freedom: int, level: float) -> float:
    """Return the noncentrality at which the test's power is .9."""
    critical = _root(lambda x: level - survival(x, freedom))
    return _root(lambda x: freedom + x - POWER_QUANTILE * math.sqrt(2.0 * (freedom + 2.0 * x)) - critical)


def _root(rising: Callable[[float], float]) -> float:
    """Return the root of a rising function that is negative at 0."""
    low, high = 0.0, 1.0
    while rising(high) < 0.0:
        low, high = high, 2.0 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if rising(middle) < 0.0 else (low, middle)
    return high
