"""The pool of cache slots. A slot holds the keys and values of one token, in every layer of the target and of the drafter.

Pages have size one: a sequence's table maps logical positions to slots. So keeping an accepted path is a permutation of integers,
and no key or value ever moves (docs/architecture.md). Knows which slots are free; does not know their content.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Salt = tuple[str | None, str]  # the LoRA adapter, since keys differ between adapters, and the request's salt
BlockKey = tuple[int | Salt | None, tuple[int, ...]]  # the parent's serial (of a first block the salt) and the tokens


@dataclass(slots=True, eq=False)
class Block:
    """A block of the prefix cache: consecutive committed tokens and the slots where the target has cached them.

    `serial` is unique. `is_drafted`: the drafter has cached all the tokens too. `is_finite`: a distribution that attends to the
    block was finite, so the block and its ancestors hold finite keys and values.
    """

    serial: int
    key: BlockKey
    slots: tuple[int, ...]
    num_users: int
    is_drafted: bool = False
    is_finite: bool = False


class OutOfSlots(RuntimeError):
    """More slots were requested than are free."""


class IntegrityError(AssertionError):
    """Bookkeeping contradicts itself: a leak, a double free or a shared slot."""


class SlotAllocator:
    """A free list over `num_slots` slots. Owns the list; callers own allocated slots until they free them."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._is_used = bytearray(num_slots)
        self._listeners: list[Callable[[Sequence[int]], None]] = []

    def on_freed_slots(self, listener: Callable[[Sequence[int]], None]) -> None:
        """Call `listener` with the slots of each `free`."""
        self._listeners.append(listener)

    @property
    def num_free(self) -> int:
        """Slots that can be allocated now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Slots that are allocated."""
        return self.num_slots - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Return `count` slots. Raises OutOfSlots if fewer are free."""
        if count > len(self._free):
            raise OutOfSlots(f"{count} slots requested, {len(self._free)} free")
        if count == 0:
            return []
        slots = self._free[-count:][::-1]
        del self._free[-count:]
        for slot in slots:
            self._is_used[slot] = 1
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Free slots. Raises IntegrityError if one was not in use."""
        for slot in slots:
            if not self._is_used[slot]:
                raise IntegrityError(f"slot {slot} is freed twice")
            self._is_used[slot] = 0
        self._free.extend(reversed(slots))
        for listener in self._listeners:
            listener(slots)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise IntegrityError unless the tables own each used slot exactly once and nothing else."""
        owned = [slot for table in tables for slot in table]
        if len(owned) != len(set(owned)):
            raise IntegrityError("a slot has two owners")
        if len(owned) != self.num_used or not all(self._is_used[slot] for slot in owned):
            raise IntegrityError(f"{self.num_used} slots are in use, sequences own {len(owned)}")
        if len(set(self._free)) != len(self._free):
            raise IntegrityError("a slot is free twice")
