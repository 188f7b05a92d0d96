"""Checks that tree-masked passes run a model exactly: a pass compared with the model's own.

The compared pass is chunked, branched, and packed with a second sequence at the last position. So it differs if a model's
result depends on the batch as a whole, for example if the longest sequence scales rotary frequencies.
Shape key: N rows of logits, V vocabulary.
"""

import logging
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.attention.packing import Segment, pack
from engine.attention.segments import chain_segment, tree_segment
from engine.attention.tree_attention import UnsupportedAttention
from engine.core.tree import TokenTree
from engine.kv_cache.kv_cache import KVCache
from engine.weights.pretrained import refused

if TYPE_CHECKING:
    from engine.model.causal_lm import CausalModel

_logger = logging.getLogger(__name__)
_TAIL = 5  # last tokens of the sequence, which are in the tree
_MARGIN = 9  # tokens of the sequence beyond the smallest window
_LONGEST_CHECK = 1100
_SAME_BITS_LENGTH, _OTHER_LENGTH = 11, 6  # tokens of a sequence compared bit for bit, and of another in its pass
_TOLERANCE = 1e-3  # in float32; the next three are for narrower formats
_LOOSE_TOLERANCE, _MOST_TOLERANCE = 5e-2, 0.5
_OWN_NOISES = 3.0  # times the difference between a model's own passes


def check_text(model: "CausalModel") -> list[int]:
    """Return a fixed sequence, longer than the model's window unless that is too long to check at every start."""
    window = getattr(model.module.config.get_text_config(), "sliding_window", None) or 0
    length = min(window + _MARGIN, _LONGEST_CHECK, model.max_positions - 1)
    if length <= window:
        _logger.warning("model check: the window of %d tokens is longer than the sequence of %d", window, length)
    return [(index * 97 + 11) % model.vocab_size for index in range(length)]


@torch.inference_mode()
def own_logits(model: "CausalModel", ids: list[int], attention: str = "eager") -> Tensor:
    """Return the last logits [N, V] of a sequence by the model's own causal pass with an attention of transformers."""
    model.module.set_attn_implementation(attention)
    out = model.module(input_ids=torch.tensor([ids], device=model.device), use_cache=False, logits_to_keep=_TAIL)
    return out.logits[0].float()  # type: ignore[no-any-return]


def tolerance_of(model: "CausalModel", ids: list[int], expected_NV: Tensor) -> float:
    """Return how far a pass may differ from the model's own, relative to the largest logit, given its number format.

    Call this before the model is changed. In bfloat16 two attentions of the same model may differ by an eighth.
    """
    if model.module.dtype == torch.float32:
        return _TOLERANCE
    try:
        own_noise = _relative_error(own_logits(model, ids, "sdpa"), expected_NV)
    except ValueError:  # the model has no other attention
        own_noise = 0.0
    return min(_MOST_TOLERANCE, max(_LOOSE_TOLERANCE, _OWN_NOISES * own_noise))


def require_equal(model: "CausalModel", ids: list[int], expected_NV: Tensor, tolerance: float) -> None:
    """Raise UnsupportedModel unless a tree-masked pass gives the model's own logits, up to rounding.

    `tolerance` is relative to the largest logit.
    """
    try:
        logits_NV = _driven_logits(model, ids)
    except (UnsupportedAttention, TypeError, IndexError, RuntimeError) as error:
        raise refused(_type_of(model), f"it cannot be driven: {error}") from error
    error_size = _relative_error(logits_NV, expected_NV)
    _logger.debug("model check: relative error of a tree-masked pass %.1e, tolerance %.1e", error_size, tolerance)
    if not error_size < tolerance:
        raise refused(_type_of(model), f"a tree-masked pass differs from the model's own by {error_size:.1e}")


def _type_of(model: "CausalModel") -> str:
    return str(model.module.config.model_type)


def _relative_error(logits_NV: Tensor, expected_NV: Tensor) -> float:
    return float((logits_NV - expected_NV).abs().max() / expected_NV.abs().max())


def require_same_bits(model: "CausalModel", ids: list[int]) -> None:
    """Raise UnsupportedModel unless tokens have bit-equal logits fed one by one, and in one pass with another sequence."""
    ids = (ids * _SAME_BITS_LENGTH)[:_SAME_BITS_LENGTH]
    slots = list(range(2 * len(ids)))
    cache = KVCache(len(slots), model.device)
    first = torch.tensor([0], device=model.device)
    alone = [
        model.forward(pack([chain_segment([token_id], place, slots)], model.device), cache, first)[0]
        for place, token_id in enumerate(ids)
    ]
    segments = [chain_segment(ids[::-1][:_OTHER_LENGTH], 0, slots[len(ids) :]), chain_segment(ids, 0, slots)]
    rows = torch.arange(_OTHER_LENGTH, _OTHER_LENGTH + len(ids), device=model.device)
    together = model.forward(pack(segments, model.device), KVCache(len(slots), model.device), rows)
    if not torch.equal(torch.stack(alone), together):
        raise refused(_type_of(model), "a row's logits depend on the other rows of its pass")


def _driven_logits(model: "CausalModel", ids: list[int]) -> Tensor:
    """Feed all but the tail in two chunks, then a tree with the tail as one branch, beside a token at the last position."""
    head, tail = ids[:-_TAIL], ids[-_TAIL:]
    tree, branch = _forked(tail)
    num_slots = len(head) + tree.num_nodes + 1
    cache = KVCache(num_slots, model.device)
    slots = list(range(num_slots))
    for begin, end in pairwise((0, len(head) // 2, len(head))):
        chunk = chain_segment(head[begin:end], begin, slots)
        model.forward(pack([chunk], model.device), cache, torch.tensor([0], device=model.device))
    segments = [tree_segment([tail[0]], tree, len(head), slots), _far_token(ids[0], model.max_positions - 1, slots[-1])]
    return model.forward(pack(segments, model.device), cache, torch.tensor(branch, device=model.device))


def _forked(tail: list[int]) -> tuple[TokenTree, list[int]]:
    """Return a tree with the tail as one branch and a sibling at the root, and the tail's nodes.

    root - 1 - 3 - 4 - 5        2 is the sibling, so that the numbers of nodes differ from their depths
         - 2
    """
    parents = (-1, 0, 0, 1, 3, 4)
    draws = tuple(tuple(node for node, parent in enumerate(parents) if parent == v) for v in range(len(parents)))
    sibling = next(token for token in (0, 1) if token != tail[1])
    return TokenTree(parents, (tail[0], tail[1], sibling, *tail[2:]), draws), [0, 1, 3, 4, 5]


def _far_token(token_id: int, position: int, slot: int) -> Segment:
    return Segment([token_id], [position], [slot], [slot], np.ones((1, 1), dtype=np.bool_), [position])
