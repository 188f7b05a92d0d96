"""Results that are not urgent are sent together, soon enough, with the same tokens, counts and times."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from msgspec import structs

from engine.core.config import SchedulerConfig
from engine.core.tree import Expansion
from engine.core.types import FinishReason, Request, StepStats, TokenEvent, TokenLogprobs
from engine.worker import delayed_results
from engine.worker.delayed_results import joined_results
from engine.worker.engine_loop import EngineLoop
from engine.worker.messages import Add, Command, Heartbeat, Ready, Shutdown, StepResult, WorkerEvent
from engine.worker.process import DELAY_S, Worker
from engine.worker.recovery import Recovery
from engine.worker.request_table import RequestTable
from tests.counting_engine import CountingEngine, CountingOutput, Trick, counting_request

STATS = StepStats(1, 1, 0, 1, 8)
Sends = list[list[WorkerEvent]]


def whole(name: str, *prompt: int, max_tokens: int = 9) -> Request:
    return replace(counting_request(name, *prompt, max_tokens=max_tokens), needs_each_event=False)


def sends_of(requests: Sequence[Request], step_s: float, num_iterations: int = 40) -> Sends:
    """Return what a worker sends that gets these requests at once and whose steps take `step_s` each."""
    batches: list[list[Command]] = [[Add(request) for request in requests], *[[] for _ in range(num_iterations)], [Shutdown()]]
    sends: Sends = []
    now_s = 0.0

    def read(_: float) -> list[Command]:
        nonlocal now_s
        now_s += step_s
        return batches.pop(0)

    Worker(CountingEngine(), read, lambda events: sends.append(list(events)), lambda: now_s).serve()
    assert isinstance(sends[0][0], Ready)
    return [sent for sent in sends[1:] if any(not isinstance(event, Heartbeat) for event in sent)]


def tokens_of(sends: Sends, name: str) -> list[list[int]]:
    """Return the tokens of a request by message."""
    found = []
    for sent in sends:
        results = [result for result in sent if isinstance(result, StepResult)]
        found.append([token for result in results for e in result.events if e.request_id == name for token in e.token_ids])
    return [tokens for tokens in found if tokens]


def test_streamed_requests_get_each_step_at_once() -> None:
    assert tokens_of(sends_of([counting_request("a", 10, max_tokens=4)], 0.001), "a") == [[11], [12], [13], [14]]


def test_whole_answers_send_first_and_last_tokens() -> None:
    assert tokens_of(sends_of([whole("a", 10, max_tokens=6)], 0.001), "a") == [[11], [12, 13, 14, 15, 16]]


def test_one_streamed_request_sends_all() -> None:
    sends = sends_of([whole("a", 10, max_tokens=6), counting_request("b", 20, max_tokens=3)], 0.001)
    assert tokens_of(sends, "a") == [[11], [12], [13], [14, 15, 16]]


def test_the_delay_is_bounded() -> None:
    messages = tokens_of(sends_of([whole("a", 10, max_tokens=12)], DELAY_S / 4), "a")
    assert messages == [[11], [12, 13, 14, 15], [16, 17, 18, 19], [20, 21, 22]]


def test_delayed_statistics_are_all_sent() -> None:
    sends = sends_of([whole("a", 10, max_tokens=6)], 0.001)
    stats = [event.stats.step for sent in sends for event in sent if isinstance(event, StepResult) and event.stats]
    assert stats == [1, 2, 3, 4, 5, 6]


def test_events_know_their_delay() -> None:
    *_, last = sends_of([whole("a", 10, max_tokens=4)], 0.01)
    events = [event for result in last if isinstance(result, StepResult) for event in result.events]
    assert [(event.token_ids, event.num_steps) for event in events] == [((12, 13), 2), ((14,), 1)]
    assert [event.delayed_s for event in events] == pytest.approx([0.01, 0.0])


def test_no_long_step_doubles_the_silence() -> None:
    """The bug: the result of a long step was sent after the next one, so that a healthy worker was silent twice as long."""
    assert tokens_of(sends_of([whole("a", 10, max_tokens=4)], 40.0), "a") == [[11], [12], [13], [14]]


def test_failed_engine_has_its_results_sent() -> None:
    batches: list[list[Command]] = [[Add(whole("a", 10))], [], [], [Add(counting_request("b", Trick.RAISE))]]
    sends: Sends = []
    with pytest.raises(RuntimeError):
        Worker(CountingEngine(), lambda _: batches.pop(0), lambda events: sends.append(list(events)), lambda: 0.0).serve()
    assert tokens_of(sends[1:], "a") == [[11], [12, 13]]


def test_first_token_is_urgent_behind_prompt_scores() -> None:
    events = [TokenEvent("a", prompt_logprobs=LOGPROBS[:2]), TokenEvent("a", (1,)), TokenEvent("a", (2,))]
    engine_loop = EngineLoop(ScriptedEngine(events))
    engine_loop.handle(Add(whole("a", 10)))
    urgent = []
    for _ in events:
        engine_loop.step()
        urgent.append(engine_loop.is_urgent)
    assert urgent == [True, True, False]


class ScriptedEngine(CountingEngine):
    """Its requests have these events, one a step."""

    def __init__(self, events: Sequence[TokenEvent]) -> None:
        super().__init__()
        self._left = list(events)

    def step(self) -> CountingOutput:
        return CountingOutput((self._left.pop(0),), STATS)


LOGPROBS = tuple(TokenLogprobs(-float(place)) for place in range(9))
HISTORY = [
    TokenEvent("a", (1,), LOGPROBS[:1], queued_s=0.5, num_cached_tokens=3),
    TokenEvent("a", (2,), LOGPROBS[1:2], expansion=Expansion(0, 1, 0)),
    TokenEvent("a", (3, 4), LOGPROBS[2:4], num_steps=2),
    TokenEvent("a", (5, 6), LOGPROBS[4:6], expansion=Expansion(2, 1, 0), num_draft_tokens=2, num_accepted_tokens=1),
    TokenEvent("a", (7,), LOGPROBS[6:7]),
    TokenEvent("a", (8,), LOGPROBS[7:8], finish=FinishReason.STOP, stop_token_id=8),
]


def check_nothing_is_lost() -> None:
    results = [(float(at), StepResult((event, TokenEvent("b", (at,))), STATS)) for at, event in enumerate(HISTORY)]
    joined = joined_results(results, 5.0)
    assert [result.stats for result in joined] == [STATS] * len(HISTORY)
    events = [event for result in joined for event in result.events]
    assert [event.token_ids for event in events if event.request_id == "b"] == [(0, 1, 2, 3, 4, 5)]
    own = [event for event in events if event.request_id == "a"]
    merged = TokenEvent("a", (2, 3, 4), LOGPROBS[1:4], num_steps=3)
    expected = [HISTORY[0], merged, *HISTORY[3:]]
    delayed_s = [5.0, 3.0, 2.0, 1.0, 0.0]
    assert own == [structs.replace(event, delayed_s=late) for event, late in zip(expected, delayed_s, strict=True)]


def test_joined_events_lose_nothing() -> None:
    check_nothing_is_lost()


@pytest.mark.parametrize("mutant", [lambda _: False, lambda _: True, lambda event: event.finish is None])
def test_joining_other_events_is_detected(mutant: Callable[[TokenEvent], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delayed_results, "_is_plain", mutant)
    with pytest.raises(AssertionError):
        check_nothing_is_lost()


@pytest.mark.parametrize("check", [test_whole_answers_send_first_and_last_tokens, test_streamed_requests_get_each_step_at_once])
def test_delaying_urgent_results_is_detected(check: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineLoop, "is_urgent", property(lambda _self: False, lambda _self, _value: None), raising=False)
    with pytest.raises(AssertionError):
        check()


async def test_resumed_request_needs_each_event() -> None:
    """The bug: a request that kills workers late was resumed some tokens earlier, and its first event cleared it each time."""
    table = RequestTable(SchedulerConfig(max_running=1), lambda _: None)
    (stream,) = table.open([whole("a", 10)])
    resumed = [stream.entry.as_resumed]  # the first engine gets it so too
    table.requeue({"a"})
    resumed.append(stream.entry.as_resumed)
    table.deliver([TokenEvent("a", (11,))])
    resumed.append(stream.entry.as_resumed)
    assert [request.needs_each_event for request in resumed] == [False, True, True]
    assert resumed[-1].progress.token_ids == (11,)
    await stream.aclose()


async def test_the_first_engine_may_report_late() -> None:
    """The bug: requests are submitted as they are resumed, so none was ever reported late."""
    table = RequestTable(SchedulerConfig(max_running=1), lambda _: None)
    posted: list[Request] = []
    recovery = Recovery(table, posted.append, 2, 1)
    recovery.on_ready()
    (stream,) = recovery.submit([whole("a", 10)])
    assert [request.needs_each_event for request in posted] == [False]
    await stream.aclose()
