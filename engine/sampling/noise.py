"""Counter-based randomness: every draw is a pure function of (seed, position, stream, index).

There is no generator state, so a draw does not depend on the batch, the order of requests, preemption or the device.
Shape key: K keys, V vocabulary.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.core.rng_keys import GOLDEN, MIX_1, MIX_2
from engine.native import noise as native
from engine.utils.host_transfer import integers


def signed(value: int) -> int:
    """Return the signed 64-bit integer of the same bits."""
    return value - (1 << 64) if value >= (1 << 63) else value


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Shift right and fill with zeros."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def uniforms(keys: Sequence[int], count: int, device: torch.device | str = "cpu") -> Float[Tensor, "K count"]:
    """Return draws in the open interval (0, 1), float64 [K, count]: row k is a function of keys[k] alone.

    Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (splitmix64), in wrapping int64 arithmetic.
    """
    return uniforms_of(integers([signed(key) for key in keys], torch.device(device)), count)


def uniforms_of(keys_K: Int[Tensor, " K"], count: int) -> Float[Tensor, "K count"]:
    """Return the same draws of signed keys in a tensor, on its device."""
    return _uniforms_at(keys_K, torch.arange(count, dtype=torch.int64, device=keys_K.device))


def gumbels_of(keys_K: Int[Tensor, " K"], ids_M: Int[Tensor, " M"]) -> Float[Tensor, "K M"]:
    """Return the Gumbel noise of these tokens for signed keys in a tensor, on its device, with the bits of `gumbels` there."""
    return -torch.log(-torch.log(_uniforms_at(keys_K, ids_M)))


def _uniforms_at(keys_K: Int[Tensor, " K"], indices_C: Int[Tensor, " C"]) -> Float[Tensor, "K C"]:
    bits = keys_K[:, None] + (indices_C + 1) * signed(GOLDEN)
    bits = (bits ^ _shifted(bits, 30)) * signed(MIX_1)
    bits = (bits ^ _shifted(bits, 27)) * signed(MIX_2)
    bits = bits ^ _shifted(bits, 31)
    return (_shifted(bits, 12).to(torch.float64) + 0.5) * 2.0**-52  # 53 bits would round to 1.0 at the top


_MAX_KEPT, _MAX_KEPT_ROWS = 1 << 23, 256  # cached numbers of Gumbel noise, and rows


class _NoiseCache:
    """The latest rows of noise. A step reads a position's noise at every node that ranks children there, and to verify."""

    def __init__(self) -> None:
        self._rows: OrderedDict[tuple[int, int, str], Tensor] = OrderedDict()

    def of(self, keys: Sequence[int], vocab_size: int, device: str) -> list[Tensor]:
        """Return the rows of these keys; missing rows are made together."""
        rows = {key: self._rows.get((key, vocab_size, device)) for key in keys}
        missing = [key for key, row in rows.items() if row is None]
        if missing:
            made_KV = -torch.log(-torch.log(uniforms(missing, vocab_size, device)))
            rows.update(zip(missing, made_KV, strict=True))
            self._keep({(key, vocab_size, device): row_V for key, row_V in zip(missing, made_KV, strict=True)}, vocab_size)
        return [row for key in keys if (row := rows[key]) is not None]

    def _keep(self, made: Mapping[tuple[int, int, str], Tensor], vocab_size: int) -> None:
        for name, row_V in made.items():
            self._rows[name] = row_V.clone()  # a view would keep the whole tensor alive
        most = min(_MAX_KEPT_ROWS, _MAX_KEPT // vocab_size)
        while len(self._rows) > max(1, most):
            self._rows.popitem(last=False)


_noise_cache = _NoiseCache()


def gumbels(
    keys: Sequence[int], vocab_size: int, device: torch.device | str = "cpu", ids_M: Int[Tensor, " M"] | None = None
) -> Float[Tensor, "K V"]:
    """Return standard Gumbel noise, float64 [K, V], row k from keys[k] alone: arg max of log p + noise is a draw from p.

    With `ids_M` only for these tokens, [K, M]. On a CPU the native library computes it, equal to torch's up to rounding.
    """
    if native.can_choose(device):
        return native.gumbels(keys, vocab_size, ids_M)
    rows = _noise_cache.of(keys, vocab_size, str(device))
    return torch.stack(rows if ids_M is None else [row_V.index_select(0, ids_M) for row_V in rows])
