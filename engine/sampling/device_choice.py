"""The token after each node, chosen on a GPU with a single transfer to the host: the likeliest, and the coupled rule's.

Shape key: N nodes, V vocabulary, P parts of a vocabulary.
"""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from engine.core.sampling_limits import MIN_TEMPERATURE
from engine.sampling.argmax import RowArgMax
from engine.sampling.noise import signed
from engine.utils.host_transfer import floats, integers

_PROGRAMS = 264  # two for each multiprocessor of an H100


class NodeChoice(NamedTuple):
    """A node's arg max, and the token of largest logit / temperature + noise: the arg max at temperature 0."""

    best: RowArgMax
    token_id: int


def can_choose(logits_NV: Float[Tensor, "N V"]) -> bool:
    """Return whether the kernels choose from these logits."""
    return logits_NV.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def choices(logits_NV: Float[Tensor, "N V"], temperatures: Sequence[float], keys: Sequence[int]) -> list[NodeChoice]:
    """Return each node's choices: its noise is that of its key. Edits are in the logits; nothing is truncated."""
    device = logits_NV.device
    inverse_N = floats([1.0 / max(one, MIN_TEMPERATURE) if one else 0.0 for one in temperatures], device)
    rows = chosen(logits_NV.contiguous(), inverse_N, integers([signed(key) for key in keys], device)).tolist()
    return [NodeChoice(RowArgMax(top, int(top_id)), int(token_id)) for top, top_id, token_id in rows]


def chosen(logits_NV: Float[Tensor, "N V"], inverse_N: Tensor, keys_N: Tensor) -> Float[Tensor, "N 3"]:
    """Return largest logits, their tokens and the chosen tokens, float64. No program of another node is waited for."""
    from engine.sampling import choice_kernels

    num_nodes, vocab_size = logits_NV.shape
    num_parts = max(1, min(choice_kernels.MOST_PARTS, _PROGRAMS // max(1, num_nodes), -(-vocab_size // choice_kernels.BLOCK)))
    partial = logits_NV.new_empty(num_nodes, num_parts, choice_kernels.NUM_FIELDS, dtype=torch.float64)
    out_N3 = logits_NV.new_empty(num_nodes, 3, dtype=torch.float64)
    if num_nodes:
        choice_kernels.choose[num_nodes, num_parts](
            logits_NV, inverse_N, keys_N, partial, vocab_size, num_parts, BLOCK=choice_kernels.BLOCK
        )
        choice_kernels.merge[(num_nodes,)](partial, out_N3, num_parts, BLOCK_P=choice_kernels.MOST_PARTS)
    return out_N3
