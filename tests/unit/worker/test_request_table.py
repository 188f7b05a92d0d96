"""Every opened request ends exactly once, whatever happens in whatever order; and the house fills up as it should."""

import asyncio
import gc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.config import SchedulerConfig
from engine.core.service import EngineBusy
from engine.core.types import ErrorCode, FinishReason, Progress, Request, TokenEvent, TokenLogprobs
from engine.worker.request_table import RequestTable, TokenEventStream
from tests.counting_engine import counting_request

IDS = ("a", "b", "c")
operations = st.lists(
    st.tuples(st.sampled_from(["submit", "token", "finish", "abort", "close", "recall", "die"]), st.sampled_from(IDS))
)


def no_abort(_request_id: str) -> None:
    """Replace an engine that accepts aborts and never reports them."""


class ForgetfulTable(RequestTable):
    """The mutant: at a death, fails only requests that have had a token."""

    def fail_all(self, code: ErrorCode, error: str) -> None:
        for entry in list(self._live.values()):
            if entry.token_ids:
                self.fail(entry, code, error)


class DoubtfulTable(RequestTable):
    """The mutant: a request that ended may have more events."""

    def _put(self, entry, event) -> None:
        super()._put(entry, event)
        self._live.setdefault(event.request_id, entry)


def opened(request_table: RequestTable, request: Request) -> TokenEventStream:
    """Enter a request that has no siblings."""
    (stream,) = request_table.open([request])
    return stream


async def play(request_table: RequestTable, steps: list[tuple[str, str]]) -> list[TokenEventStream]:
    """Do the steps and end all; return the streams that were not closed."""
    streams: list[TokenEventStream] = []
    latest: dict[str, TokenEventStream] = {}
    for verb, request_id in steps:
        match verb:
            case "submit":
                try:
                    request_table.make_room([counting_request(request_id)])
                except ValueError:
                    continue
                latest[request_id] = opened(request_table, counting_request(request_id, 1))
                streams.append(latest[request_id])
            case "token":
                request_table.deliver([TokenEvent(request_id, (1,))])
            case "finish":
                request_table.deliver([TokenEvent(request_id, (1,), finish=FinishReason.STOP)])
            case "abort":
                request_table.abort(request_id)
            case "close":
                if request_id in latest:
                    stream = latest.pop(request_id)
                    await stream.aclose()
                    streams.remove(stream)
            case "recall":
                request_table.requeue({request_id})
            case "die":
                request_table.fail_all(ErrorCode.ENGINE_FAILED, "dead")
    request_table.fail_all(ErrorCode.ENGINE_FAILED, "dead")
    return streams


def ends_in(stream: TokenEventStream) -> int:
    mailbox = stream._entry.mailbox
    return sum(mailbox.get_nowait().finish is not None for _ in range(mailbox.qsize()))


def check_each_ends_once(make: Callable[..., RequestTable], steps: list[tuple[str, str]]) -> None:
    async def scenario() -> None:
        request_table = make(SchedulerConfig(), no_abort)
        streams = await play(request_table, steps)
        assert [ends_in(stream) for stream in streams] == [1] * len(streams)
        assert len(request_table) == 0

    asyncio.run(scenario())


@given(operations)
def test_each_request_ends_exactly_once(steps: list[tuple[str, str]]) -> None:
    check_each_ends_once(RequestTable, steps)


@pytest.mark.parametrize(
    ("mutant", "steps"),
    [(ForgetfulTable, [("submit", "a"), ("die", "a")]), (DoubtfulTable, [("submit", "a"), ("finish", "a"), ("finish", "a")])],
)
def test_mutants_are_detected(mutant: type[RequestTable], steps: list[tuple[str, str]]) -> None:
    with pytest.raises(AssertionError):
        check_each_ends_once(mutant, steps)


async def test_requests_beyond_running_limit_wait() -> None:
    request_table = RequestTable(SchedulerConfig(max_running=2, max_waiting=3), no_abort)
    streams = []
    for number in range(5):
        request_table.make_room([counting_request(str(number))])
        streams.append(opened(request_table, counting_request(str(number), 1)))
    assert request_table.num_waiting == 3
    with pytest.raises(EngineBusy) as busy:
        request_table.make_room([counting_request("one more")])
    assert busy.value.retry_after_s == 5.0, "nothing is known of the rate yet"
    request_table.deliver([TokenEvent("0", (1,)), TokenEvent("1", (1,))])
    assert request_table.num_waiting == 3, "to begin is not to make room"
    request_table.deliver([TokenEvent("0", finish=FinishReason.STOP)])
    assert request_table.num_waiting == 2
    request_table.make_room([counting_request("one more")])
    with pytest.raises(ValueError, match="in use"):
        request_table.make_room([counting_request("1")])
    request_table.abort_all()


@pytest.mark.parametrize(("seconds_each", "retry_after_s"), [(0.001, 1.0), (2.0, 8.0), (100.0, 30.0)])
async def test_retry_after_follows_recent_finish_rate(seconds_each: float, retry_after_s: float) -> None:
    now_s = 0.0
    request_table = RequestTable(SchedulerConfig(max_running=1), no_abort, clock=lambda: now_s)
    streams = [opened(request_table, counting_request(str(number), 1)) for number in range(8)]
    for number in range(3):
        now_s += seconds_each
        request_table.deliver([TokenEvent(str(number), finish=FinishReason.STOP)])
    assert request_table.num_waiting == 4
    now_s += seconds_each
    assert request_table.retry_after_s == pytest.approx(retry_after_s)
    request_table.abort_all()
    assert len(streams) == 8


async def test_retry_after_ignores_time_before_queue() -> None:
    """The bug: two finishes, an hour of silence, then a burst: the hour was taken for slow work and Retry-After was 30 s."""
    now_s = 0.0
    request_table = RequestTable(SchedulerConfig(max_running=1), no_abort, clock=lambda: now_s)
    for number in range(2):
        opened(request_table, counting_request(str(number), 1))
        request_table.deliver([TokenEvent(str(number), finish=FinishReason.STOP)])
    now_s += 3600.0
    streams = [opened(request_table, counting_request(str(number), 1)) for number in range(7)]
    assert request_table.retry_after_s == 5.0, "nothing is known of the rate yet"
    for number in range(2):
        now_s += 1.0
        request_table.deliver([TokenEvent(str(number), finish=FinishReason.STOP)])
    assert request_table.num_waiting == 4
    now_s += 1.0
    assert request_table.retry_after_s == pytest.approx(4.0)
    request_table.abort_all()
    assert len(streams) == 7


async def test_early_close_aborts_once_and_keeps_id() -> None:
    aborted: list[str] = []
    request_table = RequestTable(SchedulerConfig(), aborted.append)
    stream = opened(request_table, counting_request("a", 1))
    await stream.aclose()
    await stream.aclose()
    assert aborted == ["a"]
    with pytest.raises(ValueError, match="in use"):
        request_table.make_room([counting_request("a", 1)])
    request_table.deliver([TokenEvent("a", finish=FinishReason.ABORT)])
    request_table.make_room([counting_request("a", 1)])
    assert [event async for event in stream] == []


async def test_a_stream_that_is_dropped_aborts_too() -> None:
    aborted: list[str] = []
    request_table = RequestTable(SchedulerConfig(), aborted.append)
    stream = opened(request_table, counting_request("a", 1))
    del stream
    gc.collect()
    await asyncio.sleep(0)
    assert aborted == ["a"]
    request_table.abort_all()


async def test_an_ended_stream_aborts_nothing() -> None:
    aborted: list[str] = []
    request_table = RequestTable(SchedulerConfig(), aborted.append)
    stream = opened(request_table, counting_request("a", 1))
    request_table.deliver([TokenEvent("a", (1,)), TokenEvent("a", (2,), finish=FinishReason.LENGTH)])
    assert [event.token_ids async for event in stream] == [(1,), (2,)]
    await stream.aclose()
    request_table.abort("a")
    assert aborted == []


async def test_a_cancelled_wait_leaves_the_stream_usable() -> None:
    request_table = RequestTable(SchedulerConfig(), no_abort)
    stream = opened(request_table, counting_request("a", 1))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.01)
    request_table.deliver([TokenEvent("a", (1,), finish=FinishReason.LENGTH)])
    assert [event.token_ids async for event in stream] == [(1,)]


async def test_resumed_request_contains_delivered_tokens() -> None:
    request_table = RequestTable(SchedulerConfig(), no_abort)
    stream = opened(request_table, request := counting_request("a", 1))
    assert stream.entry.as_resumed == request
    request_table.deliver([TokenEvent("a", prompt_logprobs=(TokenLogprobs(-1.0),))])
    request_table.deliver([TokenEvent("a", (2, 3)), TokenEvent("a", (4,))])
    assert stream.entry.as_resumed.progress == Progress((2, 3, 4), 1)
    assert stream.entry.as_resumed.prompt_ids == (1,)


async def test_earlier_progress_is_kept_when_resumed():
    """The bug: a request that another machine had begun was begun anew here, and its first tokens came twice."""
    request_table = RequestTable(SchedulerConfig(), no_abort)
    begun = Request("a", (1,), progress=Progress((2, 3), 1))
    stream = opened(request_table, begun)
    assert stream.entry.as_resumed == begun
    request_table.deliver([TokenEvent("a", (4,))])
    assert stream.entry.as_resumed.progress == Progress((2, 3, 4), 1)
    request_table.abort_all()


async def test_unwanted_requests_end_with_their_engine() -> None:
    aborted: list[str] = []
    request_table = RequestTable(SchedulerConfig(), aborted.append)
    wanted, closed, dropped = (opened(request_table, counting_request(name, 1)) for name in ("wanted", "closed", "aborted"))
    await closed.aclose()
    request_table.abort("aborted")
    request_table.requeue(None)
    assert [event.finish async for event in dropped] == [FinishReason.ABORT]
    assert [entry.request.request_id for entry in request_table.entries] == ["wanted"]
    assert aborted == ["closed", "aborted"]
    request_table.abort("wanted")  # no engine has it: it ends here
    assert [event.finish async for event in wanted] == [FinishReason.ABORT]
    assert aborted == ["closed", "aborted"]
    assert len(request_table) == 0
