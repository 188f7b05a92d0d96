"""Keys and values of cached tokens, by slot: one pool a layer. Knows slots and layers, not sequences.

Shape key: S slots and one, T tokens, B segments, L keys, H key-value heads, K head size.
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from engine.kv_cache.canary import Canary, NoCanary
from engine.utils import huge_pages


class KVCache:
    """Pools of keys and values for each layer, [S, H, K], made when a layer first writes (its shape is known then).

    What is written is rounded to `dtype`; without one pools are as what is written first. In a CPU's memory a head's keys lie
    side by side, as each head is read by itself (a pool is a view of [H, S, K]); in a GPU's those of a slot. The slot `nobody`,
    after all others, is for what must be written somewhere and is never read.
    Owns the tensors. Which slot belongs to whom is the scheduler's business; whoever doubts it has a canary watch.
    """

    def __init__(
        self, num_slots: int, device: torch.device, canary: Canary | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self.num_slots = self.nobody = num_slots
        self._dtype = dtype
        self.canary = canary or NoCanary()
        self._device = device
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    @property
    def num_layers(self) -> int:
        """Layers that have written."""
        return len(self._keys)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.nbytes for pool in (*self._keys.values(), *self._values.values()))

    def write(
        self, layer: int, slots_T: Int[Tensor, " T"], keys_THK: Float[Tensor, "T H K"], values_THK: Float[Tensor, "T H V"]
    ) -> None:
        """Store the keys and values of T tokens."""
        if layer not in self._keys:
            self._make(layer, keys_THK, values_THK)
        for pool, written in ((self._keys[layer], keys_THK), (self._values[layer], values_THK)):
            pool.index_copy_(0, slots_T, _rounded(written, pool.dtype))

    def gather(self, layer: int, slots_BL: Int[Tensor, "B L"]) -> tuple[Float[Tensor, "B L H K"], Float[Tensor, "B L H V"]]:
        """Return the keys and the values at the slots."""
        flat = slots_BL.reshape(-1)
        keys, values = self._keys[layer].index_select(0, flat), self._values[layer].index_select(0, flat)
        self.canary.check(f"keys of layer {layer}", flat, keys)
        rows, length = slots_BL.shape
        return keys.view(rows, length, *keys.shape[1:]), values.view(rows, length, *values.shape[1:])

    @property
    def is_watched(self) -> bool:
        """Whether a canary must see what is read."""
        return not isinstance(self.canary, NoCanary)

    def layer(self, layer: int) -> tuple[Float[Tensor, "S H K"], Float[Tensor, "S H V"]]:
        """Return what a layer that has written keeps, for whoever reads it where it lies."""
        return self._keys[layer], self._values[layer]

    def pools(
        self, layer: int, num_heads: int, head_size: int, dtype: torch.dtype
    ) -> tuple[Float[Tensor, "S H K"], Float[Tensor, "S H K"]]:
        """Return a layer's keys and values of every slot, of that dtype, for whoever reads and writes them where they lie.

        What it has read it tells `check_read`.
        """
        if layer not in self._keys:
            example = torch.empty(0, num_heads, head_size, dtype=dtype, device=self._device)
            with torch.inference_mode():
                self._make(layer, example, example)
        if self._keys[layer].dtype != dtype:
            raise ValueError(f"the cache holds {self._keys[layer].dtype}, not {dtype}")
        return self._keys[layer], self._values[layer]

    def check_read(self, slots: NDArray[np.int64]) -> None:
        """Let the canary look at what lies in these slots, which have been read in every layer."""
        if self.is_watched:
            for layer in self._keys:
                self.gather(layer, torch.from_numpy(slots)[None].to(self._device))

    def _make(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self._keys[layer], self._values[layer] = self._pool(keys), self._pool(values)

    def _pool(self, example: Tensor) -> Tensor:
        # Not zeroed: every slot is written before it is gathered, and zeroing would touch gigabytes that may never be used.
        (_, num_heads, size), num_slots, dtype = example.shape, self.num_slots + 1, self._dtype or example.dtype
        if self._device.type == "cpu":
            pool = huge_pages.empty((num_heads, num_slots, size), dtype).transpose(0, 1)
        else:
            pool = torch.empty((num_slots, num_heads, size), dtype=dtype, device=self._device)
        self.canary.watch(pool[: self.num_slots])
        return pool


def _rounded(written: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers in a format; what is too large for float16 becomes its largest, as our library has it."""
    if dtype == torch.float16 != written.dtype:
        most = torch.finfo(dtype).max
        written = torch.where(written.isfinite(), written.clamp(-most, most), written)
    return written.to(dtype)
