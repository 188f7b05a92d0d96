"""Tokens that leave no choice (arg maxes, and draws outside the law's support): right, a near tie, or wrong.

The same law computed by two passes of different widths differs by rounding, so that two tokens nearly tied may change places.
What counts as nearly is stated here. Shape key: N emitted tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from engine.core.sampling_limits import MIN_TEMPERATURE
from engine.core.types import SamplingParams

# Largest difference of two logits that rounding may reverse. float32: a thousand times what is seen. bfloat16: logits of size 16
# to 32 are 1/8 apart, and layers below have rounded as coarsely. Where logits are the same to the bit, as in int8 and compact,
# laws are up to float32.
_SAME_BITS_TOLERANCE = 1e-4
_TIE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5, "int8": _SAME_BITS_TOLERANCE, "compact": _SAME_BITS_TOLERANCE}
_MOST_SLACK = 0.5


class Outcome(StrEnum):
    """What became of one token's check."""

    MATCH = "match"
    NEAR_TIE = "near_tie"
    MISMATCH = "mismatch"


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of outcomes, and the widest gap by which a token missed being the right one, mismatches included."""

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
        """Return the counts by outcome's name."""
        return {Outcome.MATCH: self.num_match, Outcome.NEAR_TIE: self.num_near_tie, Outcome.MISMATCH: self.num_mismatch}


def tie_tolerance(dtype: str, has_same_bits: bool = False) -> float:
    """Return the largest gap between logits of a model in this dtype that rounding may have reversed.

    `has_same_bits` says that both sides computed the same bits.
    """
    return _SAME_BITS_TOLERANCE if has_same_bits else _TIE_TOLERANCE[dtype]


def tally_gaps(gaps: Sequence[float], tolerance: float) -> Tally:
    """Count tokens by how far each fell short of the best: 0 is the best one itself."""
    num_match = sum(gap <= 0.0 for gap in gaps)
    num_mismatch = sum(not gap <= tolerance for gap in gaps)  # written so that NaN is one
    return Tally(num_match, len(gaps) - num_match - num_mismatch, num_mismatch, max(gaps, default=0.0))


def greedy_gaps(logits_NV: Float[Tensor, "N V"], token_ids: Sequence[int]) -> list[float]:
    """Return by how much each token's logit falls short of the largest."""
    return (logits_NV.amax(-1) - _at(logits_NV, token_ids)).tolist()


LawsOf = Callable[[SamplingParams], Float[Tensor, "N V"]]  # N rows under these parameters in place of their own


@dataclass(frozen=True)
class Support:
    """Where laws are positive, up to rounding: `sure` without any doubt, `perhaps` with the benefit of it.

    `log_untruncated_NV` are the logs, float64, of the laws before top-k, top-p and min-p: at low temperatures float32 laws are 0
    where these are not. `is_testable` says that rounding changes no probability by more than a factor e.
    """

    probs_NV: Float[Tensor, "N V"]
    log_untruncated_NV: Float[Tensor, "N V"]
    is_sure_NV: Bool[Tensor, "N V"]
    is_perhaps_NV: Bool[Tensor, "N V"]
    is_testable: bool

    def tally(self, token_ids: Sequence[int]) -> Tally:
        """Count draws inside the law, at its edge, and where it is 0."""
        is_inside_N, is_perhaps_N = _at(self.probs_NV, token_ids) > 0, _at(self.is_perhaps_NV, token_ids)
        num_match, num_mismatch = int(is_inside_N.sum()), int((~is_inside_N & ~is_perhaps_N).sum())
        return Tally(num_match, len(token_ids) - num_match - num_mismatch, num_mismatch)

    def coupled_gaps(self, noise_NV: Float[Tensor, "N V"], token_ids: Sequence[int]) -> list[float]:
        """Return by how much log p + noise of each token falls short of the best sure token's; infinite off the support."""
        scores_NV = self.log_untruncated_NV + noise_NV
        best_N = scores_NV.masked_fill(~self.is_sure_NV, float("-inf")).amax(-1)
        own_N = _at(scores_NV.masked_fill(~self.is_perhaps_NV, float("-inf")), token_ids)
        return (best_N - own_N).tolist()


def is_testable(sampling: SamplingParams, tolerance: float) -> bool:
    """Whether logits off by `tolerance` leave a law that draws can be tested against: no probability off by a factor above e."""
    return tolerance <= sampling.temperature


def support_of(probs_of: LawsOf, logits_NV: Float[Tensor, "N V"], sampling: SamplingParams, tolerance: float) -> Support:
    """Return the support of laws under `sampling` of logits, edited already, that may be off by `tolerance`.

    Of two tokens nearly tied for the first place either may be all of a sharp law. A nucleus whose mass meets top-p nearly
    exactly may hold a token more or less, and so may a top-k with a near tie at its end.
    """
    temperature = max(sampling.temperature, MIN_TEMPERATURE)
    probs_NV, log_NV = probs_of(sampling), torch.log_softmax(logits_NV.double() / temperature, -1)
    is_near_top_NV = logits_NV >= logits_NV.amax(-1, keepdim=True) - tolerance
    is_sure_NV = is_perhaps_NV = probs_NV > 0
    if sampling.top_p < 1.0 or sampling.top_k or sampling.min_p:
        is_sure_NV, is_perhaps_NV = _edges(probs_of, log_NV.exp(), sampling, min(_MOST_SLACK, tolerance / temperature))
    return Support(probs_NV, log_NV, is_sure_NV, is_perhaps_NV | is_near_top_NV, is_testable(sampling, tolerance))


def _edges(probs_of: LawsOf, untruncated_NV: Tensor, sampling: SamplingParams, slack: float) -> tuple[Tensor, Tensor]:
    """Return the tokens that truncation surely keeps, and those it perhaps keeps."""
    sure = probs_of(replace(sampling, top_p=_less(sampling.top_p, slack), min_p=min(1.0, sampling.min_p / (1.0 - slack))))
    perhaps = probs_of(replace(sampling, top_p=min(1.0, sampling.top_p + slack), min_p=sampling.min_p * (1.0 - slack)))
    most_dropped_N1 = untruncated_NV.masked_fill(sure > 0, 0.0).amax(-1, keepdim=True)
    is_sure_NV = (sure > 0) & (untruncated_NV >= most_dropped_N1 * (1.0 + slack))
    least_kept_N1 = untruncated_NV.masked_fill(perhaps <= 0, 1.0).amin(-1, keepdim=True)
    is_perhaps_NV = untruncated_NV >= least_kept_N1 * (1.0 - slack)
    return is_sure_NV, is_perhaps_NV & (untruncated_NV > 0)


def _less(top_p: float, slack: float) -> float:
    """Return a smaller top-p; 1 is off and stays so."""
    return top_p if top_p >= 1.0 else max(1e-6, top_p - slack)


def _at(values_NV: Tensor, token_ids: Sequence[int]) -> Tensor:
    return values_NV.gather(-1, torch.tensor(list(token_ids), device=values_NV.device)[:, None])[:, 0]
