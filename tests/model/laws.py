"""Laws of sampling parameters that look at no text."""

from collections.abc import Sequence

from torch import Tensor

from engine.plan import LawContext
from engine.sampling import processed_laws
from engine.types import SamplingParams


def laws_of(logits_NV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return what `processed_laws` makes of each row."""
    return processed_laws(logits_NV, [LawContext(one) for one in params])
