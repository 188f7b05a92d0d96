"""The desk hears each end once, and finds out an engine that forgets one."""

import pytest

from engine.core.types import FinishReason, TokenEvent
from engine.core.validation import refused
from engine.scheduler.slot_pool import IntegrityError
from engine.worker.engine_loop import Desk
from engine.worker.messages import Abort, Add, Turn
from tests.counting_engine import MAX_MODEL_LEN, CountingEngine, Trick, counting_request


class CredulousDesk(Desk):
    """The mutant: passes on whatever the engine says."""

    def turn(self) -> Turn | None:
        output = self._engine.step()
        return Turn(output.events, output.stats)


def events_of(desk: Desk) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    while desk.has_work:
        turn = desk.turn()
        assert turn is not None
        events.extend(turn.events)
    return events


def check_each_ends_once(desk: Desk) -> None:
    desk.take(Add(counting_request("a", Trick.END_TWICE, 7, max_tokens=2)))
    desk.take(Add(counting_request("b", 3, max_tokens=3)))
    ends = [event.request_id for event in events_of(desk) if event.finish is not None]
    assert sorted(ends) == ["a", "b"]


def test_an_end_said_twice_is_heard_once() -> None:
    check_each_ends_once(Desk(CountingEngine()))


def test_a_credulous_desk_is_noticed() -> None:
    with pytest.raises(AssertionError):
        check_each_ends_once(CredulousDesk(CountingEngine()))


def test_a_forgotten_request_is_found_when_idle() -> None:
    desk = Desk(CountingEngine())
    desk.take(Add(counting_request("lost", Trick.NEVER_END)))
    assert events_of(desk) == []
    with pytest.raises(IntegrityError, match="never ended lost"):
        desk.check_idle()


def test_the_engines_own_books_are_checked_when_idle() -> None:
    desk = Desk(CountingEngine())
    desk.take(Add(counting_request("a", Trick.LEAK, max_tokens=1)))
    events_of(desk)
    with pytest.raises(IntegrityError, match="a slot leaked"):
        desk.check_idle()


def test_a_refusal_is_an_answer_and_needs_no_step() -> None:
    desk = Desk(CountingEngine())
    desk.take(Add(counting_request("long", 1, max_tokens=MAX_MODEL_LEN)))
    assert desk.turn() == Turn((refused("long", "too long"),))
    assert desk.turn() is None
    desk.check_idle()


def test_an_abort_is_told_once_and_unknown_ids_not_at_all() -> None:
    desk = Desk(CountingEngine())
    desk.take(Add(counting_request("a", 1)))
    for request_id in ("a", "a", "unknown"):
        desk.take(Abort(request_id))
    assert events_of(desk) == [TokenEvent("a", finish=FinishReason.ABORT)]
    desk.check_idle()
