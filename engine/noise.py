"""Counter-based randomness: every draw is a pure function of (seed, position, stream, index).

No generator has a state here, so a draw does not depend on batch mates, on the order of requests, on preemption or on the
device. Shape key: K keys, V vocabulary.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from engine.keys import GOLDEN, MIX_1, MIX_2


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
    bits = state + counter * _signed(GOLDEN)
    bits = (bits ^ _shifted(bits, 30)) * _signed(MIX_1)
    bits = (bits ^ _shifted(bits, 27)) * _signed(MIX_2)
    bits = bits ^ _shifted(bits, 31)
    return (_shifted(bits, 12).to(torch.float64) + 0.5) * 2.0**-52  # 53 bits would round to 1.0 at the top


def gumbels(keys: Sequence[int], vocab_size: int, device: torch.device | str = "cpu") -> Float[Tensor, "K V"]:
    """Return standard Gumbel noise, float64 [K, V]: arg max of log p + noise is a draw from p."""
    return -torch.log(-torch.log(uniforms(keys, vocab_size, device)))
