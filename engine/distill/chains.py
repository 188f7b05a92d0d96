"""The head's forward pass in training: all positions of a text at once, and chains that continue from some of them.

Its parallel passes compute the same as the steps of serving (EAGLE-3's training-time test). At step 0 each position reads the
target's feature. At step j a chain that started at position t reads its own state of step j - 1 and the text's token t + j. It
attends to the keys of step 0 up to t, and to its own keys after t. Chains do not depend on each other, so they start at a
sample of the positions.

Shape key: B texts, T positions, C chains a text, F feature layers, D target width, W inner width, H key-value heads, G query
heads for each, K head size.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from engine.draft.models.head import DraftHead, HeadLayer


def chain_states(
    head: DraftHead,
    states_BTFD: Float[Tensor, "B T F D"],
    embeddings_BTD: Float[Tensor, "B T D"],
    starts_BC: Int[Tensor, "B C"],
    num_steps: int,
) -> Iterator[Float[Tensor, "B TC W"]]:
    """Yield the head's states: of all positions at step 0, then of the chains at steps 1, 2, ...

    The state at step j of a chain from t predicts the token after position t + j. `starts_BC` + num_steps must stay in the text.
    """
    features_BTW = functional.pad(head.features(states_BTFD), (0, 0, 1, 0))[:, :-1]  # position t reads the feature of t - 1
    tokens_BTW = head.tokens(embeddings_BTD)
    num_texts, length = tokens_BTW.shape[:2]
    positions_T = torch.arange(length, device=starts_BC.device)
    rotation = head.shape.rotary(positions_T[None].expand(num_texts, length))
    keys: list[tuple[Tensor, Tensor]] = []  # of step 0, by layer
    state = features_BTW
    for layer in head.decoder:
        query, key, value = layer.projected(state, tokens_BTW, *rotation)
        keys.append((key, value))
        state = layer.after_attention(state, _causal(query, key, value))
    yield state
    visible_BCT = positions_T <= starts_BC[..., None]
    rows_B1 = torch.arange(num_texts, device=starts_BC.device)[:, None]
    state = state[rows_B1, starts_BC]
    own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in head.decoder]  # of the chains' steps, by layer
    for step in range(1, num_steps):
        positions_BC = starts_BC + step
        rotation, tokens = head.shape.rotary(positions_BC), tokens_BTW[rows_B1, positions_BC]
        for layer, trunk, chain in zip(head.decoder, keys, own, strict=True):
            query, key, value = layer.projected(state, tokens, *rotation)
            chain.append((key, value))
            state = layer.after_attention(state, _chained(layer, query, trunk, chain, visible_BCT))
        yield state


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Float[Tensor, "B T HGK"]:
    groups = query.shape[2] // key.shape[2]
    heads = [x.transpose(1, 2) for x in (query, key.repeat_interleave(groups, 2), value.repeat_interleave(groups, 2))]
    return functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True).transpose(1, 2).flatten(2)


def _chained(
    layer: HeadLayer,
    query_BCNK: Tensor,
    trunk: tuple[Tensor, Tensor],
    chain: list[tuple[Tensor, Tensor]],
    visible_BCT: Tensor,
) -> Float[Tensor, "B C HGK"]:
    """Attend to the keys of step 0 up to each chain's start, and to the chain's own keys."""
    shape = layer.shape
    query = torch.unflatten(query_BCNK, 2, (shape.num_kv_heads, -1)) * shape.head_size**-0.5  # [B, C, H, G, K]
    trunk_scores = torch.einsum("bchgk,bthk->bchgt", query, trunk[0])
    trunk_scores = trunk_scores.float().masked_fill(~visible_BCT[:, :, None, None], float("-inf"))
    own_keys, own_values = (torch.stack(parts, dim=-2) for parts in zip(*chain, strict=True))  # [B, C, H, S, K]
    own_scores = torch.einsum("bchgk,bchsk->bchgs", query, own_keys).float()
    weights = torch.cat([trunk_scores, own_scores], dim=-1).softmax(-1).to(query.dtype)
    to_trunk, to_own = torch.split(weights, [trunk_scores.shape[-1], own_scores.shape[-1]], dim=-1)
    out = torch.einsum("bchgt,bthk->bchgk", to_trunk, trunk[1]) + torch.einsum("bchgs,bchsk->bchgk", to_own, own_values)
    return out.flatten(2)
