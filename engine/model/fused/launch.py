"""Starts the kernels of a fused decoder. Grids depend on shapes alone, so that a CUDA graph of them stays valid."""

from typing import NamedTuple, Self

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from engine.attention.paged.table import POSITIONS, WRITE_SLOTS, PagedBatch
from engine.model.fused import kernels
from engine.model.fused.parts import FusedLayer, Pools, RopeScale, Weight

_SMALLEST = 16  # side of a matrix product
_FEW, _SOME = 16, 32  # tokens up to which a program has them all
_ALWAYS = 64  # tokens of a program in passes that are the same at any width


class ProductBlocks(NamedTuple):
    """Compile parameters of a program: tokens, rows of each weight block, columns at a time, warps, pipeline stages."""

    num_tokens: int
    num_rows: int
    num_columns: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, num_tokens: int, dtype: torch.dtype, num_rows: int) -> Self:
        """Return parameters with few register spills (by ptxas, for compute capability 9.0); `num_rows` are for few tokens.

        Few tokens read weights in long rows, many stages ahead. More tokens are bound by products, over larger blocks.
        """
        if dtype == torch.float32:
            return cls(_FEW, min(num_rows, 32), 32, 4, 2)
        if num_tokens <= _FEW:
            return cls(_FEW, num_rows, 128, 4, 4 if num_rows <= 32 else 3)
        return cls(_SOME, 64, 64, 4, 4) if num_tokens <= _SOME else cls(64, 64, 64, 4, 4)

    @property
    def constants(self) -> dict[str, int]:
        """As arguments of a launch."""
        blocks = {"BLOCK_M": self.num_tokens, "BLOCK_N": self.num_rows, "BLOCK_K": self.num_columns}
        return blocks | {"num_warps": self.num_warps, "num_stages": self.num_stages}


class Kernels:
    """Implements parts.FusedOperations. With `is_deterministic`, a token's result has the same bits in any pass."""

    def __init__(self, is_deterministic: bool = False) -> None:
        self._is_deterministic = is_deterministic

    def _blocks(self, num_tokens: int, dtype: torch.dtype, num_rows: int) -> ProductBlocks:
        return ProductBlocks.of(_ALWAYS if self._is_deterministic else num_tokens, dtype, num_rows)

    def rotated(
        self,
        states_TD: Float[Tensor, "T D"],
        layer: FusedLayer,
        rotary: RopeScale,
        eps: float,
        pools: Pools,
        batch: PagedBatch,
    ) -> Float[Tensor, "T H G K"]:
        """Write the tokens' keys and values to their slots; return their queries."""
        num_tokens, width = states_TD.shape
        (_, num_heads, size), keys = pools.keys_SHK.shape, pools.keys_SHK
        num_query = len(layer.qkv.rows_OI) // size - 2 * num_heads
        blocks = self._blocks(num_tokens, states_TD.dtype, half := _power(size // 2))._replace(num_rows=half)
        query = states_TD.new_empty(num_tokens, num_heads, num_query // num_heads, size)
        absent = layer.qkv.rows_OI  # a pointer that is never read
        kernels.rotated[num_query + 2 * num_heads, triton.cdiv(num_tokens, blocks.num_tokens)](
            *(states_TD, layer.attention_norm_D, *_pointers(layer.qkv)),
            absent if layer.bias_O is None else layer.bias_O,
            absent if layer.head_norms_2K is None else layer.head_norms_2K,
            *(rotary.frequencies_F, batch.table, query, keys, pools.values_SHK),
            *(num_tokens, POSITIONS * num_tokens, WRITE_SLOTS * num_tokens, keys.stride(0), keys.stride(1), eps, rotary.scaling),
            WIDTH=width,
            NUM_QUERY=num_query,
            NUM_KEY=num_heads,
            K=size,
            HAS_SCALES=layer.qkv.scales_O is not None,
            HAS_BIAS=layer.bias_O is not None,
            HAS_HEAD_NORMS=layer.head_norms_2K is not None,
            **blocks.constants,
        )
        return query

    def gated(self, states_TD: Float[Tensor, "T D"], layer: FusedLayer, eps: float) -> Float[Tensor, "T M"]:
        """Return SiLU(gate) * up of the normed states."""
        (num_tokens, width), inner = states_TD.shape, len(layer.gate_up.rows_OI) // 2
        blocks, out = self._blocks(num_tokens, states_TD.dtype, 32), states_TD.new_empty(num_tokens, inner)
        kernels.gated[triton.cdiv(inner, blocks.num_rows), triton.cdiv(num_tokens, blocks.num_tokens)](
            *(states_TD, layer.mlp_norm_D, *_pointers(layer.gate_up), out, num_tokens, eps),
            WIDTH=width,
            INNER=inner,
            HAS_SCALES=layer.gate_up.scales_O is not None,
            **blocks.constants,
        )
        return out

    def add_product(self, states_TD: Float[Tensor, "T D"], x_TI: Float[Tensor, "T I"], weight: Weight) -> None:
        """Add x W^T to the states, in place."""
        self._product(x_TI, None, weight, states_TD, 0.0, _SMALLEST)

    def logits(self, states_ND: Float[Tensor, "N D"], norm_D: Tensor, head: Weight, eps: float) -> Float[Tensor, "N V"]:
        """Return float32 logits of states before the last norm."""
        out = states_ND.new_empty(len(states_ND), len(head.rows_OI), dtype=torch.float32)
        self._product(states_ND, norm_D, head, out, eps, 64)
        return out

    def _product(self, x_TI: Tensor, norm: Tensor | None, weight: Weight, out: Tensor, eps: float, num_rows: int) -> None:
        """Products of few rows occupy all multiprocessors with small blocks."""
        (num_tokens, width), blocks = x_TI.shape, self._blocks(len(x_TI), x_TI.dtype, num_rows)
        kernels.product[triton.cdiv(len(weight.rows_OI), blocks.num_rows), triton.cdiv(num_tokens, blocks.num_tokens)](
            *(x_TI, weight.rows_OI if norm is None else norm, *_pointers(weight), out, num_tokens, len(weight.rows_OI), eps),
            WIDTH=width,
            HAS_NORM=norm is not None,
            HAS_SCALES=weight.scales_O is not None,
            IS_ADDED=norm is None,
            **blocks.constants,
        )


def _pointers(weight: Weight) -> tuple[Tensor, Tensor]:
    """Return the weight and its scales; without scales a pointer that is never read."""
    return weight.rows_OI, weight.rows_OI if weight.scales_O is None else weight.scales_O


def _power(size: int) -> int:
    return max(_SMALLEST, 1 << (size - 1).bit_length())
