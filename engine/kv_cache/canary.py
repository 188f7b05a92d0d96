"""A canary among the cache slots: what is free or was never written is poisoned, and whoever reads it is told by the slot's name.

The poison is a NaN whose bits no computation makes by itself. It is looked for wherever slots are read, and what reads it in
another way computes NaN. Knows slots and what lies in them; does not know sequences: engine.kv_cache.slot_digests
knows whose text a slot holds. Shape key: S slots, R rows that were read.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from jaxtyping import Shaped
from torch import Tensor

from engine.scheduler.slot_pool import IntegrityError

_BITS = {2: (torch.int16, 0x7FCA), 4: (torch.int32, 0x7FCA_CAFE)}  # by bytes of a number: NaN in float32, bfloat16 and float16


class Canary(Protocol):
    """Whoever is told of pools with a row for each slot, and of what is read from them."""

    def watch(self, pool: Shaped[Tensor, "S ..."]) -> None:
        """Take a pool into care; nothing in it has been written."""
        ...

    def check(self, name: str, slots_R: Tensor, rows: Shaped[Tensor, "R ..."]) -> None:
        """Raise IntegrityError if a row of those read from these slots of the named pool is free or was never written."""
        ...


class NoCanary:
    """Watches nothing, and costs nothing."""

    def watch(self, pool: Shaped[Tensor, "S ..."]) -> None:
        """Do nothing."""

    def check(self, name: str, slots_R: Tensor, rows: Shaped[Tensor, "R ..."]) -> None:
        """Do nothing."""


class SlotCanary:
    """Poisons and checks once it has begun. Whoever owns the slots tells it of those that are freed."""

    def __init__(self) -> None:
        self._pools: list[Tensor] = []
        self._has_begun = False

    def watch(self, pool: Shaped[Tensor, "S ..."]) -> None:
        """Take a pool into care; nothing in it has been written."""
        self._pools.append(pool)
        if self._has_begun:
            _poison(pool)

    def begin(self) -> None:
        """Take every slot for free, and check from now on."""
        self._has_begun = True
        for pool in self._pools:
            _poison(pool)

    def on_free(self, slots: Sequence[int]) -> None:
        """Poison slots that have been freed."""
        if self._has_begun and slots:
            for pool in self._pools:
                _poison(pool, slots)

    def check(self, name: str, slots_R: Tensor, rows: Shaped[Tensor, "R ..."]) -> None:
        """Raise IntegrityError if a row of those read from these slots of the named pool is free or was never written."""
        if not self._has_begun or not rows.numel():
            return
        kind, pattern = _BITS[rows.element_size()]
        is_poison_R = rows.flatten(1)[:, 0].contiguous().view(kind) == pattern
        if bool(is_poison_R.any()):
            slots = sorted(set(slots_R[is_poison_R].tolist()))
            raise IntegrityError(f"{name} of slots {slots[:8]} are read, which are free or were never written")


@torch.inference_mode()  # as pools are made in passes, nothing else may change them
def _poison(pool: Tensor, slots: Sequence[int] | None = None) -> None:
    """Poison these rows of a pool; None: all."""
    kind, pattern = _BITS[pool.element_size()]
    if slots is None:
        pool.view(kind).fill_(pattern)
    else:
        pool.view(kind).index_fill_(0, torch.tensor(slots, device=pool.device), pattern)
