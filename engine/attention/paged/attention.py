"""The attention context over a table for a model's layers, and the checks that the kernel supports a model.

Shape key: T tokens, H key-value heads, G query heads for each, K head size, S slots.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from subprocess import SubprocessError
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.attention.packing import pack
from engine.attention.paged.table import MANY_TOKENS, PagedBatch, Shape, TableColumns, table_of
from engine.attention.scoring import Scoring
from engine.kv_cache.kv_cache import KVCache
from engine.utils.host_transfer import integers_32

_LARGEST_HEAD, _LARGEST_SHARED = 256, 2048  # size of a query head, and of all query heads that share a key
_LEAST_CAPABILITY = (8, 0)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Attend(Protocol):
    """Attention over pools of slots: the kernel, or the reference."""

    def __call__(
        self,
        query_THGK: Float[Tensor, "T H G K"],
        keys_SHK: Float[Tensor, "S H K"],
        values_SHV: Float[Tensor, "S H V"],
        batch: PagedBatch,
        scoring: Scoring,
    ) -> Float[Tensor, "T H G V"]:
        """Return every token's output."""
        ...


@dataclass(frozen=True)
class PagedContext:
    """The state shared by all layers of one pass over a table."""

    batch: PagedBatch
    cache: KVCache
    attend: Attend

    @property
    def write_slots_T(self) -> Int[Tensor, " T"]:
        """Slots to write."""
        return self.batch.write_slots_T

    def attended(self, layer: int, query_THGK: Float[Tensor, "T H G K"], scoring: Scoring) -> Float[Tensor, "T HGV"]:
        """Attend to a layer's cached keys; return every token's output."""
        return self.attend(query_THGK, *self.cache.layer(layer), self.batch, scoring).flatten(1)


def unsupported_reason(device: torch.device, head_size: int, num_shared: int, dtype: torch.dtype) -> str | None:
    """Return why the kernel does not support a model on a device, None if it does; `num_shared` query heads share keys."""
    if device.type != "cuda":
        return f"{device} is no CUDA device"
    if find_spec("triton") is None:
        return "triton is not installed"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has a compute capability below {'.'.join(map(str, _LEAST_CAPABILITY))}"
    if (reason := size_reason(head_size, num_shared)) is not None:
        return reason
    return None if dtype in _DTYPES else f"{dtype} is not supported"


def size_reason(head_size: int, num_shared: int) -> str | None:
    """Return why the kernel does not support heads of a size, None if it does."""
    if head_size > _LARGEST_HEAD:
        return f"heads of {head_size} are larger than {_LARGEST_HEAD}"
    if head_size * num_shared > _LARGEST_SHARED:
        return f"{num_shared} heads of {head_size} that share their keys do not fit a block"
    return None


class Heads(NamedTuple):
    """A model's key-value heads, query heads for each, and the size of a head."""

    num: int
    num_shared: int
    size: int


def heads_of(configuration: Any) -> Heads:
    """Return the heads of a model."""
    text = configuration.get_text_config()
    num_query = int(text.num_attention_heads)
    num = int(getattr(text, "num_key_value_heads", None) or num_query)
    return Heads(num, num_query // num, int(getattr(text, "head_dim", None) or text.hidden_size // num_query))


def kernel_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions raised if the kernel cannot be compiled (for example without a C compiler) or does not fit."""
    from triton.errors import TritonError

    return RuntimeError, OSError, SubprocessError, TritonError


def check_kernel(attend: Attend, device: torch.device, num_heads: int, num_shared: int, size: int, dtype: torch.dtype) -> None:
    """Run the kernel over padding with the smallest and the largest tiles; raises one of `kernel_errors` if it fails."""
    columns = TableColumns(tokens=(0, 0, 0), outputs=())
    for num_tokens in (1, MANY_TOKENS):
        shape = Shape(num_tokens, 0)
        table = integers_32(table_of(pack([], device), shape, columns), device)
        query_THGK = torch.zeros(num_tokens, num_heads, num_shared, size, dtype=dtype, device=device)
        pool_SHK = torch.zeros(1, num_heads, size, dtype=dtype, device=device)
        attend(query_THGK, pool_SHK, pool_SHK, PagedBatch(table, shape, columns), Scoring(1.0))


def kernel() -> Attend:
    """Return the kernel. This imports triton, which nothing else does before."""
    from engine.attention.paged.launch import attend

    return attend
