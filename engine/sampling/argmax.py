"""The likeliest token of each row of logits, and whether the row is one: what greedy decoding chooses and every judge asks first.

Shape key: N rows, V vocabulary.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from engine.native import distributions as native
from engine.utils.host_transfer import rows_to_host


class Likeliest(NamedTuple):
    """A row's largest logit, NaN if one of the row's is, and the first token that has it."""

    logit: float
    token_id: int

    @property
    def is_sound(self) -> bool:
        """Whether no logit is NaN and the largest not infinite (-inf is a masked token and sound)."""
        return math.isfinite(self.logit)


def likeliest(logits_NV: Float[Tensor, "N V"]) -> list[Likeliest]:
    """Return each row's."""
    if native.can_read(logits_NV):
        return [Likeliest(*one) for one in native.likeliest(logits_NV)]
    if not _is_on_host(logits_NV):  # in one transfer
        return [Likeliest(top, int(first)) for (top,), (first,) in rows_to_host(_columns(logits_NV))]
    return [Likeliest(*one) for one in zip(logits_NV.amax(-1).tolist(), _first(logits_NV), strict=True)]


def are_sound(logits_NV: Float[Tensor, "N V"]) -> list[bool]:
    """Return for each row whether it is."""
    if native.can_read(logits_NV):
        return [one.is_sound for one in likeliest(logits_NV)]
    return [math.isfinite(top) for top in logits_NV.amax(-1).tolist()]


def _is_on_host(logits_NV: Float[Tensor, "N V"]) -> bool:
    return logits_NV.device.type == "cpu"


def _columns(logits_NV: Float[Tensor, "N V"]) -> list[Tensor]:
    return [logits_NV.amax(-1, keepdim=True), logits_NV.argmax(-1, keepdim=True)]


def _first(logits_NV: Float[Tensor, "N V"]) -> list[int]:
    """Return each row's arg max, the first of several: on a processor by numpy, in a tenth of torch's time."""
    if _is_on_host(logits_NV) and logits_NV.dtype == torch.float32:
        return logits_NV.numpy().argmax(-1).tolist()  # type: ignore[no-any-return]
    return logits_NV.argmax(-1).tolist()
