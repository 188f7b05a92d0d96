"""Tree-masked attention over slots, as a transformers attention implementation named "latebranch".

Each layer writes its new keys and values to the cache, then its context computes attention: here by batched products for every
group of segments, in engine.attention.paged by a kernel. Grouped-query heads are folded into the query rows, so that keys and
values are never expanded.
Shape key: T packed tokens, B segments, Q queries of a group, L keys, H key-value heads, G query heads for each, K head size.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from engine.attention.packing import Group, PackedBatch
from engine.attention.paths import PathStep, path_steps
from engine.attention.scoring import Scoring
from engine.kv_cache.kv_cache import KVCache

NAME = "latebranch"


class UnsupportedAttention(ValueError):
    """The model needs a form of attention that this implementation cannot compute exactly."""


class AttentionContext(Protocol):
    """The state shared by all layers of one pass, passed through the model as a keyword argument."""

    @property
    def cache(self) -> KVCache:
        """The cache of keys and values."""
        ...

    @property
    def write_slots_T(self) -> Int[Tensor, " T"]:
        """Slots to write."""
        ...

    def attended(self, layer: int, query_THGK: Float[Tensor, "T H G K"], scoring: Scoring) -> Float[Tensor, "T HGV"]:
        """Attend to a layer's cached keys; return every packed token's output, in packed order."""
        ...


@dataclass(frozen=True)
class GatheredAttention:
    """Attention that gathers the keys of padded groups, in torch, on any device."""

    batch: PackedBatch
    cache: KVCache

    @property
    def write_slots_T(self) -> Int[Tensor, " T"]:
        """Slots to write."""
        return self.batch.write_slots_T

    @cached_property
    def path_steps(self) -> list[PathStep]:
        """The order in which recurrent layers take the tokens."""
        return path_steps(self.batch)

    def attended(self, layer: int, query_THGK: Float[Tensor, "T H G K"], scoring: Scoring) -> Float[Tensor, "T HGV"]:
        """Attend group by group."""
        padded, outputs = self.batch.padded, []
        for group in padded.groups:
            keys, values = (gathered.to(query_THGK.dtype) for gathered in self.cache.gather(layer, group.key_slots_BL))
            outputs.append(group_attention(query_THGK, keys, values, group, scoring))
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out if padded.is_identity else out.index_select(0, padded.unpad_T)


def group_attention(
    query_THGK: Float[Tensor, "T H G K"],
    keys_BLHK: Float[Tensor, "B L H K"],
    values_BLHK: Float[Tensor, "B L H V"],
    group: Group,
    scoring: Scoring,
) -> Float[Tensor, "BQ HGV"]:
    """Return the attention output of one group, padded rows included."""
    scores = torch.matmul(folded(query_THGK, group), keys_BLHK.permute(0, 2, 3, 1)) * scoring.scale
    scores = unfolded(scoring.capped(scores), group) + group.bias(scoring.window, scores.dtype)
    weights_BHGQL = scoring.weights(scores).to(query_THGK.dtype)
    return in_rows(torch.matmul(weights_BHGQL.flatten(2, 3), values_BLHK.permute(0, 2, 1, 3)), group)


def folded(query_THGK: Float[Tensor, "T H G K"], group: Group) -> Float[Tensor, "B H GQ K"]:
    """Return a group's queries, with the heads that share a key-value head folded into rows."""
    num_rows, num_queries = group.token_index_BT.shape
    query = query_THGK[group.token_index_BT.reshape(-1)].view(num_rows, num_queries, *query_THGK.shape[1:])
    return query.permute(0, 2, 3, 1, 4).flatten(2, 3)


def unfolded(x: Float[Tensor, "B H GQ N"], group: Group) -> Float[Tensor, "B H G Q N"]:
    """Return the rows of folded queries by head and query."""
    return torch.unflatten(x, 2, (-1, group.token_index_BT.shape[1]))


def in_rows(out: Float[Tensor, "B H GQ V"], group: Group) -> Float[Tensor, "BQ HGV"]:
    """Return the outputs of folded queries with one row for each query."""
    return unfolded(out, group).permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1)


def tree_attention(
    module: nn.Module,
    query: Float[Tensor, "1 HG T K"],
    key: Float[Tensor, "1 H T K"],
    value: Float[Tensor, "1 H T V"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " HG"] | None = None,
    attention_context: AttentionContext | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "1 T HG V"], None]:
    """Write the layer's keys and values, then attend; the signature is transformers' AttentionInterface.

    `s_aux` are attention sinks. Raises UnsupportedAttention for a call without context, which would be unmasked.
    """
    if attention_context is None or attention_mask is not None:
        raise UnsupportedAttention("this attention needs its context and makes its own masks")
    if s_aux is None and getattr(module, "sinks", None) is not None:
        raise UnsupportedAttention("the layer has attention sinks and does not pass them")
    layer: int = module.layer_idx  # type: ignore[assignment]
    attention_context.cache.write(layer, attention_context.write_slots_T, key[0].transpose(0, 1), value[0].transpose(0, 1))
    num_tokens, num_heads, head_size = query.shape[2], key.shape[1], query.shape[3]
    query_THGK = query[0].transpose(0, 1).reshape(num_tokens, num_heads, -1, head_size)
    sinks_HG = None if s_aux is None else s_aux.view(num_heads, -1)
    scoring = Scoring(head_size**-0.5 if scaling is None else scaling, sliding_window, softcap, sinks_HG)
    out = attention_context.attended(layer, query_THGK, scoring)
    return out.view(1, num_tokens, num_heads * query_THGK.shape[2], -1), None


@cache
def register() -> None:
    """Make the implementation known to transformers. Importing that takes seconds, and the native library does without."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, tree_attention)
