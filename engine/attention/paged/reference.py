"""A slow reference of attention over a table, in a few lines of torch, one segment at a time.

Shape key: T tokens, Q queries of a segment, L keys, W tail keys, H key-value heads, G query heads for each, K head size, S slots.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from engine.attention.paged.table import NUM_TILE_FIELDS, WORD_BITS, PagedBatch, num_words
from engine.attention.scoring import Scoring


def attend(
    query_THGK: Float[Tensor, "T H G K"],
    keys_SHK: Float[Tensor, "S H K"],
    values_SHV: Float[Tensor, "S H V"],
    batch: PagedBatch,
    scoring: Scoring,
) -> Float[Tensor, "T H G V"]:
    """Return every token's output, zeros for padding; computed in float32."""
    out = query_THGK.new_zeros(*query_THGK.shape[:3], values_SHV.shape[-1])
    tiles = batch.table[batch.first_tile :][: batch.shape.num_tokens * NUM_TILE_FIELDS].view(-1, NUM_TILE_FIELDS).tolist()
    for first, num_queries, first_key, num_keys, first_tail, num_tail, first_word, first_query in tiles:
        if first_query or not num_keys or not num_queries:
            continue
        slots_L = batch.table[first_key : first_key + num_keys].long()
        tail_positions_W = batch.table[first_tail : first_tail + num_tail]
        positions_Q = batch.table[batch.first_position + first :][:num_queries, None]
        words = batch.table[first_word : first_word + num_queries * num_words(num_tail)].view(num_queries, -1)
        seen_QL = _seen(words, num_keys, num_tail)
        if scoring.window is not None:
            context_L = torch.arange(num_keys - num_tail, device=out.device, dtype=tail_positions_W.dtype)
            seen_QL = seen_QL & (positions_Q - torch.cat([context_L, tail_positions_W])[None] < scoring.window)
        part = slice(first, first + num_queries)
        scores = torch.einsum("qhgk,lhk->hgql", query_THGK[part].float(), keys_SHK[slots_L].float()) * scoring.scale
        scores = scoring.capped(scores)
        weights = scoring.weights(scores.masked_fill(~seen_QL, float("-inf")))
        out[part] = torch.einsum("hgql,lhv->qhgv", weights, values_SHV[slots_L].float()).to(out.dtype)
    return out


def _seen(words: Tensor, num_keys: int, num_tail: int) -> Bool[Tensor, "Q L"]:
    bits = (words[:, :, None] >> torch.arange(WORD_BITS, device=words.device, dtype=words.dtype)) & 1
    seen_QL = torch.ones(len(words), num_keys, dtype=torch.bool, device=words.device)
    seen_QL[:, num_keys - num_tail :] = bits.flatten(1)[:, :num_tail].bool()
    return seen_QL
