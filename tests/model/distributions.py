"""Distributions of sampling parameters that do not depend on the sequence."""

from collections.abc import Sequence

from torch import Tensor

from engine.core.step_plan import SamplingContext
from engine.core.types import SamplingParams
from engine.sampling.distributions import processed_probs


def probs_of(logits_NV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the distribution of each row after its sampling parameters."""
    return processed_probs(logits_NV, [SamplingContext(one) for one in params])
