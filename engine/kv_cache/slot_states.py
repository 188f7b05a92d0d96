"""States of recurrent layers after some of the tokens, by the token's slot.

A state cannot be cut back to an earlier token as keys can. So each drafted token has a state of its own, and of the tokens that
are fed as a chain only the last has one. Shape key: P rows of the pools, B tokens.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.utils.host_transfer import integers

_LEAST_ROWS = 16


class MissingState(RuntimeError):
    """A pass continues from a token whose state is not kept."""


class PathStates:
    """Pools of states, one for each tensor of a layer, created at the first write and doubled when they are full.

    A slot has the same row in all pools. Owns the tensors; the engine drops the states that no pass continues from.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._num_rows = 0
        self._pools: dict[tuple[int, int], Tensor] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, slot: int) -> bool:
        return slot in self._rows

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of the states of one slot in all layers."""
        return sum(pool[0].nbytes for pool in self._pools.values())

    def read(self, layer: int, slots_B: Sequence[int]) -> list[Tensor]:
        """Return copies of a layer's states after the tokens in these slots, each [B, ...]. Raises MissingState."""
        if missing := [slot for slot in slots_B if slot not in self._rows]:
            raise MissingState(f"the state after the token in slot {missing[0]} is not kept")
        rows_B = integers([self._rows[slot] for slot in slots_B], self._device)
        pools = [pool for (owner, _), pool in sorted(self._pools.items()) if owner == layer]
        return [pool.index_select(0, rows_B) for pool in pools]

    def write(self, layer: int, slots_B: Sequence[int], states: Sequence[Tensor]) -> None:
        """Store a layer's states after the tokens in these slots, each [B, ...]."""
        for slot in slots_B:
            if slot not in self._rows:
                self._rows[slot] = self._free.pop() if self._free else self._grown()
        rows_B = integers([self._rows[slot] for slot in slots_B], self._device)
        for number, state in enumerate(states):
            pool = self._pools.get((layer, number))
            if pool is None or len(pool) < self._num_rows:
                larger = state.new_empty(max(_LEAST_ROWS, 2 * self._num_rows), *state.shape[1:])
                if pool is not None:
                    larger[: len(pool)] = pool
                self._pools[layer, number] = pool = larger
            pool.index_copy_(0, rows_B, state)

    def drop(self, slots: Iterable[int]) -> None:
        """Forget the states of these slots. Slots without a state are ignored."""
        for slot in slots:
            if (row := self._rows.pop(slot, None)) is not None:
                self._free.append(row)

    def clear(self) -> None:
        """Forget all states and return their memory."""
        self._rows.clear()
        self._free.clear()
        self._pools.clear()
        self._num_rows = 0

    def _grown(self) -> int:
        self._num_rows += 1
        return self._num_rows - 1
