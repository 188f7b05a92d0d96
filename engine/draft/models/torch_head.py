"""A draft head made ready to draft: the function of engine.draft.models.head in fewer operations, on few rows.

A draft pass is some tens of operations on a handful of rows, and most take longer to start than to run. So what is a diagonal map
(a norm's weight) is folded into the map after it, the widening and the target's output rows are one map, queries and keys are
rotated together by a table, and on a processor attention is in float32: a batched product of a few bfloat16 rows takes longer
there. Shape key: T tokens, P of them asked about, D target width, F feature layers, W inner width, M head vocabulary, H key-value
heads, G query heads for each, K head size, N positions of a table, R = 2 K.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from engine.attention.packing import Segment, pack
from engine.attention.paged.attention import Attend, PagedContext
from engine.attention.paged.table import IDS, POSITIONS, PagedBatch
from engine.attention.tree_attention import AttentionContext, GatheredAttention
from engine.draft.models.feature_pool import FeaturePool, Fed
from engine.draft.models.head import DraftHead, HeadLayer
from engine.kv_cache.pool import KVCache
from engine.model.linears import linear_of, prepare_linears
from engine.utils.host_transfer import integers
from engine.utils.rotary_table import RotaryTable


class LeanLayer(nn.Module):
    """A decoder layer of a head, but for its attention product."""

    def __init__(self, layer: HeadLayer) -> None:
        super().__init__()
        shape = layer.shape
        self._num_rotated, self._num_heads = shape.num_heads + shape.num_kv_heads, shape.num_heads
        self._head_size, self._norm_eps, self._reads_tokens = shape.head_size, shape.norm_eps, layer.token_norm is not None
        norms = [layer.state_norm] if layer.token_norm is None else [layer.token_norm, layer.state_norm]
        self.qkv = _after_norm(layer.qkv.weight, torch.cat([norm.weight for norm in norms]), shape.width)
        self.output = linear_of(layer.output.weight)
        self.gate_up = _after_norm(layer.gate_up.weight, layer.mlp_norm.weight, shape.width)
        self.down = linear_of(layer.down.weight)

    def projected(
        self, state_TW: Float[Tensor, "T W"], token_TW: Float[Tensor, "T W"], rotation_TR: Float[Tensor, "T R"]
    ) -> tuple[Float[Tensor, "T HG K"], Float[Tensor, "T H K"], Float[Tensor, "T H K"]]:
        """Return queries and keys, rotated, in the rotation's precision, and values."""
        if self._reads_tokens:
            x = _unit(torch.stack([token_TW, state_TW], dim=1), self._norm_eps).flatten(1)
        else:
            x = _unit(state_TW, self._norm_eps)
        heads = self.qkv(x).view(len(x), -1, self._head_size)
        cos, signed_sin = rotation_TR[:, None].chunk(2, dim=-1)
        turned = heads[:, : self._num_rotated]
        turned = torch.addcmul(turned * cos, turned.roll(self._head_size // 2, -1), signed_sin)
        return turned[:, : self._num_heads], turned[:, self._num_heads :], heads[:, self._num_rotated :]

    def finished(self, state_TW: Float[Tensor, "T W"], attended: Float[Tensor, "T HGK"]) -> Float[Tensor, "T W"]:
        """Return the layer's output for the attention's."""
        state_TW = state_TW + self.output(attended)
        gate, up = self.gate_up(_unit(state_TW, self._norm_eps)).chunk(2, dim=-1)
        return state_TW + self.down(functional.silu(gate) * up)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Numbers:
    """Of tokens that are fed: their ids, their rotations, and which of them are asked about."""

    ids_T: Int[Tensor, " T"]
    rotation_TR: Float[Tensor, "T R"]
    places_P: Int[Tensor, " P"]


class LeanHead(nn.Module):
    """The net, with its own copy of the weights. `rows_MD` are the target's output rows of the head's tokens."""

    def __init__(
        self,
        head: DraftHead,
        rows_MD: Float[Tensor, "M D"],
        embeddings_VD: Float[Tensor, "V D"],
        dtype: torch.dtype,
        device: torch.device,
        linears: str,
    ) -> None:
        super().__init__()
        self.shape = shape = head.shape
        self._embeddings_VD = embeddings_VD.detach()  # no parameter of this module, or it is cast with it
        self.dtype = dtype  # of activations
        self.attention_dtype = torch.float32 if device.type == "cpu" else dtype
        self.fuse = linear_of(head.fuse.weight * math.sqrt(shape.target_width))
        self.token = linear_of(head.token.weight)
        self.layers = nn.ModuleList(LeanLayer(layer) for layer in head.decoder)
        output_MW = rows_MD.float() @ head.widen.weight.to(rows_MD.device, torch.float32)
        self.output = _after_norm(output_MW, head.last_norm.weight, shape.width)
        self.to(device, dtype)
        prepare_linears(self, linears)
        self._rotations = RotaryTable(self._rotated, device)

    @property
    def decoder(self) -> list[LeanLayer]:
        """The decoder layers, first to last."""
        return list(self.layers)  # type: ignore[arg-type]

    def keep_features(self, pool: FeaturePool, slots_T: Int[Tensor, " T"], states: Sequence[Float[Tensor, "T D"]]) -> None:
        """Fuse the target's states after the feature layers into one feature a token, and put it in the token's slot."""
        states_TFD = torch.stack(tuple(states), dim=1)
        pool.write(slots_T, self.fuse(_unit(states_TFD, self.shape.norm_eps).flatten(-2).to(self.dtype)))

    def features_at(self, pool: FeaturePool, slots: Sequence[int]) -> Float[Tensor, "T W"]:
        """Return the features of the tokens in these slots."""
        return pool.at(slots)

    def tokens(self, embeddings_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T W"]:
        """Narrow the target's embeddings."""
        return self.token(embeddings_TD.to(self.dtype))  # type: ignore[no-any-return]

    def rotation(self, positions_T: Int[Tensor, " T"], end: int) -> Float[Tensor, "T R"]:
        """Return cosines and signed sines of positions below `end`, float32."""
        return self._rotations.below(end).index_select(0, positions_T)

    def _rotated(self, positions_N: Int[Tensor, " N"]) -> Float[Tensor, "N R"]:
        cos_N1K, sin_N1K = self.shape.rotary(positions_N)
        first, second = sin_N1K[:, 0].chunk(2, dim=-1)
        return torch.cat([cos_N1K[:, 0], -first, second], dim=-1)

    def proposed(
        self,
        pool: FeaturePool,
        fed: Fed,
        asked: Sequence[Segment] | None,
        places: Sequence[int],
        cache: KVCache,
    ) -> Float[Tensor, "P M"]:
        """Feed tokens, each by the state in the slot before it; return logits of those asked about, their states in their slots.

        `places` says where they are among the fed, and `asked` is their own segments, or None if they are all.
        All that is needed of a token not asked about is its keys: the last layer attends for the others.
        """
        batch, context = fed.batch, GatheredAttention(fed.batch, cache)
        places_P = integers(places, self._embeddings_VD.device)
        alone = None if asked is None else GatheredAttention(pack(asked, batch.device), cache)
        numbers = _Numbers(batch.input_ids_1T[0], self.rotation(batch.position_ids_1T[0], batch.end), places_P)
        states_PW = self._drafted(pool.at(fed.before), numbers, context, alone)
        pool.write(batch.write_slots_T.index_select(0, places_P), states_PW)
        return self.logits(states_PW)

    def forward_table(
        self, pool: FeaturePool, batch: PagedBatch, cache: KVCache, attend: Attend, end: int
    ) -> Float[Tensor, "P M"]:
        """As `proposed`, over a table of tokens at positions below `end`.

        A column more says which slot each token reads; the places asked about have their own slots beside them.
        """
        before_T, (places_P, slots_P) = batch.tokens[-1], batch.outputs
        numbers = _Numbers(batch.tokens[IDS], self.rotation(batch.tokens[POSITIONS], end), places_P)
        states_PW = self._drafted(pool.read(before_T), numbers, PagedContext(batch, cache, attend), None)
        pool.write(slots_P, states_PW)
        return self.logits(states_PW)

    def _drafted(
        self, states_TW: Float[Tensor, "T W"], numbers: "_Numbers", context: AttentionContext, alone: GatheredAttention | None
    ) -> Float[Tensor, "P W"]:
        """Return the last states of the tokens asked about; with `alone` the last layer attends for them alone."""
        tokens_TW = self.tokens(self._embeddings_VD[numbers.ids_T])
        for index, layer in enumerate(self.decoder):
            projected = layer.projected(states_TW, tokens_TW, numbers.rotation_TR)
            query, key, value = (x.to(self.attention_dtype) for x in projected)
            context.cache.write(index, context.write_slots_T, key, value)
            query_THGK = query.reshape(len(query), key.shape[1], -1, self.shape.head_size)
            if index < len(self.layers) - 1:
                attended = context.attended(index, query_THGK, self.shape.head_size**-0.5)
            else:
                attended = self._attended_last(index, query_THGK, numbers.places_P, context, alone)
                states_TW = states_TW.index_select(0, numbers.places_P)
            states_TW = layer.finished(states_TW, attended.to(states_TW.dtype))
        return states_TW

    def _attended_last(
        self,
        index: int,
        query_THGK: Tensor,
        places_P: Int[Tensor, " P"],
        context: AttentionContext,
        alone: GatheredAttention | None,
    ) -> Float[Tensor, "P HGK"]:
        scaling = self.shape.head_size**-0.5
        if alone is None:
            return context.attended(index, query_THGK, scaling).index_select(0, places_P)
        query_PHGK = query_THGK.index_select(0, places_P)
        return alone.attended(index, query_PHGK, scaling) if len(places_P) else query_PHGK.flatten(1)

    def logits(self, state_TW: Float[Tensor, "T W"]) -> Float[Tensor, "T M"]:
        """Return the draft logits of the head's tokens, float32."""
        return self.output(_unit(state_TW, self.shape.norm_eps)).float()  # type: ignore[no-any-return]


def _unit(x: Float[Tensor, "*T W"], eps: float) -> Float[Tensor, "*T W"]:
    """Return rms_norm(x) / sqrt(W), its weight aside: the rest is in the map that follows."""
    squares: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
    return x * squares.add_(eps * x.shape[-1]).rsqrt_().to(x.dtype)


def _after_norm(weight: Tensor, norm_weight: Tensor, width: int) -> nn.Linear:
    return linear_of(weight * (norm_weight * math.sqrt(width)).to(weight.device))
