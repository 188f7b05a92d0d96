"""The slot pool: no leak, no double free, no slot with two owners."""

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from engine.scheduler.slot_allocator import IntegrityError, OutOfSlots, SlotAllocator

NUM_SLOTS = 12


class PoolMachine(RuleBasedStateMachine):
    """Owners take slots and give some of them back, in any order."""

    pool_class = SlotAllocator

    def __init__(self) -> None:
        super().__init__()
        self.pool = self.pool_class(NUM_SLOTS)
        self.tables: list[list[int]] = []

    @rule(count=st.integers(0, NUM_SLOTS + 2))
    def allocate(self, count):
        num_free = self.pool.num_free
        if count > num_free:
            with pytest.raises(OutOfSlots):
                self.pool.allocate(count)
            assert self.pool.num_free == num_free
        else:
            self.tables.append(self.pool.allocate(count))
            assert len(self.tables[-1]) == count

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free_a_part(self, data):
        table = self.tables[data.draw(st.integers(0, len(self.tables) - 1))]
        start = data.draw(st.integers(0, len(table)))
        self.pool.free(table[start:])
        del table[start:]

    @precondition(lambda self: self.pool.num_free)
    @rule()
    def free_unowned_slot(self):
        owned = {slot for table in self.tables for slot in table}
        with pytest.raises(IntegrityError):
            self.pool.free([min(set(range(NUM_SLOTS)) - owned)])

    @invariant()
    def books_balance(self):
        self.pool.check(self.tables)
        assert self.pool.num_used == sum(map(len, self.tables)) == NUM_SLOTS - self.pool.num_free
        assert all(0 <= slot < NUM_SLOTS for table in self.tables for slot in table)


class LeakyPool(SlotAllocator):
    def free(self, slots):
        super().free(slots[1:])


class GenerousPool(SlotAllocator):
    def allocate(self, count):
        slots = super().allocate(count)
        self._free.extend(slots[:1])
        return slots


class ForgetfulPool(SlotAllocator):
    def free(self, slots):
        self._free.extend(slots)


class GreedyPool(SlotAllocator):
    def allocate(self, count):
        return super().allocate(min(count, self.num_free))


def run(pool_class: type[SlotAllocator], *phases: Phase) -> None:
    machine = type("Machine", (PoolMachine,), {"pool_class": pool_class})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=20, phases=phases))


def test_pool():
    run(SlotAllocator, Phase.generate, Phase.shrink)


@pytest.mark.parametrize("mutant", [LeakyPool, GenerousPool, ForgetfulPool, GreedyPool])
def test_pool_kills(mutant):
    with pytest.raises((AssertionError, BaseExceptionGroup, pytest.fail.Exception)):
        run(mutant, Phase.generate)


def test_check_sees_a_slot_with_two_owners():
    pool = SlotAllocator(4)
    table = pool.allocate(2)
    with pytest.raises(IntegrityError, match="two owners"):
        pool.check([table, table[:1]])


def test_check_sees_a_leak():
    pool = SlotAllocator(4)
    pool.allocate(2)
    with pytest.raises(IntegrityError, match="2 slots are in use, sequences own 0"):
        pool.check([])
