"""Outcomes of exact checks (of arg maxes, and of draws outside the support): match, near tie or mismatch.

Two passes of different widths differ by rounding, so that two nearly tied tokens may be exchanged. This module defines the
tolerance of a near tie. Shape key: N generated tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from engine.core.sampling_limits import MIN_TEMPERATURE
from engine.core.types import SamplingParams

# Largest difference of two logits that rounding may reverse. float32: far above observed differences. bfloat16: logits between 16
# and 32 are 1/8 apart, and the layers below round as coarsely. For bitwise equal logits (int8, compact) only the float32 rounding
# of distributions remains.
_SAME_BITS_TOLERANCE = 1e-4
_TIE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5, "fp8": 0.5, "int8": _SAME_BITS_TOLERANCE, "compact": _SAME_BITS_TOLERANCE}
_MOST_SLACK = 0.5


class CheckOutcome(StrEnum):
    """The result of one token's check."""

    MATCH = "match"
    NEAR_TIE = "near_tie"
    MISMATCH = "mismatch"


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of outcomes, and the widest gap between a token's score and the best one, mismatches included."""

    num_match: int = 0
    num_near_tie: int = 0
    num_mismatch: int = 0
    widest_gap: float = 0.0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.num_match + other.num_match,
            self.num_near_tie + other.num_near_tie,
            self.num_mismatch + other.num_mismatch,
            max(self.widest_gap, other.widest_gap),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens checked."""
        return self.num_match + self.num_near_tie + self.num_mismatch

    def counts(self) -> dict[str, int]:
        """Return the counts by outcome."""
        return {
            CheckOutcome.MATCH: self.num_match,
            CheckOutcome.NEAR_TIE: self.num_near_tie,
            CheckOutcome.MISMATCH: self.num_mismatch,
        }


def tie_tolerance(dtype: str, has_same_bits: bool = False) -> float:
    """Return the largest gap between logits of a model in this dtype that rounding may have reversed.

    `has_same_bits`: both sides computed bitwise equal logits.
    """
    return _SAME_BITS_TOLERANCE if has_same_bits else _TIE_TOLERANCE[dtype]


def tally_gaps(gaps: Sequence[float], tolerance: float) -> Tally:
    """Count tokens by the gap between the best score and their own; 0 is a match."""
    num_match = sum(gap <= 0.0 for gap in gaps)
    num_mismatch = sum(not gap <= tolerance for gap in gaps)  # NaN counts as a mismatch
    return Tally(num_match, len(gaps) - num_match - num_mismatch, num_mismatch, max(gaps, default=0.0))


def greedy_gaps(logits_NV: Float[Tensor, "N V"], token_ids: Sequence[int]) -> list[float]:
    """Return the difference between the largest logit and each token's own."""
    return (logits_NV.amax(-1) - _at(logits_NV, token_ids)).tolist()


ProbsFunction = Callable[[SamplingParams], Float[Tensor, "N V"]]  # N rows under these parameters in place of their own


@dataclass(frozen=True)
class Support:
    """Where distributions are positive, up to rounding: `is_sure_NV` is a lower bound, `is_perhaps_NV` an upper bound.

    `log_untruncated_NV` are float64 log-probabilities before top-k, top-p and min-p. They are finite even where a float32
    probability at a low temperature is 0. `is_testable`: rounding changes no probability by more than a factor e.
    """

    probs_NV: Float[Tensor, "N V"]
    log_untruncated_NV: Float[Tensor, "N V"]
    is_sure_NV: Bool[Tensor, "N V"]
    is_perhaps_NV: Bool[Tensor, "N V"]
    is_testable: bool

    def tally(self, token_ids: Sequence[int]) -> Tally:
        """Count draws inside the support, at its edge, and outside."""
        is_inside_N, is_perhaps_N = _at(self.probs_NV, token_ids) > 0, _at(self.is_perhaps_NV, token_ids)
        num_match, num_mismatch = int(is_inside_N.sum()), int((~is_inside_N & ~is_perhaps_N).sum())
        return Tally(num_match, len(token_ids) - num_match - num_mismatch, num_mismatch)

    def coupled_gaps(self, noise_NV: Float[Tensor, "N V"], token_ids: Sequence[int]) -> list[float]:
        """Return the gap of log p + noise between the best certain token and each token; infinite outside the support."""
        scores_NV = self.log_untruncated_NV + noise_NV
        best_N = scores_NV.masked_fill(~self.is_sure_NV, float("-inf")).amax(-1)
        own_N = _at(scores_NV.masked_fill(~self.is_perhaps_NV, float("-inf")), token_ids)
        return (best_N - own_N).tolist()


def is_testable(sampling: SamplingParams, tolerance: float) -> bool:
    """Return whether draws can be tested: a logit error of `tolerance` changes no probability by more than a factor e."""
    return tolerance <= sampling.temperature


def support_of(probs_of: ProbsFunction, logits_NV: Float[Tensor, "N V"], sampling: SamplingParams, tolerance: float) -> Support:
    """Return the support of the distributions of edited logits under `sampling`, with errors of up to `tolerance`.

    If two tokens are nearly tied for the first place, either may have all the probability of a sharp distribution. A nucleus
    whose mass nearly equals top-p may have a token more or less, and so may a top-k with a near tie at its end.
    """
    temperature = max(sampling.temperature, MIN_TEMPERATURE)
    probs_NV, log_NV = probs_of(sampling), torch.log_softmax(logits_NV.double() / temperature, -1)
    is_near_top_NV = logits_NV >= logits_NV.amax(-1, keepdim=True) - tolerance
    is_sure_NV = is_perhaps_NV = probs_NV > 0
    if sampling.top_p < 1.0 or sampling.top_k or sampling.min_p:
        is_sure_NV, is_perhaps_NV = _edges(probs_of, log_NV.exp(), sampling, min(_MOST_SLACK, tolerance / temperature))
    return Support(probs_NV, log_NV, is_sure_NV, is_perhaps_NV | is_near_top_NV, is_testable(sampling, tolerance))


def _edges(probs_of: ProbsFunction, untruncated_NV: Tensor, sampling: SamplingParams, slack: float) -> tuple[Tensor, Tensor]:
    """Return the tokens that truncation certainly keeps, and those that it possibly keeps."""
    sure = probs_of(replace(sampling, top_p=_less(sampling.top_p, slack), min_p=min(1.0, sampling.min_p / (1.0 - slack))))
    perhaps = probs_of(replace(sampling, top_p=min(1.0, sampling.top_p + slack), min_p=sampling.min_p * (1.0 - slack)))
    most_dropped_N1 = untruncated_NV.masked_fill(sure > 0, 0.0).amax(-1, keepdim=True)
    is_sure_NV = (sure > 0) & (untruncated_NV >= most_dropped_N1 * (1.0 + slack))
    least_kept_N1 = untruncated_NV.masked_fill(perhaps <= 0, 1.0).amin(-1, keepdim=True)
    is_perhaps_NV = untruncated_NV >= least_kept_N1 * (1.0 - slack)
    return is_sure_NV, is_perhaps_NV & (untruncated_NV > 0)


def _less(top_p: float, slack: float) -> float:
    """Return a smaller top-p; 1 means no top-p and is kept."""
    return top_p if top_p >= 1.0 else max(1e-6, top_p - slack)


def _at(values_NV: Tensor, token_ids: Sequence[int]) -> Tensor:
    return values_NV.gather(-1, torch.tensor(list(token_ids), device=values_NV.device)[:, None])[:, 0]
