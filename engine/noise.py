"""Counter-based randomness: every draw is a pure function of (seed, position, stream, index).

No generator has a state here, so a draw does not depend on batch mates, on the order of requests, on preemption or on the
device. Streams keep draws that must be independent apart: what drafts a token must not also judge it
(the shared-noise mistake). The coupled rule alone shares TOKEN noise between drafter and verifier, by design.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from jaxtyping import Float
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


class Stream(IntEnum):
    """Independent uses of randomness at one position."""

    TOKEN = 0  # the Gumbel noise that decides the token at a position under the coupled rule
    DRAFT = 1  # which tokens a tree gets
    ACCEPT = 2  # a verifier's acceptance of nodes
    EXTRA = 3  # the verifier's extra token
    SAMPLE = 4  # seeds of the samples of one request (`n`)


@dataclass(frozen=True, slots=True)
class StepKey:
    """Names one tree's randomness: the request's seed and the absolute position of the tree's root token.

    A root position occurs once in the life of a sequence, so (seed, root_position) never repeats for the streams that must
    be fresh each step.
    """

    seed: int
    root_position: int


def _mix(value: int) -> int:
    """Return splitmix64's finaliser of a 64-bit integer."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def stream_key(seed: int, position: int, stream: Stream) -> int:
    """Return the 64-bit key of a stream of draws."""
    return _mix(_mix(_mix(seed + _GOLDEN) + position * _GOLDEN) + (stream + 1) * _GOLDEN)


def derived_seed(seed: int, index: int) -> int:
    """Return the seed of sample `index` of a request; sample 0 keeps the request's own seed."""
    return seed if index == 0 else stream_key(seed, index, Stream.SAMPLE)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= (1 << 63) else value


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Shift right without copying the sign in."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def uniforms(keys: Sequence[int], count: int, device: torch.device | str = "cpu") -> Float[Tensor, "K count"]:
    """Return draws in the open interval (0, 1), float64 [K, count]: row k is a function of keys[k] alone.

    Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (splitmix64), in wrapping int64 arithmetic.
    """
    state = torch.tensor([_signed(key) for key in keys], dtype=torch.int64, device=device)[:, None]
    counter = torch.arange(1, count + 1, dtype=torch.int64, device=device)[None, :]
    bits = state + counter * _signed(_GOLDEN)
    bits = (bits ^ _shifted(bits, 30)) * _signed(_MIX_1)
    bits = (bits ^ _shifted(bits, 27)) * _signed(_MIX_2)
    bits = bits ^ _shifted(bits, 31)
    return (_shifted(bits, 11).to(torch.float64) + 0.5) * 2.0**-53


def gumbels(keys: Sequence[int], vocab_size: int, device: torch.device | str = "cpu") -> Float[Tensor, "K V"]:
    """Return standard Gumbel noise, float64 [K, V]: arg max of log p + noise is a draw from p."""
    return -torch.log(-torch.log(uniforms(keys, vocab_size, device)))
