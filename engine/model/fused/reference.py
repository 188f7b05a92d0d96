"""The launches of a fused decoder in a few lines of torch, computed in float32: for comparison, and for a processor."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import silu

from engine.attention.paged.table import POSITIONS, WRITE_SLOTS, PagedBatch
from engine.model.fused.parts import FusedLayer, Pools, RopeScale, Weight


class TorchOperations:
    """Implements parts.FusedOperations."""

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
        num_heads, size = pools.keys_SHK.shape[1:]
        stacked = _product(_normed(states_TD, layer.attention_norm_D, eps), layer.qkv)
        if layer.bias_O is not None:
            stacked = stacked + layer.bias_O.float()
        heads = stacked.view(len(states_TD), -1, size)
        query, keys, values = torch.split(heads, [heads.shape[1] - 2 * num_heads, num_heads, num_heads], dim=1)
        if layer.head_norms_2K is not None:
            query, keys = (_normed(x, norm_K, eps) for x, norm_K in zip((query, keys), layer.head_norms_2K, strict=True))
        angles_T1F = batch.tokens[POSITIONS][:, None, None].float() * rotary.frequencies_F
        query, keys = (_turned(x, angles_T1F, rotary.scaling) for x in (query, keys))
        slots_T = batch.tokens[WRITE_SLOTS]
        pools.keys_SHK[slots_T] = keys.to(pools.keys_SHK.dtype)
        pools.values_SHK[slots_T] = values.to(pools.values_SHK.dtype)
        return query.to(states_TD.dtype).view(len(states_TD), num_heads, -1, size)

    def gated(self, states_TD: Float[Tensor, "T D"], layer: FusedLayer, eps: float) -> Float[Tensor, "T M"]:
        """Return SiLU(gate) * up of the normed states."""
        gate, up = _product(_normed(states_TD, layer.mlp_norm_D, eps), layer.gate_up).chunk(2, dim=-1)
        return (silu(gate) * up).to(states_TD.dtype)

    def add_product(self, states_TD: Float[Tensor, "T D"], x_TI: Float[Tensor, "T I"], weight: Weight) -> None:
        """Add x W^T to the states, in place."""
        states_TD.copy_(states_TD.float() + _product(x_TI.float(), weight))

    def logits(self, states_ND: Float[Tensor, "N D"], norm_D: Tensor, head: Weight, eps: float) -> Float[Tensor, "N V"]:
        """Return float32 logits of states before the last norm."""
        return _product(_normed(states_ND, norm_D, eps), head)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight


def _product(x: Tensor, weight: Weight) -> Tensor:
    out = x @ weight.rows_OI.float().T
    return out if weight.scales_O is None else out * weight.scales_O


def _turned(x: Tensor, angles: Tensor, scaling: float) -> Tensor:
    one, two = x.chunk(2, dim=-1)
    cosines, sines = angles.cos() * scaling, angles.sin() * scaling
    return torch.cat([one * cosines - two * sines, two * cosines + one * sines], dim=-1)
