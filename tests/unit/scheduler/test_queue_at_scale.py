"""Thousands of queued requests: a step, and a turn of the front end, does as much as with ten. Work is counted, not timed."""

import asyncio
import sys
from collections.abc import Callable

import pytest

from engine.core.config import SchedulerConfig
from engine.core.step_plan import Feeding
from engine.core.tree import PLAIN, ROOT, TokenTree
from engine.core.types import FinishReason, Request, SamplingParams, TokenEvent
from engine.draft.text.text_cache import TextCache
from engine.scheduler.scheduler import RowResult, Scheduler
from engine.scheduler.sequence import Sequence
from engine.worker.request_table import RequestTable

FEW, MANY = 10, 2_000
LIMITS = SchedulerConfig(max_running=4, max_waiting=2 * MANY)


def lines_run(act: Callable[[], object]) -> int:
    """Return how many lines of Python an action runs; a generator's line counts each time round."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def request(name: str) -> Request:
    return Request(name, (5, 6, 7), SamplingParams(max_tokens=400))


class House:
    """A scheduler and cached texts with so many requests, the first of which run."""

    def __init__(self, num_requests: int) -> None:
        self.scheduler = Scheduler(LIMITS, Feeding.TARGET_CACHE)
        self.texts = TextCache()
        for number in range(num_requests):
            self.add(str(number))
        self.step()

    def add(self, name: str) -> None:
        sequence = Sequence(request(name), 0, "traversal")
        self.scheduler.add(sequence)
        self.texts.begin(sequence.request, sequence.token_ids)

    def step(self) -> None:
        self.scheduler.admit()
        self.texts.advance(self.scheduler.running_ids)
        plan = self.scheduler.plan([PLAIN] * len(self.scheduler.views()))
        for row in plan.rows:
            self.scheduler.commit(row, RowResult(TokenTree.single(row.certain_ids[-1]), (ROOT,), 9, 0))

    def end(self, name: str) -> None:
        self.scheduler.remove(name)
        self.texts.end(name)


def drained(num_requests: int) -> House:
    """Return a house whose cached texts have been indexed: that is bounded for each step, and done one day."""
    house = House(num_requests)
    while house.texts._indexer.advance(1 << 20):
        pass
    return house


@pytest.mark.parametrize(
    "act",
    [
        lambda house: house.step(),
        lambda house: house.add("late"),
        lambda house: house.end("9"),
        lambda house: (house.end("0"), house.step()),
    ],
    ids=["step", "arrival", "abort of one that waits", "end and admission"],
)
def test_engine_work_is_independent_of_queue_length(act):
    few, many = drained(FEW), drained(MANY)
    assert lines_run(lambda: act(many)) <= 1.2 * lines_run(lambda: act(few))  # a heap is deeper


class Front:
    """A request table with so many requests, the first of which have begun."""

    def __init__(self, num_requests: int) -> None:
        self.request_table = RequestTable(LIMITS, lambda request_id: None)
        self.streams = [self.request_table.open([request(str(number))]) for number in range(num_requests)]
        self.receive()

    def receive(self) -> None:
        self.request_table.deliver([TokenEvent(str(number), (9,)) for number in range(4)])

    def enter(self) -> None:
        self.request_table.make_room([request("late")])
        self.streams.append(self.request_table.open([request("late")]))

    def finish(self) -> None:
        self.request_table.deliver([TokenEvent("3", (9,), finish=FinishReason.LENGTH)])


@pytest.mark.parametrize("act", [Front.receive, Front.enter, Front.finish, lambda front: front.request_table.num_waiting])
def test_front_end_work_is_independent_of_queue(act):
    async def compare() -> None:
        few, many = Front(FEW), Front(MANY)
        assert lines_run(lambda: act(many)) == lines_run(lambda: act(few))
        for front in (few, many):
            assert front.request_table.num_waiting == sum(not entry.has_begun for entry in front.request_table.entries) - max(
                0, LIMITS.max_running - sum(entry.has_begun for entry in front.request_table.entries)
            )
            front.request_table.abort_all()
            assert front.request_table.num_waiting == 0

    asyncio.run(compare())


def test_line_count_detects_loop_over_queue():
    """The measure itself: what walks the queue is seen."""
    few, many = House(FEW), House(MANY)
    assert lines_run(lambda: list(many.scheduler._waiting)) > lines_run(lambda: list(few.scheduler._waiting)) + MANY
