"""Tree-masked attention whose every row has the same bits, whatever is computed beside it.

Floating-point sums depend on their order, and the order on shapes: how many rows a product has, where a key lies among others.
Integers do not. Queries, keys and values are rounded to multiples of 1 / 4096, weights of the softmax to integers up to 2^14, and
every sum is one of integers below 2^53 in float64, which is exact in any order; what is left is done number by number.
A key that is masked weighs an exact zero. The exponential is read from a table, since library functions round the last numbers
of an array in another way than those in its middle.

Shape key: as in engine.attention.
"""

from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface

from engine.attention import UnsupportedAttention, folded, in_rows, tree_attention, unfolded
from engine.packing import Group

NAME = "latebranch_exact"
LONGEST_TEXT = 1 << 15  # keys: 2^15 weights of 2^14 times values of 2^24 stay within 2^53
_LARGEST_HEAD = 1 << 9  # numbers of a head: 2^9 products of 2^22 by 2^22 do
_STEPS = 4096.0  # in 1
_LARGEST_KEY, _LARGEST_VALUE = float(1 << 22), float(1 << 24)
_WEIGHT = float(1 << 14)  # of a row's likeliest key
_TABLE_STEPS = 1024.0  # of the table of exponentials, in 1


def _exponentials() -> Float[Tensor, " E"]:
    """Return the weights of keys whose score is e / 1024 below the largest, as integers; the last is 0."""
    below_E = torch.arange(int(torch.log(torch.tensor(2.0 * _WEIGHT)) * _TABLE_STEPS) + 2, dtype=torch.float64) / _TABLE_STEPS
    weights_E = (torch.exp(-below_E) * _WEIGHT).round_()
    weights_E[-1] = 0.0
    return weights_E


@cache
def _table(device: torch.device) -> Tensor:
    return _exponentials().to(device)


def _fixed(x: Tensor, largest: float) -> Tensor:
    """Return multiples of 1 / 4096 as integers, in x's own format."""
    return x.mul(_STEPS).round_().clamp_(-largest, largest)


def exact_group_attention(
    query_THGK: Float[Tensor, "T H G K"],
    keys_BLHK: Float[Tensor, "B L H K"],
    values_BLHK: Float[Tensor, "B L H V"],
    group: Group,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "BQ HGV"]:
    """Return the attention output of one group, padded rows included; queries, keys and values are integers, in 4096ths."""
    if softcap is not None:
        raise UnsupportedAttention("soft caps have no exact attention")
    scores = torch.matmul(folded(query_THGK, group).double(), keys_BLHK.permute(0, 2, 3, 1).double())
    scores = unfolded(scores, group) + group.bias(window, scores.dtype)
    table_E = _table(scores.device)
    below = (scores.amax(-1, keepdim=True) - scores).mul_(scaling * _TABLE_STEPS / _STEPS**2)
    last = len(table_E) - 1.0  # a row with NaN has them all: nothing weighs, and 0 / 0 is NaN again
    weights_BHGQL = table_E[below.nan_to_num_(nan=last, posinf=last).clamp_max_(last).round_().long()]
    out = torch.matmul(weights_BHGQL.flatten(2, 3), values_BLHK.permute(0, 2, 1, 3).double())
    out = out.div_(weights_BHGQL.sum(-1).flatten(2).mul_(_STEPS)[..., None])
    return in_rows(out.to(query_THGK.dtype), group)


def exact_attention(
    module: nn.Module,
    query: Float[Tensor, "1 HG T K"],
    key: Float[Tensor, "1 H T K"],
    value: Float[Tensor, "1 H T V"],
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Float[Tensor, "1 T HG V"], None]:
    """Attend as engine.attention does, to integers.

    Raises what it raises, and UnsupportedAttention for soft caps and heads beyond 512 numbers.
    """
    if key.shape[-1] > _LARGEST_HEAD:
        raise UnsupportedAttention(f"heads of {key.shape[-1]} numbers have no exact attention")
    query, key, value = _fixed(query, _LARGEST_KEY), _fixed(key, _LARGEST_KEY), _fixed(value, _LARGEST_VALUE)
    return tree_attention(module, query, key, value, attention_mask, of_group=exact_group_attention, **options)


AttentionInterface.register(NAME, exact_attention)
