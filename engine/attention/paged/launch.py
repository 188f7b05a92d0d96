"""Starts the kernels. Blocks, grids and the split of keys depend on shapes alone, so that a CUDA graph of them stays valid.

Shape key: T tokens, H key-value heads, G query heads for each, K head size, V size of a value, S slots.
"""

from functools import cache
from typing import NamedTuple, Self

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from engine.attention.paged import kernels
from engine.attention.paged.table import PagedBatch, Shape
from engine.attention.scoring import Scoring

_PROGRAMS, _MOST_PARTS = 264, 32  # two programs for each multiprocessor of an H100
_PARTS_BY_ROW = 8  # in passes of any size
_SMALLEST = 16  # side of a matrix product
_STAGES, _ROOMY_BYTES = 3, 160 * 1024


def num_parts(shape: Shape, num_heads: int) -> int:
    """Return the number of parts of a segment's keys: enough to occupy the multiprocessors if there are few tiles."""
    if shape.is_by_row:
        return _PARTS_BY_ROW
    num_tiles = -(-shape.num_tokens // shape.tile_len)
    return max(1, min(_MOST_PARTS, _PROGRAMS // (num_tiles * num_heads)))


class Blocks(NamedTuple):
    """Compile parameters of a program: keys of a block, warps, and pipeline stages."""

    num_columns: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, dtype: torch.dtype, num_rows: int, size: int) -> Self:
        """Return parameters with few register spills (by ptxas, for compute capability 9.0).

        Products of float32 do not use tensor cores. Three stages hide the latency of slots and keys.
        """
        if dtype == torch.float32:
            return cls(max(_SMALLEST, min(64, 2048 // size)), 8 if num_rows * size >= 4096 else 4, 1)
        return cls(max(_SMALLEST, min(64, 8192 // size)), 8 if num_rows > 64 else 4, _STAGES)


@cache
def _most_stages(device: torch.device) -> int:
    """Return the largest number of pipeline stages, which depends on the shared memory of a block."""
    if device.type != "cuda":
        return _STAGES
    room_bytes = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return _STAGES if room_bytes >= _ROOMY_BYTES else 1


def attend(
    query_THGK: Float[Tensor, "T H G K"],
    keys_SHK: Float[Tensor, "S H K"],
    values_SHV: Float[Tensor, "S H V"],
    batch: PagedBatch,
    scoring: Scoring,
) -> Float[Tensor, "T H G V"]:
    """Return every token's output, zeros for padding, as engine.attention.paged.reference.attend does."""
    num_tokens, num_heads, num_shared, size = query_THGK.shape
    value_size, shape = values_SHV.shape[-1], batch.shape
    assert num_tokens == shape.num_tokens
    if not query_THGK.is_cuda:  # interpreted, over a CPU cache stored by head
        keys_SHK, values_SHV = keys_SHK.contiguous(), values_SHV.contiguous()
    assert keys_SHK.is_contiguous()
    assert values_SHV.is_contiguous()
    parts, block_v = num_parts(shape, num_heads), max(_SMALLEST, triton.next_power_of_2(value_size))
    block_k, block_m = (max(_SMALLEST, triton.next_power_of_2(n)) for n in (size, shape.tile_len * num_shared))
    sinks = batch.table if scoring.sinks_HG is None else scoring.sinks_HG.contiguous()  # the table is not read as sinks
    rows, blocks = num_tokens * num_heads * num_shared, Blocks.of(query_THGK.dtype, block_m, max(block_k, block_v))
    out = query_THGK.new_empty(num_tokens, num_heads, num_shared, value_size)
    partial, logs = out, out
    if parts > 1:
        partial = query_THGK.new_empty(parts, rows, value_size, dtype=torch.float32)
        logs = query_THGK.new_empty(parts, rows, dtype=torch.float32)
    kernels.attend[num_tokens, num_heads, parts](
        *(query_THGK.contiguous(), keys_SHK, values_SHV, batch.table, sinks, partial, logs),
        *(num_tokens, parts, batch.first_tile, batch.first_position, scoring.scale, scoring.softcap or 1.0, scoring.window or 0),
        G=num_shared,
        NUM_HEADS=num_heads,
        K=size,
        V=value_size,
        TILE_LEN=shape.tile_len,
        IS_SPLIT=parts > 1,
        BLOCK_M=block_m,
        BLOCK_N=blocks.num_columns,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        HAS_SOFTCAP=scoring.softcap is not None,
        HAS_WINDOW=scoring.window is not None,
        HAS_SINKS=scoring.sinks_HG is not None,
        num_warps=blocks.num_warps,
        num_stages=min(blocks.num_stages, _most_stages(query_THGK.device)),
    )
    if parts > 1:
        kernels.merge[(rows,)](partial, logs, out, rows, parts, V=value_size, BLOCK_P=_MOST_PARTS, BLOCK_V=block_v, num_warps=4)
    return out
