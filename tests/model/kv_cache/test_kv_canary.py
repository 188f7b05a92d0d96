"""The canary: sound engines never touch it, and each way of reading a slot that is not the row's own is named."""

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from msgspec import structs

from engine.attention import packing
from engine.attention.segments import chain_segment
from engine.core.config import SchedulerConfig
from engine.core.step_plan import Row
from engine.draft.models import drafter_segments as passes
from engine.draft.models.head_drafter import HeadDrafter
from engine.engine import Engine
from engine.kv_cache.canary import SlotCanary
from engine.model.causal_lm import CausalModel
from engine.model.linear_backends import NATIVE
from engine.model.target import Target
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.slot_allocator import IntegrityError, SlotAllocator
from engine.testing import tiny_engine
from tests.model.driving import Session, run
from tests.model.heads import random_head
from tests.model.kv_cache.test_kv_cache import NUM_SLOTS, RandomExpansion
from tests.model.mixed import mixed_requests
from tests.model.native_models import native
from tests.model.tiny import model, pair
from tests.needs import needs_library

CROWDED = SchedulerConfig(max_running=8, max_step_tokens=24, num_slots=NUM_SLOTS, max_model_len=64)


def with_a_model(has_canary: bool) -> Engine:
    return tiny_engine(*pair("llama"), policy=RandomExpansion(3), config=CROWDED, has_canary=has_canary)


def with_a_head(has_canary: bool, causal: CausalModel | None = None, linears: str = "plain") -> Engine:
    canary = SlotCanary() if has_canary else None
    target = Target(causal or model("llama"), NUM_SLOTS, canary)
    drafter = HeadDrafter("head", random_head(2), target.model, NUM_SLOTS, linears, canary=canary)
    target.report_to(drafter)
    engine = tiny_engine(target.model, drafter, RandomExpansion(3), config=CROWDED)
    engine._target = target
    if canary is not None:
        engine.watch_slots(canary)
    return engine


def with_a_native_head(has_canary: bool) -> Engine:
    return with_a_head(has_canary, native("llama"), NATIVE)


def session_of(engine: Engine) -> Session:
    """Run rows of every kind together through chunks, random trees and preemption."""
    return run(engine, mixed_requests(max_tokens=12))


@cache
def undisturbed(make: Callable[[bool], Engine]) -> Session:
    return session_of(make(False))


@pytest.mark.parametrize("make", [with_a_model, with_a_head, pytest.param(with_a_native_head, marks=needs_library)])
def test_canary_changes_no_token_of_sound_engine(make: Callable[[bool], Engine]) -> None:
    session = session_of(make(True))
    assert session.texts() == undisturbed(make).texts()
    assert sum(stats.num_preemptions for stats in session.stats)


_ROW, _KEEP, _FREE, _ALLOCATE = Scheduler._row, Scheduler._keep, SlotAllocator.free, SlotAllocator.allocate
_TABLES, _CHAIN = packing._tables, chain_segment


def shifted(slots: Sequence[int], count: int) -> tuple[int, ...]:
    return (*slots[1:count], *slots[: min(count, 1)], *slots[count:])


def off_by_one_table(scheduler: Scheduler, *args: Any) -> Row:
    """A context is read one slot beyond its own."""
    row = _ROW(scheduler, *args)
    return structs.replace(row, slots=shifted(row.slots, row.context_len))


def another_rows_table(scheduler: Scheduler, *args: Any) -> Row:
    """A row reads its neighbour's context, which is as long or longer."""
    row = _ROW(scheduler, *args)
    longer = [one for one in scheduler._running if one.request_id != row.request_id and len(one.slots) >= row.context_len]
    return structs.replace(row, slots=(*longer[0].slots[: row.context_len], *row.slots[row.context_len :])) if longer else row


def first_nodes_kept(scheduler: Scheduler, sequence: Any, num_kept: int, path_slots: list[int]) -> None:
    _KEEP(scheduler, sequence, num_kept, sequence.slots[num_kept : num_kept + len(path_slots)])


def freed_while_used(pool: SlotAllocator, slots: Any) -> None:
    """A listener learns that a used slot was freed."""
    _FREE(pool, slots)
    for on_free in pool._listeners:
        on_free([slot for slot in range(NUM_SLOTS) if pool._is_used[slot]][:1])


def given_twice(pool: SlotAllocator, count: int) -> list[int]:
    """A slot is given away again before its first owner has written it."""
    used = [slot for slot in range(NUM_SLOTS) if pool._is_used[slot]]
    slots = _ALLOCATE(pool, count)
    return [*slots[:-1], used[0]] if used and slots else slots


def padded_with_the_last_slot(segments: Any, starts: Any) -> Any:
    integers, visible = _TABLES(segments, starts)
    integers[1][~visible.any(1)] = NUM_SLOTS - 1
    return integers, visible


def drafter_off_by_one(token_ids: Any, context_len: int, slots: tuple[int, ...]) -> Any:
    """The drafter's keys go to other slots than they are read from, which only the drafter's cache shows."""
    return _CHAIN(token_ids, context_len, shifted(slots, len(slots)))


TABLE = re.compile(
    r"request \w+: slot \d+ at position \d+ of \d+ cached ones holds (nothing|another text) instead of (nothing|its own)"
)
TWICE = re.compile("a slot is given to two tokens of one step")
POISON = re.compile(r"keys of layer \d of slots \[.+\] are read, which are free or were never written")


@pytest.mark.parametrize(
    ("owner", "name", "mutant", "error"),
    [
        (Scheduler, "_row", off_by_one_table, TABLE),
        (Scheduler, "_row", another_rows_table, TABLE),
        (Scheduler, "_keep", first_nodes_kept, TABLE),
        (SlotAllocator, "allocate", given_twice, TWICE),
        (SlotAllocator, "free", freed_while_used, TABLE),
        (packing, "_tables", padded_with_the_last_slot, POISON),
        (passes, "chain_segment", drafter_off_by_one, POISON),
    ],
)
def test_slot_of_another_row_is_named(
    owner: Any, name: str, mutant: Callable[..., Any], error: re.Pattern[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(IntegrityError, match=error):
        session_of(with_a_model(True))


def test_features_of_free_slots_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: a token reads its own slot's feature, not that of the token before it."""
    monkeypatch.setattr(HeadDrafter, "_slots_before", lambda self, row: row.slots[row.draft_len :][: len(row.draft_ids)])
    with pytest.raises(IntegrityError, match=r"features of slots \[.+\] are read, which are free"):
        session_of(with_a_head(True))


def test_engine_without_canary_misses_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the canary a row reads another sequence, and its answer looks like any other."""
    monkeypatch.setattr(Scheduler, "_row", another_rows_table)
    session = session_of(with_a_model(False))
    assert session.texts() != undisturbed(with_a_model).texts()
