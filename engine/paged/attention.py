"""Attention over a table as a model's layers see it, and whether the kernel can serve a model.

Shape key: T tokens, H key-value heads, G query heads for each, K head size, S slots.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.kv_cache import KVCache
from engine.paged.table import PagedBatch

_LARGEST_HEAD = 256
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Attend(Protocol):
    """Attention over pools of slots: the kernel, or the reference."""

    def __call__(
        self,
        query_THGK: Float[Tensor, "T H G K"],
        keys_SHK: Float[Tensor, "S H K"],
        values_SHV: Float[Tensor, "S H V"],
        batch: PagedBatch,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Float[Tensor, "T H G V"]:
        """Return every token's output."""
        ...


@dataclass(frozen=True)
class PagedContext:
    """What every layer of one pass over a table shares."""

    batch: PagedBatch
    cache: KVCache
    attend: Attend

    @property
    def write_slots_T(self) -> Int[Tensor, " T"]:
        """Slots to write."""
        return self.batch.write_slots_T

    def attended(
        self,
        layer: int,
        query_THGK: Float[Tensor, "T H G K"],
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Float[Tensor, "T HGV"]:
        """Return every token's output over what the cache holds for a layer."""
        return self.attend(query_THGK, *self.cache.layer(layer), self.batch, scaling, window, softcap).flatten(1)


def why_not(device: torch.device, head_size: int, dtype: torch.dtype) -> str | None:
    """Return why the kernel does not serve a model there; None if it does."""
    if device.type != "cuda":
        return f"{device} is no CUDA device"
    if find_spec("triton") is None:
        return "triton is not installed"
    if head_size > _LARGEST_HEAD:
        return f"heads of {head_size} are larger than {_LARGEST_HEAD}"
    return None if dtype in _DTYPES else f"{dtype} is not one of its formats"


def kernel() -> Attend:
    """Return the kernel; triton is imported here and nowhere before."""
    from engine.paged.launch import attend

    return attend
