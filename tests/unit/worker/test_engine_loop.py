"""The engine loop reports each end once, and detects an engine that forgets one."""

import pytest

from engine.core.types import FinishReason, TokenEvent
from engine.core.validation import refusal_event
from engine.scheduler.slot_allocator import IntegrityError
from engine.worker.engine_loop import EngineLoop
from engine.worker.messages import Abort, Add, StepResult
from tests.counting_engine import MAX_MODEL_LEN, CountingEngine, Trick, counting_request


class CredulousLoop(EngineLoop):
    """The mutant: passes on every event of the engine."""

    def step(self) -> StepResult | None:
        output = self._engine.step()
        return StepResult(output.events, output.stats)


def events_of(engine_loop: EngineLoop) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    while engine_loop.has_work:
        turn = engine_loop.step()
        assert turn is not None
        events.extend(turn.events)
    return events


def check_each_ends_once(engine_loop: EngineLoop) -> None:
    engine_loop.handle(Add(counting_request("a", Trick.END_TWICE, 7, max_tokens=2)))
    engine_loop.handle(Add(counting_request("b", 3, max_tokens=3)))
    ends = [event.request_id for event in events_of(engine_loop) if event.finish is not None]
    assert sorted(ends) == ["a", "b"]


def test_duplicate_end_is_reported_once() -> None:
    check_each_ends_once(EngineLoop(CountingEngine()))


def test_credulous_loop_is_detected() -> None:
    with pytest.raises(AssertionError):
        check_each_ends_once(CredulousLoop(CountingEngine()))


def test_a_forgotten_request_is_found_when_idle() -> None:
    engine_loop = EngineLoop(CountingEngine())
    engine_loop.handle(Add(counting_request("lost", Trick.NEVER_END)))
    assert events_of(engine_loop) == []
    with pytest.raises(IntegrityError, match="never ended lost"):
        engine_loop.check_idle()


def test_idle_engine_is_checked_for_leaks() -> None:
    engine_loop = EngineLoop(CountingEngine())
    engine_loop.handle(Add(counting_request("a", Trick.LEAK, max_tokens=1)))
    events_of(engine_loop)
    with pytest.raises(IntegrityError, match="a slot leaked"):
        engine_loop.check_idle()


def test_refusal_needs_no_step() -> None:
    engine_loop = EngineLoop(CountingEngine())
    engine_loop.handle(Add(counting_request("long", 1, max_tokens=MAX_MODEL_LEN)))
    assert engine_loop.step() == StepResult((refusal_event("long", "too long"),))
    assert engine_loop.step() is None
    engine_loop.check_idle()


def test_abort_is_reported_once_per_known_id() -> None:
    engine_loop = EngineLoop(CountingEngine())
    engine_loop.handle(Add(counting_request("a", 1)))
    for request_id in ("a", "a", "unknown"):
        engine_loop.handle(Abort(request_id))
    assert events_of(engine_loop) == [TokenEvent("a", finish=FinishReason.ABORT)]
    engine_loop.check_idle()
