"""Keys and values of cached tokens, by slot, and states of recurrent layers.

Shape key: S slots and one, N blocks of slots, B slots of a block, T tokens, R rows, L keys, H key-value heads, K head size.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from engine.kv_cache.canary import Canary, NoCanary
from engine.kv_cache.slot_states import PathStates
from engine.utils import huge_pages

BLOCK_BITS = 9
_BLOCK_SLOTS = 1 << BLOCK_BITS  # fewer: reading a head's keys would begin anew too often for the processor's prefetching

Pools = tuple[Float[Tensor, "N B H K"], Float[Tensor, "N B H K"]]  # a layer's keys and values: slot s is at [s // B, s % B]


class KVCache:
    """Pools of keys and values for each layer, [N, B, H, K], created at the first write, when their shape is known.

    The library's passes get all layers in blocks of slots, so that the huge pages of a short text are few and full:

        slots 0 to 511      layer 0: keys [H, B, K], values [H, B, K] | layer 1: keys, values | ...
        slots 512 to 1023   layer 0: keys [H, B, K], values [H, B, K] | layer 1: keys, values | ...

    Torch gets one block for each layer. On a CPU a head's keys of a block are contiguous, because each head is read separately.
    On a GPU all keys of a slot are contiguous. Padding tokens write to `dummy_slot`, the last one, which is never read.

    Written numbers are rounded to `dtype`, by default the dtype of the first write.
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
        self._memory: list[Tensor] = []
        self.states = PathStates(device)
        self.native: dict[object, Any] = {}  # what passes of the library keep for this cache, by the object that runs them

    @property
    def num_layers(self) -> int:
        """Number of layers that have written."""
        return len(self._keys)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return (self.num_slots + 1) * sum(pool[0, 0].nbytes for pool in (*self._keys.values(), *self._values.values()))

    def write(
        self, layer: int, slots_T: Int[Tensor, " T"], keys_THK: Float[Tensor, "T H K"], values_THK: Float[Tensor, "T H V"]
    ) -> None:
        """Store the keys and values of T tokens."""
        if layer not in self._keys:
            self._make(layer, keys_THK, values_THK)
        for pool, written in ((self._keys[layer], keys_THK), (self._values[layer], values_THK)):
            rounded, size = _rounded(written, pool.dtype), pool.shape[1]
            if len(pool) == 1:
                pool[0].index_copy_(0, slots_T, rounded)
            else:
                pool[slots_T // size, slots_T % size] = rounded

    def gather(self, layer: int, slots_BL: Int[Tensor, "B L"]) -> tuple[Float[Tensor, "B L H K"], Float[Tensor, "B L H V"]]:
        """Return the keys and the values at the slots."""
        flat = slots_BL.reshape(-1)
        keys, values = _rows(self._keys[layer], flat), _rows(self._values[layer], flat)
        self.canary.check(f"keys of layer {layer}", flat, keys)
        rows, length = slots_BL.shape
        return keys.view(rows, length, *keys.shape[1:]), values.view(rows, length, *values.shape[1:])

    @property
    def is_watched(self) -> bool:
        """Whether a canary checks reads."""
        return not isinstance(self.canary, NoCanary)

    def layer(self, layer: int) -> tuple[Float[Tensor, "S H K"], Float[Tensor, "S H V"]]:
        """Return the pools of a layer that torch has written, to be read in place."""
        return self._keys[layer].squeeze(0), self._values[layer].squeeze(0)

    def made_layer(
        self, layer: int, num_heads: int, head_size: int, dtype: torch.dtype
    ) -> tuple[Float[Tensor, "S H K"], Float[Tensor, "S H K"]]:
        """Return the pools of a layer, created if no pass has written to it, to be read and written in place by torch."""
        if layer not in self._keys:
            example = torch.empty(0, num_heads, head_size, dtype=dtype, device=self._device)
            self._make(layer, example, example)
        return self.layer(layer)

    def pools(self, num_layers: int, num_heads: int, head_size: int, dtype: torch.dtype) -> list[Pools]:
        """Return the pools of the first layers, of that dtype, to be read and written in place.

        Reads must be reported to `check_read`.
        """
        with torch.inference_mode():
            if not self._keys and self._device.type == "cpu":
                self._make_blocks(num_layers, num_heads, head_size, self._dtype or dtype)
            example = torch.empty(0, num_heads, head_size, dtype=dtype, device=self._device)
            for layer in range(num_layers):
                if layer not in self._keys:
                    self._make(layer, example, example)
        found = [(self._keys[layer], self._values[layer]) for layer in range(num_layers)]
        for pool in (pool for pools in found for pool in pools):
            if pool.dtype != dtype:
                raise ValueError(f"the cache has dtype {pool.dtype}, not {dtype}")
            if pool.stride() != found[0][0].stride():
                raise ValueError("the layers of the cache were made for passes of different models")
        return found

    def release(self) -> None:
        """Return the memory of all slots to the system, for example after measurements. Keys and values are lost."""
        self.states.clear()
        if self._device.type == "cpu" and not self.is_watched:
            for memory in self._memory:
                huge_pages.release(memory)

    def check_read(self, slots: NDArray[np.int64]) -> None:
        """Let the canary check these slots, which have been read in every layer."""
        if self.is_watched:
            for layer in self._keys:
                self.gather(layer, torch.from_numpy(slots)[None].to(self._device))

    def _make_blocks(self, num_layers: int, num_heads: int, head_size: int, dtype: torch.dtype) -> None:
        """Create the pools of all layers, block by block."""
        num_blocks = -(-(self.num_slots + 1) // _BLOCK_SLOTS)
        num_parts = num_layers * 2 * num_heads
        # One part more makes their number odd: a head's keys of even blocks would compete for few lines of the processor's cache.
        memory = self._empty((num_blocks, num_parts + 1, _BLOCK_SLOTS, head_size), dtype)
        parts = memory[:, :num_parts].view(num_blocks, num_layers, 2, num_heads, _BLOCK_SLOTS, head_size).transpose(3, 4)
        for layer in range(num_layers):
            self._keys[layer], self._values[layer] = self._watched(parts[:, layer, 0]), self._watched(parts[:, layer, 1])

    def _make(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Create a layer's pools, each of one block."""
        self._keys[layer], self._values[layer] = self._pool(keys), self._pool(values)

    def _pool(self, example: Tensor) -> Tensor:
        (_, num_heads, size), num_slots, dtype = example.shape, self.num_slots + 1, self._dtype or example.dtype
        if self._device.type == "cpu":
            return self._watched(self._empty((1, num_heads, num_slots, size), dtype).transpose(1, 2))
        return self._watched(self._empty((1, num_slots, num_heads, size), dtype))

    def _watched(self, pool: Tensor) -> Tensor:
        self.canary.watch(pool[:, : self.num_slots])
        return pool

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # Not zeroed: every slot is written before it is read, and zeroing would touch gigabytes that may never be used.
        is_on_cpu = self._device.type == "cpu"
        memory = huge_pages.empty(shape, dtype) if is_on_cpu else torch.empty(shape, dtype=dtype, device=self._device)
        self._memory.append(memory)
        return memory


def _rows(pool_NBHK: Float[Tensor, "N B H K"], slots_R: Int[Tensor, " R"]) -> Float[Tensor, "R H K"]:
    """Return the slots' rows."""
    if len(pool_NBHK) == 1:
        return pool_NBHK[0].index_select(0, slots_R)
    return pool_NBHK[slots_R // pool_NBHK.shape[1], slots_R % pool_NBHK.shape[1]]


def _rounded(written: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers in a dtype; numbers too large for float16 become its maximum, as in the native library."""
    if dtype == torch.float16 != written.dtype:
        most = torch.finfo(dtype).max
        written = torch.where(written.isfinite(), written.clamp(-most, most), written)
    return written.to(dtype)
