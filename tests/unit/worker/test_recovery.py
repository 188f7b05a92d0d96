"""A request that kills workers is found and ended, the others go on; random deaths end no request."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.config import SchedulerConfig
from engine.core.types import ErrorCode, FinishReason, Request, TokenEvent
from engine.worker.recovery import Recovery
from engine.worker.request_table import RequestTable, TokenEventStream
from tests.counting_engine import counting_request

MAX_DEATHS = 2
MAX_RUNNING = 3
NUM_TOKENS = 4


class Worker:
    """What a worker does to requests: a token each step for the oldest `MAX_RUNNING`; dies of a poison once it runs."""

    def __init__(self, poisons: dict[str, int]) -> None:
        self.requests: dict[str, Request] = {}
        self._poisons = poisons  # after how many tokens each is one

    def running(self) -> list[str]:
        return list(self.requests)[:MAX_RUNNING]

    def step(self) -> list[TokenEvent] | None:
        """Return the news; None if the step kills."""
        num_delivered = {name: len(self.requests[name].progress.token_ids) for name in self.running()}
        if any(self._poisons.get(name) == num for name, num in num_delivered.items()):
            return None
        return [self._advance(name, num) for name, num in num_delivered.items()]

    def _advance(self, name: str, num: int) -> TokenEvent:
        request = self.requests.pop(name)
        if num + 1 == NUM_TOKENS:
            return TokenEvent(name, (num,), finish=FinishReason.LENGTH)
        progress = replace(request.progress, token_ids=(*request.progress.token_ids, num))
        self.requests = {name: replace(request, progress=progress), **self.requests}
        return TokenEvent(name, (num,))


class House:
    """A client without processes."""

    def __init__(self, poisons: dict[str, int], kind: type[Recovery] = Recovery) -> None:
        self.request_table = RequestTable(SchedulerConfig(max_running=MAX_RUNNING), lambda name: None)
        self.recovery = kind(self.request_table, self._post, MAX_DEATHS, MAX_RUNNING)
        self.num_deaths = 0
        self._poisons = poisons
        self._worker = Worker(poisons)

    def _post(self, request: Request) -> None:
        self._worker.requests[request.request_id] = request

    def submit(self, name: str) -> TokenEventStream:
        (stream,) = self.recovery.submit([counting_request(name, 1, max_tokens=NUM_TOKENS)])
        return stream

    def begin(self) -> None:
        """Have a new worker ready."""
        self._worker = Worker(self._poisons)
        self.recovery.on_ready()

    def live(self, may_know: bool = True, is_killed: Callable[[], bool] = lambda: False) -> None:
        """Turn a new worker until nothing lives or it dies."""
        self.begin()
        while len(self.request_table):
            running = self._worker.running()
            news = None if is_killed() else self._worker.step()
            if news is None:
                self.num_deaths += 1
                self.recovery.on_death(set(running) if may_know else None, "it was killed")
                return
            self.request_table.deliver(news)
            self.recovery.on_events()


def end_in(stream: TokenEventStream) -> tuple[list[int], TokenEvent]:
    mailbox = stream.entry.mailbox
    events = [mailbox.get_nowait() for _ in range(mailbox.qsize())]
    return [token_id for event in events for token_id in event.token_ids], events[-1]


def check_the_poison_is_found(num: int, poisons: dict[str, int], may_know: bool, kind: type[Recovery] = Recovery) -> None:
    async def scenario() -> None:
        house = House(poisons, kind)
        streams = {str(n): house.submit(str(n)) for n in range(num)}
        while len(house.request_table):
            house.live(may_know)
            assert house.num_deaths <= (MAX_DEATHS + 1) * (len(poisons) + 1) * NUM_TOKENS, "for ever"
        for name, stream in streams.items():
            tokens, end = end_in(stream)
            if name in poisons:
                assert (tokens, end.error_code) == (list(range(poisons[name])), ErrorCode.WORKER_CRASHED)
            else:
                assert (tokens, end.finish) == (list(range(NUM_TOKENS)), FinishReason.LENGTH)

    asyncio.run(scenario())


@given(
    st.integers(1, 9), st.dictionaries(st.sampled_from("012345678"), st.integers(0, NUM_TOKENS - 1), max_size=3), st.booleans()
)
def test_poison_is_found_and_others_complete(num: int, poisons: dict[str, int], may_know: bool) -> None:
    check_the_poison_is_found(num, {name: at for name, at in poisons.items() if int(name) < num}, may_know)


class Trusting(Recovery):
    """The mutant: no request is quarantined."""

    def on_ready(self) -> None:
        for entry in self._request_table.entries:
            entry.num_deaths = 0
        super().on_ready()


class Rash(Recovery):
    """The mutant: all quarantined requests are tried together, and all are ended."""

    def on_death(self, running, cause) -> None:
        quarantined = [entry for entry in self._request_table.entries if entry.num_deaths >= MAX_DEATHS and entry.is_posted]
        super().on_death(running, cause)
        for entry in quarantined:
            if entry in self._request_table.entries:
                self._request_table.fail(entry, ErrorCode.WORKER_CRASHED, cause)

    def on_ready(self) -> None:
        super().on_ready()
        for entry in self._request_table.entries:
            if not entry.is_posted:
                self._send_to_worker(entry)


class Forgetful(Recovery):
    """The mutant: each worker begins the texts anew."""

    def _send_to_worker(self, entry) -> None:
        entry.is_posted = True
        self._post(entry.request)


@pytest.mark.parametrize("mutant", [Trusting, Rash, Forgetful])
def test_mutants_are_detected(mutant: type[Recovery]) -> None:
    with pytest.raises(AssertionError):
        check_the_poison_is_found(3, {"1": 2}, True, mutant)


async def test_random_deaths_fail_no_request() -> None:
    """Each worker is killed after its second step, again and again: every delivered token clears its request."""
    house = House({})
    streams = [house.submit(str(n)) for n in range(8)]
    while len(house.request_table):
        house.live(is_killed=iter([False, True]).__next__)
    assert house.num_deaths > 3 * MAX_DEATHS
    for stream in streams:
        assert end_in(stream)[0] == list(range(NUM_TOKENS))


async def test_waiting_requests_count_no_deaths() -> None:
    house = House({})
    streams = [house.submit(str(n)) for n in range(MAX_RUNNING + 2)]
    house.live(is_killed=iter([False, True]).__next__)
    house.live(is_killed=iter([False, True]).__next__)
    assert [stream.entry.num_deaths for stream in streams] == [1] * MAX_RUNNING + [0, 0]
    house.request_table.abort_all()


async def test_death_before_first_event_counts_for_all() -> None:
    """Of taking a request in, for example: it is in no step then."""
    house = House({})
    streams = [house.submit(str(n)) for n in range(2)]
    house.recovery.on_ready()
    house.recovery.on_death(set(), "it was killed")
    assert [stream.entry.num_deaths for stream in streams] == [1, 1]
    house.request_table.abort_all()


async def test_new_requests_wait_during_isolated_retry() -> None:
    house = House({"0": 0})
    streams = [house.submit(str(n)) for n in range(2)]
    for _ in range(MAX_DEATHS):
        house.live()
    house.begin()
    assert list(house._worker.requests) == ["0"]
    late = house.submit("late")
    assert not late.entry.is_posted
    house.recovery.on_death({"0"}, "it was killed")
    house.live()
    assert [end_in(stream)[1].finish for stream in (*streams, late)] == [
        FinishReason.ERROR,
        FinishReason.LENGTH,
        FinishReason.LENGTH,
    ]
