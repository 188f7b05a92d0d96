"""Laws of sampling parameters that look at no text."""

from collections.abc import Sequence

from torch import Tensor

from engine.core.step_plan import LawContext
from engine.core.types import SamplingParams
from engine.sampling.laws import processed_laws


def laws_of(logits_NV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return what `processed_laws` makes of each row."""
    return processed_laws(logits_NV, [LawContext(one) for one in params])
