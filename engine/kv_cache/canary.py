"""A canary for cache slots: free and never written slots are poisoned, and a read of such a slot raises an error with its number.

The poison is a NaN with a bit pattern that no computation produces. Reads are checked for it; an unchecked read of it computes
NaN. engine.kv_cache.slot_digests checks the sequences to which slots belong. Shape key: N blocks, B slots of a block, R rows.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from jaxtyping import Shaped
from torch import Tensor

from engine.scheduler.slot_allocator import IntegrityError

_BITS = {2: (torch.int16, 0x7FCA), 4: (torch.int32, 0x7FCA_CAFE)}  # by bytes of a number: NaN in float32, bfloat16 and float16


class Canary(Protocol):
    """Checks reads from pools that have a row for each slot: slot s has row [s // B, s % B]."""

    def watch(self, pool: Shaped[Tensor, "N B ..."]) -> None:
        """Register a new pool, in which nothing has been written."""
        ...

    def check(self, name: str, slots_R: Tensor, rows: Shaped[Tensor, "R ..."]) -> None:
        """Raise IntegrityError if a row read from these slots of the named pool is free or was never written."""
        ...


class NoCanary:
    """Checks nothing, at no cost."""

    def watch(self, pool: Shaped[Tensor, "N B ..."]) -> None:
        """Do nothing."""

    def check(self, name: str, slots_R: Tensor, rows: Shaped[Tensor, "R ..."]) -> None:
        """Do nothing."""


class SlotCanary:
    """Poisons and checks slots after `begin`. The owner of the slots must call `on_free`."""

    def __init__(self) -> None:
        self._pools: list[Tensor] = []
        self._has_begun = False

    def watch(self, pool: Shaped[Tensor, "N B ..."]) -> None:
        """Register a new pool, in which nothing has been written."""
        self._pools.append(pool)
        if self._has_begun:
            _poison(pool)

    def begin(self) -> None:
        """Treat every slot as free, and check all later reads."""
        self._has_begun = True
        for pool in self._pools:
            _poison(pool)

    def on_free(self, slots: Sequence[int]) -> None:
        """Poison slots that have been freed."""
        if self._has_begun and slots:
            for pool in self._pools:
                _poison(pool, slots)

    def check(self, name: str, slots_R: Tensor, rows: Shaped[Tensor, "R ..."]) -> None:
        """Raise IntegrityError if a row read from these slots of the named pool is free or was never written."""
        if not self._has_begun or not rows.numel():
            return
        kind, pattern = _BITS[rows.element_size()]
        is_poison_R = rows.flatten(1)[:, 0].contiguous().view(kind) == pattern
        if bool(is_poison_R.any()):
            slots = sorted(set(slots_R[is_poison_R].tolist()))
            raise IntegrityError(f"{name} of slots {slots[:8]} are read, which are free or were never written")


@torch.inference_mode()  # pools are created in this mode, so updates need it too
def _poison(pool: Tensor, slots: Sequence[int] | None = None) -> None:
    """Poison these rows of a pool; None: all."""
    kind, pattern = _BITS[pool.element_size()]
    if slots is None:
        pool.view(kind).fill_(pattern)
    else:
        slots_T, size = torch.tensor(slots, device=pool.device), pool.shape[1]
        pool.view(kind)[slots_T // size, slots_T % size] = pattern
