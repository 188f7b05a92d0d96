"""Keys and values of cached tokens, by slot: one pool for each layer.

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
    """Pools of keys and values for each layer, [S, H, K], created at the layer's first write, when its shape is known.

    Written numbers are rounded to `dtype`, by default the dtype of the first write. On a CPU the keys of a head are contiguous,
    because each head is read separately (a pool is a view of [H, S, K]); on a GPU those of a slot are. Padding tokens write to
    `dummy_slot`, the last one, which is never read.
    Owns the tensors. The scheduler tracks slot ownership; a canary verifies it.
    """

    def __init__(
        self, num_slots: int, device: torch.device, canary: Canary | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self.num_slots = self.dummy_slot = num_slots
        self._dtype = dtype
        self.canary = canary or NoCanary()
        self._device = device
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    @property
    def num_layers(self) -> int:
        """Number of layers that have written."""
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
        """Whether a canary checks reads."""
        return not isinstance(self.canary, NoCanary)

    def layer(self, layer: int) -> tuple[Float[Tensor, "S H K"], Float[Tensor, "S H V"]]:
        """Return the pools of a layer that has written, to be read in place."""
        return self._keys[layer], self._values[layer]

    def pools(
        self, layer: int, num_heads: int, head_size: int, dtype: torch.dtype
    ) -> tuple[Float[Tensor, "S H K"], Float[Tensor, "S H K"]]:
        """Return a layer's pools, of that dtype, to be read and written in place. Reads must be reported to `check_read`."""
        if layer not in self._keys:
            example = torch.empty(0, num_heads, head_size, dtype=dtype, device=self._device)
            with torch.inference_mode():
                self._make(layer, example, example)
        if self._keys[layer].dtype != dtype:
            raise ValueError(f"the cache has dtype {self._keys[layer].dtype}, not {dtype}")
        return self._keys[layer], self._values[layer]

    def release(self) -> None:
        """Return the memory of all slots to the system, for example what measurements have taken. Keys and values are lost."""
        if self._device.type == "cpu" and not self.is_watched:
            for pool in (*self._keys.values(), *self._values.values()):
                huge_pages.release(pool.transpose(0, 1))

    def check_read(self, slots: NDArray[np.int64]) -> None:
        """Let the canary check these slots, which have been read in every layer."""
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
    """Return numbers in a dtype; numbers too large for float16 become its maximum, as in the native library."""
    if dtype == torch.float16 != written.dtype:
        most = torch.finfo(dtype).max
        written = torch.where(written.isfinite(), written.clamp(-most, most), written)
    return written.to(dtype)
