"""Pearson's chi-square as a z score, without a statistics library."""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

Outcome = TypeVar("Outcome", bound=Hashable)

# Draws are keyed, so a test's score is the same in every run: a limit can be strict and no run is flaky.
PASSES_BELOW = 4.0
FAILS_ABOVE = 8.0


def z_score(observed: Sequence[float], expected: Sequence[float]) -> float:
    """Return how far, in standard deviations, the counts are from what is expected (Wilson and Hilferty 1931).

    Cells that expect less than 5 are pooled into one.
    """
    cells = [(o, e) for o, e in zip(observed, expected, strict=True) if e >= 5.0]
    rest_observed = sum(o for o, e in zip(observed, expected, strict=True) if e < 5.0)
    rest_expected = sum(e for e in expected if e < 5.0)
    if rest_expected > 0.0 or rest_observed:
        cells.append((rest_observed, max(rest_expected, 0.5)))
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    freedom = len(cells) - 1
    if freedom == 0:
        return 0.0
    spread = 2.0 / (9.0 * freedom)
    return float(((statistic / freedom) ** (1.0 / 3.0) - (1.0 - spread)) / math.sqrt(spread))


def z_of_counts(counts: Mapping[Outcome, int], distribution: Mapping[Outcome, float]) -> float:
    """Return the z score of outcome counts against a distribution. Outcomes of probability 0 increase the score."""
    total = sum(counts.values())
    outcomes = [*distribution, *(outcome for outcome in counts if outcome not in distribution)]
    return z_score([counts.get(o, 0) for o in outcomes], [total * distribution.get(o, 0.0) for o in outcomes])


def worst_z_of_beginnings(texts: Sequence[tuple[int, ...]], distribution: Mapping[tuple[int, ...], float]) -> float:
    """Return the largest z score of the beginnings of each length, infinity if a text is outside the distribution.

    Long texts are many, so that few of them are expected five times. Their beginnings are.
    """
    if {*texts} - distribution.keys():
        return math.inf
    scores = []
    for length in range(1, max(map(len, distribution)) + 1):
        expected: dict[tuple[int, ...], float] = {}
        for text, probability in distribution.items():
            expected[text[:length]] = expected.get(text[:length], 0.0) + probability
        scores.append(z_of_counts(Counter(text[:length] for text in texts), expected))
    return max(scores)


def z_of_uniforms(values: Sequence[float], num_bins: int = 32) -> float:
    """Return the z score of numbers that should be uniform in (0, 1)."""
    counts = [0] * num_bins
    for value in values:
        counts[min(int(value * num_bins), num_bins - 1)] += 1
    return z_score(counts, [len(values) / num_bins] * num_bins)


def z_of_pairs(first: Sequence[float], second: Sequence[float], num_bins: int = 8) -> float:
    """Return the z score of pairs that should be uniform in the unit square: dependence shows as uneven cells."""
    counts = [0] * num_bins**2
    for one, other in zip(first, second, strict=True):
        counts[min(int(one * num_bins), num_bins - 1) * num_bins + min(int(other * num_bins), num_bins - 1)] += 1
    return z_score(counts, [len(first) / num_bins**2] * num_bins**2)
