"""Counts against a law: the likelihood-ratio chi-square test, what it would have found, and its error level.

Knows counts and expectations only, no tokens and no models. All sums are float64.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_MIN_EXPECTED = 10.0  # a cell that expects less is pooled: down to there the test's p-values hold to 1e-5 and below
_POWER_QUANTILE = 1.2815515655446004  # the standard normal's, at .9
_BISECTIONS = 200


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """One test's outcome. `num_counted` observations fell into `freedom` + 1 cells; freedom 0 tests nothing, and its p is 1."""

    statistic: float
    freedom: int
    num_counted: int

    @property
    def p_value(self) -> float:
        """Chance of a statistic as large, or larger, under the law."""
        return survival(self.statistic, self.freedom)

    def detectable(self, level: float) -> float:
        """Return the total variation distance that a test at this level finds with probability .9, or 1 if there is none.

        Approximate: the noncentral chi-square law is taken as normal. A law at total variation d from the one evenness has
        noncentrality at least 4 n d^2 (Cauchy and Schwarz), so every change of the pooled cells that large is found.
        """
        if not self.freedom:
            return 1.0
        return min(1.0, math.sqrt(_noncentrality(self.freedom, level) / (4.0 * self.num_counted)))


def survival(statistic: float, freedom: int) -> float:
    """Return P(X >= statistic) for X of a chi-square law."""
    if freedom == 0:
        return 1.0
    half = torch.tensor([freedom / 2.0, statistic / 2.0], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def compared(observed: Sequence[float], expected: Sequence[float]) -> ChiSquare:
    """Compare counts with their expectations, both of the same total, by the likelihood ratio with Williams' correction.

    G = 2 sum o log(o / e) and not Pearson's sum (o - e)^2 / e: at levels of 1e-5, which a family of a hundred tests asks for,
    Pearson's statistic raises two to four times the false alarms it promises on small cells, and G keeps its promise.
    Williams, "Improved likelihood ratio tests for complete contingency tables", Biometrika 1976.
    """
    cells = pooled(observed, expected)
    num_counted, freedom = round(sum(observed)), len(cells) - 1
    if freedom < 1:
        return ChiSquare(0.0, 0, num_counted)
    ratio = 2.0 * sum(o * math.log(o / e) for o, e in cells if o)
    correction = 1.0 + (sum(num_counted / e for _, e in cells) - 1.0) / (6.0 * num_counted * freedom)
    return ChiSquare(max(0.0, ratio / correction), freedom, num_counted)


def pooled(observed: Sequence[float], expected: Sequence[float]) -> list[tuple[float, float]]:
    """Return (observed, expected) of the cells that expect enough; the others together are one cell, or join the smallest."""
    pairs = sorted(zip(observed, expected, strict=True), key=lambda pair: pair[1])
    rest_observed = rest_expected = 0.0
    while pairs and (pairs[0][1] < _MIN_EXPECTED or 0.0 < rest_expected < _MIN_EXPECTED):
        cell = pairs.pop(0)
        rest_observed, rest_expected = rest_observed + cell[0], rest_expected + cell[1]
    return [(rest_observed, rest_expected), *pairs] if rest_expected else pairs


def together(tests: Sequence[ChiSquare]) -> ChiSquare:
    """Return the sum of independent tests, which finds what is a little wrong in each of them."""
    return ChiSquare(sum(t.statistic for t in tests), sum(t.freedom for t in tests), sum(t.num_counted for t in tests))


def _noncentrality(freedom: int, level: float) -> float:
    """Return the noncentrality at which the test's power is .9."""
    critical = _root(lambda x: level - survival(x, freedom))
    return _root(lambda x: freedom + x - _POWER_QUANTILE * math.sqrt(2.0 * (freedom + 2.0 * x)) - critical)


def _root(rising: Callable[[float], float]) -> float:
    """Return where a rising function, negative at 0, is 0."""
    low, high = 0.0, 1.0
    while rising(high) < 0.0:
        low, high = high, 2.0 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if rising(middle) < 0.0 else (low, middle)
    return high
