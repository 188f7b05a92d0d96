"""The choice of a token after each node as Triton kernels: the likeliest, and with noise the coupled rule's.

A program has one node and a part of its vocabulary; a second launch merges the parts. Noise is that of engine.sampling.noise, in
float64: logits / temperature + noise, of which the largest is a draw.
Shape key: N nodes, V vocabulary, P parts, F = 5 fields of a part: largest logit, its token, largest score, its token, validity.
"""

import triton
import triton.language as tl

from engine.core.rng_keys import GOLDEN, MIX_1, MIX_2
from engine.sampling.noise import signed

BLOCK, MOST_PARTS = 1024, 64
NUM_FIELDS = 5
_GOLDEN, _MIX_1, _MIX_2 = (tl.constexpr(signed(value)) for value in (GOLDEN, MIX_1, MIX_2))
_FIELDS = tl.constexpr(NUM_FIELDS)


@triton.jit
def _mixed(bits):
    """Return splitmix64's finaliser."""
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * _MIX_1
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return bits ^ ((bits >> 31) & 0x1FFFFFFFF)


@triton.jit(do_not_specialize=["vocab_size", "num_parts"])
def choose(logits, inverse_temperatures, keys, partial, vocab_size, num_parts, BLOCK: tl.constexpr):
    """Find a part's largest logit and score. Without a temperature, a score is the logit."""
    node, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inverse, key = tl.load(inverse_temperatures + node), tl.load(keys + node)
    share = tl.cdiv(tl.cdiv(vocab_size, BLOCK), num_parts) * BLOCK
    begin = part * share
    end = tl.minimum(begin + share, vocab_size)
    top, top_id = tl.full([], float("-inf"), tl.float64), begin.to(tl.int64)
    best, best_id = tl.full([], float("-inf"), tl.float64), begin.to(tl.int64)
    num_faults = tl.full([], 0, tl.int32)
    for at in range(begin, end, BLOCK):
        tokens = at + tl.arange(0, BLOCK)
        is_token = tokens < end
        logit = tl.load(logits + node * vocab_size + tokens, mask=is_token, other=float("-inf"))
        is_fault = logit != logit
        num_faults += tl.sum(is_fault.to(tl.int32), 0)
        wide = tl.where(is_fault, float("-inf"), logit).to(tl.float64)
        score = wide
        if inverse > 0.0:
            bits = _mixed(key + (tokens.to(tl.int64) + 1) * _GOLDEN)
            uniform = (((bits >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) + 0.5) * 2.220446049250313e-16
            score = wide * inverse - tl.log(-tl.log(uniform))
        block_top, block_best = tl.max(wide, 0), tl.max(score, 0)
        if block_top > top:
            top, top_id = block_top, at + tl.argmax(wide, 0).to(tl.int64)
        if block_best > best:
            best, best_id = block_best, at + tl.argmax(score, 0).to(tl.int64)
    place = partial + (node * num_parts + part) * _FIELDS
    tl.store(place, top)
    tl.store(place + 1, top_id.to(tl.float64))
    tl.store(place + 2, best)
    tl.store(place + 3, best_id.to(tl.float64))
    tl.store(place + 4, num_faults.to(tl.float64))


@triton.jit(do_not_specialize=["num_parts"])
def merge(partial, out, num_parts, BLOCK_P: tl.constexpr):
    """Merge a node's parts; the first of several equal ones wins. The largest logit is NaN if any is."""
    node = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, BLOCK_P)
    is_part = parts < num_parts
    place = partial + (node * num_parts + parts) * _FIELDS
    top = tl.load(place, mask=is_part, other=float("-inf"))
    best = tl.load(place + 2, mask=is_part, other=float("-inf"))
    faults = tl.sum(tl.load(place + 4, mask=is_part, other=0.0), 0)
    is_top, is_best = parts == tl.argmax(top, 0), parts == tl.argmax(best, 0)
    tl.store(out + node * 3, tl.where(faults > 0.0, float("nan"), tl.max(top, 0)))
    tl.store(out + node * 3 + 1, tl.sum(tl.where(is_top, tl.load(place + 1, mask=is_part, other=0.0), 0.0), 0))
    tl.store(out + node * 3 + 2, tl.sum(tl.where(is_best, tl.load(place + 3, mask=is_part, other=0.0), 0.0), 0))
