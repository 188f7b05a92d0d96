"""A draft head for inference with torch: the function of engine.draft.models.head in fewer operations.

A draft pass has few rows, so that most operations take longer to start than to run. Norm weights are folded into the next linear
layer. The output projection and the target's output rows are one linear layer. Queries and keys are rotated together by a table.
On a CPU attention is computed in float32, because a batched product of a few bfloat16 rows is slower there.

Shape key: T tokens, P of them with logits, D target width, F feature layers, W inner width, M head vocabulary, H key-value heads,
G query heads for each, K head size, N positions of a table, R = 2 K.
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
from engine.attention.scoring import Scoring
from engine.attention.tree_attention import AttentionContext, GatheredAttention
from engine.draft.models.feature_pool import FeaturePool, FedTokens
from engine.draft.models.head import DraftHead, HeadLayer
from engine.kv_cache.kv_cache import KVCache
from engine.model.linear_backends import linear_of, prepare_linears
from engine.utils.host_transfer import integers
from engine.utils.rotary_table import RotaryTable


class TorchHeadLayer(nn.Module):
    """A decoder layer of a head without its attention product."""

    def __init__(self, layer: HeadLayer) -> None:
        super().__init__()
        shape = layer.shape
        self._num_rotated, self._num_heads = shape.num_heads + shape.num_kv_heads, shape.num_heads
        self._head_size, self._norm_eps, self._reads_tokens = shape.head_size, shape.norm_eps, layer.token_norm is not None
        norms = [layer.state_norm] if layer.token_norm is None else [layer.token_norm, layer.state_norm]
        self.qkv = _with_folded_norm(layer.qkv.weight, torch.cat([norm.weight for norm in norms]), shape.width)
        self.output = linear_of(layer.output.weight)
        self.gate_up = _with_folded_norm(layer.gate_up.weight, layer.mlp_norm.weight, shape.width)
        self.down = linear_of(layer.down.weight)

    def projected(
        self, state_TW: Float[Tensor, "T W"], token_TW: Float[Tensor, "T W"], rotation_TR: Float[Tensor, "T R"]
    ) -> tuple[Float[Tensor, "T HG K"], Float[Tensor, "T H K"], Float[Tensor, "T H K"]]:
        """Return rotated queries and keys, in the rotation's precision, and values."""
        if self._reads_tokens:
            x = _unit_norm(torch.stack([token_TW, state_TW], dim=1), self._norm_eps).flatten(1)
        else:
            x = _unit_norm(state_TW, self._norm_eps)
        heads = self.qkv(x).view(len(x), -1, self._head_size)
        cos, signed_sin = rotation_TR[:, None].chunk(2, dim=-1)
        rotated = heads[:, : self._num_rotated]
        rotated = torch.addcmul(rotated * cos, rotated.roll(self._head_size // 2, -1), signed_sin)
        return rotated[:, : self._num_heads], rotated[:, self._num_heads :], heads[:, self._num_rotated :]

    def after_attention(self, state_TW: Float[Tensor, "T W"], attended: Float[Tensor, "T HGK"]) -> Float[Tensor, "T W"]:
        """Return the layer's output from the attention's output."""
        state_TW = state_TW + self.output(attended)
        gate, up = self.gate_up(_unit_norm(state_TW, self._norm_eps)).chunk(2, dim=-1)
        return state_TW + self.down(functional.silu(gate) * up)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _TokenInputs:
    """Fed tokens: their ids, their rotations, and the places of tokens with logits."""

    ids_T: Int[Tensor, " T"]
    rotation_TR: Float[Tensor, "T R"]
    places_P: Int[Tensor, " P"]


class TorchHead(nn.Module):
    """The network, with its own copy of the weights. `rows_MD` are the target's output rows of the head's tokens."""

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
        self._embeddings_VD = embeddings_VD.detach()  # not a parameter of this module, which would be cast with it
        self.dtype = dtype  # of activations
        self.attention_dtype = torch.float32 if device.type == "cpu" else dtype
        self.fuse = linear_of(head.fuse.weight * math.sqrt(shape.target_width))
        self.token = linear_of(head.token.weight)
        self.layers = nn.ModuleList(TorchHeadLayer(layer) for layer in head.decoder)
        output_MW = rows_MD.float() @ head.widen.weight.to(rows_MD.device, torch.float32)
        self.output = _with_folded_norm(output_MW, head.last_norm.weight, shape.width)
        self.to(device, dtype)
        prepare_linears(self, linears)
        self._rotations = RotaryTable(self._rotation_table, device)

    @property
    def decoder(self) -> list[TorchHeadLayer]:
        """The decoder layers, first to last."""
        return list(self.layers)  # type: ignore[arg-type]

    def keep_features(self, pool: FeaturePool, slots_T: Int[Tensor, " T"], states: Sequence[Float[Tensor, "T D"]]) -> None:
        """Fuse the target's states after the feature layers into one feature for each token; store it in the token's slot."""
        states_TFD = torch.stack(tuple(states), dim=1)
        pool.write(slots_T, self.fuse(_unit_norm(states_TFD, self.shape.norm_eps).flatten(-2).to(self.dtype)))

    def features_at(self, pool: FeaturePool, slots: Sequence[int]) -> Float[Tensor, "T W"]:
        """Return the features of the tokens in these slots."""
        return pool.read_checked(slots)

    def tokens(self, embeddings_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T W"]:
        """Project the target's embeddings to the inner width."""
        return self.token(embeddings_TD.to(self.dtype))  # type: ignore[no-any-return]

    def rotation(self, positions_T: Int[Tensor, " T"], end: int) -> Float[Tensor, "T R"]:
        """Return cosines and signed sines of positions below `end`, float32."""
        return self._rotations.below(end).index_select(0, positions_T)

    def _rotation_table(self, positions_N: Int[Tensor, " N"]) -> Float[Tensor, "N R"]:
        cos_N1K, sin_N1K = self.shape.rotary(positions_N)
        first, second = sin_N1K[:, 0].chunk(2, dim=-1)
        return torch.cat([cos_N1K[:, 0], -first, second], dim=-1)

    def draft_logits(
        self,
        pool: FeaturePool,
        fed: FedTokens,
        queried: Sequence[Segment] | None,
        places: Sequence[int],
        cache: KVCache,
    ) -> Float[Tensor, "P M"]:
        """Feed tokens, each with the row of the slot before it. Return the logits at `places` and store the states there.

        `places` are indices of the fed tokens, and `queried` the segments of these tokens alone, or None for all tokens. Only the
        keys of other tokens are needed, so the last layer does not attend for them.
        """
        batch, context = fed.batch, GatheredAttention(fed.batch, cache)
        places_P = integers(places, self._embeddings_VD.device)
        last_context = None if queried is None else GatheredAttention(pack(queried, batch.device), cache)
        inputs = _TokenInputs(batch.input_ids_1T[0], self.rotation(batch.position_ids_1T[0], batch.end), places_P)
        states_PW = self._last_states(pool.read_checked(fed.previous_slots), inputs, context, last_context)
        pool.write(batch.write_slots_T.index_select(0, places_P), states_PW)
        return self.logits(states_PW)

    def forward_table(
        self, pool: FeaturePool, batch: PagedBatch, cache: KVCache, attend: Attend, end: int
    ) -> Float[Tensor, "P M"]:
        """As `draft_logits`, over a table of tokens at positions below `end`.

        The table has one more column for tokens, the slots that they read, and one more for places, the slots of their tokens.
        """
        previous_T, (places_P, slots_P) = batch.tokens[-1], batch.outputs
        inputs = _TokenInputs(batch.tokens[IDS], self.rotation(batch.tokens[POSITIONS], end), places_P)
        states_PW = self._last_states(pool.read(previous_T), inputs, PagedContext(batch, cache, attend), None)
        pool.write(slots_P, states_PW)
        return self.logits(states_PW)

    def _last_states(
        self,
        states_TW: Float[Tensor, "T W"],
        inputs: _TokenInputs,
        context: AttentionContext,
        last_context: GatheredAttention | None,
    ) -> Float[Tensor, "P W"]:
        """Return the last states at the queried places. With `last_context` the last layer attends for these tokens alone."""
        tokens_TW = self.tokens(self._embeddings_VD[inputs.ids_T])
        for index, layer in enumerate(self.decoder):
            projected = layer.projected(states_TW, tokens_TW, inputs.rotation_TR)
            query, key, value = (x.to(self.attention_dtype) for x in projected)
            context.cache.write(index, context.write_slots_T, key, value)
            query_THGK = query.reshape(len(query), key.shape[1], -1, self.shape.head_size)
            if index < len(self.layers) - 1:
                attended = context.attended(index, query_THGK, Scoring(self.shape.head_size**-0.5))
            else:
                attended = self._attend_last_layer(index, query_THGK, inputs.places_P, context, last_context)
                states_TW = states_TW.index_select(0, inputs.places_P)
            states_TW = layer.after_attention(states_TW, attended.to(states_TW.dtype))
        return states_TW

    def _attend_last_layer(
        self,
        index: int,
        query_THGK: Tensor,
        places_P: Int[Tensor, " P"],
        context: AttentionContext,
        last_context: GatheredAttention | None,
    ) -> Float[Tensor, "P HGK"]:
        scoring = Scoring(self.shape.head_size**-0.5)
        if last_context is None:
            return context.attended(index, query_THGK, scoring).index_select(0, places_P)
        query_PHGK = query_THGK.index_select(0, places_P)
        return last_context.attended(index, query_PHGK, scoring) if len(places_P) else query_PHGK.flatten(1)

    def logits(self, state_TW: Float[Tensor, "T W"]) -> Float[Tensor, "T M"]:
        """Return the draft logits of the head's tokens, float32."""
        return self.output(_unit_norm(state_TW, self.shape.norm_eps)).float()  # type: ignore[no-any-return]


def _unit_norm(x: Float[Tensor, "*T W"], eps: float) -> Float[Tensor, "*T W"]:
    """Return rms_norm(x) / sqrt(W) without the weight; the next linear layer contains both factors."""
    squares: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
    return x * squares.add_(eps * x.shape[-1]).rsqrt_().to(x.dtype)


def _with_folded_norm(weight: Tensor, norm_weight: Tensor, width: int) -> nn.Linear:
    return linear_of(weight * (norm_weight * math.sqrt(width)).to(weight.device))
