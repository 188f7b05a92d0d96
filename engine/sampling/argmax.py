"""The arg max of each row of logits, and whether the row is valid. Greedy decoding and all verifiers use it.

Shape key: N rows, V vocabulary.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from engine.native import distributions as native
from engine.utils.host_transfer import rows_to_host


class RowArgMax(NamedTuple):
    """A row's largest logit (NaN if the row contains NaN) and the first token that has it."""

    logit: float
    token_id: int

    @property
    def is_valid(self) -> bool:
        """Whether no logit is NaN and the largest is finite; -inf is a masked token and valid."""
        return math.isfinite(self.logit)


def argmax_rows(logits_NV: Float[Tensor, "N V"]) -> list[RowArgMax]:
    """Return each row's arg max."""
    if native.can_read(logits_NV):
        return [RowArgMax(*one) for one in native.likeliest(logits_NV)]
    if not _is_on_host(logits_NV):  # in one transfer
        return [RowArgMax(top, int(first)) for (top,), (first,) in rows_to_host(_columns(logits_NV))]
    return [RowArgMax(*one) for one in zip(logits_NV.amax(-1).tolist(), _first(logits_NV), strict=True)]


def are_valid(logits_NV: Float[Tensor, "N V"]) -> list[bool]:
    """Return for each row whether it is valid."""
    if native.can_read(logits_NV):
        return [one.is_valid for one in argmax_rows(logits_NV)]
    return [math.isfinite(top) for top in logits_NV.amax(-1).tolist()]


def _is_on_host(logits_NV: Float[Tensor, "N V"]) -> bool:
    return logits_NV.device.type == "cpu"


def _columns(logits_NV: Float[Tensor, "N V"]) -> list[Tensor]:
    return [logits_NV.amax(-1, keepdim=True), logits_NV.argmax(-1, keepdim=True)]


def _first(logits_NV: Float[Tensor, "N V"]) -> list[int]:
    """Return each row's arg max, the first of several. On a CPU numpy is several times faster than torch."""
    if _is_on_host(logits_NV) and logits_NV.dtype == torch.float32:
        return logits_NV.numpy().argmax(-1).tolist()  # type: ignore[no-any-return]
    return logits_NV.argmax(-1).tolist()
