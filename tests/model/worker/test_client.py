"""The client and a worker that behaves: every way a request can begin and end."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from engine.core.config import SchedulerConfig
from engine.core.service import EngineBusy, EngineState, EngineUnavailable
from engine.core.types import FinishReason, StepStats, TokenEvent
from tests.clients import collect, end_of, patiently, running, submitted, tokens_of, until, worker_client
from tests.counting_engine import Trick, build_forever, counting_request

ENDLESS = 500_000


async def test_request_gets_its_tokens_and_one_end() -> None:
    client = worker_client()
    with pytest.raises(EngineUnavailable):
        client.model  # noqa: B018
    async with running(client):
        assert client.model.name == "counting"
        events = await collect(client, counting_request("a", 10, max_tokens=4))
        assert tokens_of(events) == [11, 12, 13, 14]
        assert end_of(events).finish is FinishReason.LENGTH
        await until(lambda: client.health.heartbeat_age_s is not None)
        assert client.health.state is EngineState.READY
        assert client.health.num_restarts == 0


async def test_fifty_requests_at_once() -> None:
    client = worker_client(scheduler=SchedulerConfig(max_running=8))
    async with running(client):
        requests = [counting_request(f"r{n}", 1000 * n, max_tokens=1 + n % 7) for n in range(50)]
        results = await asyncio.gather(*(collect(client, request) for request in requests))
        for n, events in enumerate(results):
            assert tokens_of(events) == [1000 * n + 1 + i for i in range(1 + n % 7)]
            assert end_of(events).finish is FinishReason.LENGTH


async def test_the_folder_of_the_sockets_is_private(tmp_path: Path) -> None:
    async with running(worker_client()):
        (folder,) = tmp_path.glob("latebranch-*")  # noqa: ASYNC240
        assert folder.stat().st_mode & 0o777 == 0o700


async def test_refusals_are_events() -> None:
    client = worker_client()
    async with running(client):
        (event,) = await collect(client, counting_request("long", 1, max_tokens=10**9))
        assert (event.finish, event.error) == (FinishReason.ERROR, "too long")


async def test_a_living_id_cannot_be_used_twice() -> None:
    client = worker_client()
    async with running(client), aclosing(submitted(client, counting_request("a", Trick.PACE, max_tokens=ENDLESS))):
        with pytest.raises(ValueError, match="in use"):
            submitted(client, counting_request("a", 1))


async def test_abort_works_in_any_request_state() -> None:
    client = worker_client(scheduler=SchedulerConfig(max_running=1))
    async with running(client):
        running_one = submitted(client, counting_request("running", Trick.PACE, max_tokens=ENDLESS))
        await anext(running_one)
        waiting = submitted(client, counting_request("waiting", 1))
        client.abort("waiting")
        assert [event.finish for event in [e async for e in waiting]] == [FinishReason.ABORT]
        client.abort("running")
        client.abort("running")
        assert end_of([event async for event in running_one]).finish is FinishReason.ABORT
        client.abort("running")
        client.abort("unknown")
        assert tokens_of(await collect(client, counting_request("running", 5, max_tokens=2))) == [6, 7]


async def test_abort_in_final_step_gives_one_end() -> None:
    """The letter and the last token cross; whichever wins, there is one end, and the id is free afterwards."""
    client = worker_client()
    async with running(client):
        for round_ in range(30):
            stream = submitted(client, counting_request("a", 1, max_tokens=1 + round_ % 2))
            await asyncio.sleep(0.0002 * (round_ % 5))
            client.abort("a")
            events = await patiently(_drained(stream))
            assert end_of(events).finish in (FinishReason.ABORT, FinishReason.LENGTH)


async def _drained(stream: AsyncIterator[TokenEvent]) -> list[TokenEvent]:
    return [event async for event in stream]


@pytest.mark.parametrize("num_read", [0, 2])
async def test_closing_the_iterator_aborts(num_read: int) -> None:
    client = worker_client()
    gauges: list[StepStats] = []
    client.add_listener(gauges.append)
    async with running(client):
        bystander = submitted(client, counting_request("b", Trick.PACE, max_tokens=ENDLESS))
        stream = submitted(client, counting_request("a", Trick.PACE, max_tokens=ENDLESS))
        for _ in range(num_read):
            await anext(stream)
        await until(lambda: gauges[-1].num_running == 2 if gauges else False)
        await stream.aclose()
        await until(lambda: gauges[-1].num_running == 1)
        assert [event async for event in stream] == []
        await bystander.aclose()


async def test_cancelled_reader_aborts_by_dropping_its_stream() -> None:
    client = worker_client()
    gauges: list[StepStats] = []
    client.add_listener(gauges.append)
    async with running(client):
        reader = asyncio.create_task(collect(client, counting_request("a", Trick.PACE, max_tokens=ENDLESS)))
        await until(lambda: bool(gauges))
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        del reader
        await until(lambda: len(client._request_table) == 0)


async def test_full_queue_is_busy_without_loss() -> None:
    client = worker_client(scheduler=SchedulerConfig(max_running=1, max_waiting=2))
    async with running(client):
        first = submitted(client, counting_request("0", Trick.PACE, max_tokens=ENDLESS))
        await anext(first)
        others = [submitted(client, counting_request(name, 1, max_tokens=1)) for name in ("1", "2")]
        with pytest.raises(EngineBusy) as busy:
            submitted(client, counting_request("3", 1))
        assert 1.0 <= busy.value.retry_after_s <= 30.0
        await first.aclose()
        for stream in others:
            assert tokens_of(await patiently(_drained(stream))) == [2]
        assert tokens_of(await collect(client, counting_request("3", 1, max_tokens=1))) == [2]


async def test_a_listener_that_raises_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    client = worker_client()
    steps: list[int] = []

    def broken(stats: StepStats) -> None:
        raise ZeroDivisionError

    client.add_listener(broken)
    client.add_listener(lambda stats: steps.append(stats.step))
    async with running(client):
        with caplog.at_level(logging.ERROR):
            await collect(client, counting_request("a", 1, max_tokens=3))
    assert steps == [1, 2, 3]
    assert "a listener failed" in caplog.text


class TestStop:
    async def test_drains_then_refuses(self) -> None:
        client = worker_client()
        async with running(client):
            reader = asyncio.create_task(collect(client, counting_request("a", Trick.PACE, max_tokens=50)))
            await asyncio.sleep(0)
            stopping = asyncio.create_task(client.stop(drain_s=60.0))
            await asyncio.sleep(0)
            assert client.health.state is EngineState.STOPPING
            with pytest.raises(EngineUnavailable):
                submitted(client, counting_request("b", 1))
            await stopping
            assert end_of(await reader).finish is FinishReason.LENGTH

    async def test_undrained_requests_end_with_abort(self) -> None:
        client = worker_client()
        async with running(client):
            stream = submitted(client, counting_request("a", Trick.PACE, max_tokens=ENDLESS))
            await anext(stream)
            await client.stop(drain_s=0.05)
            assert end_of(await patiently(_drained(stream))).finish is FinishReason.ABORT

    async def test_a_second_call_forces_the_first(self) -> None:
        client = worker_client()
        async with running(client):
            stream = submitted(client, counting_request("a", Trick.PACE, max_tokens=ENDLESS))
            first = asyncio.create_task(client.stop(drain_s=3600.0))
            await asyncio.sleep(0)
            await client.stop()
            await patiently(first)
            assert end_of(await patiently(_drained(stream))).finish is FinishReason.ABORT

    async def test_while_loading_kills(self) -> None:
        client = worker_client(build_forever)
        start = asyncio.create_task(client.start())
        await until(lambda: client.health.heartbeat_age_s is not None)
        await client.stop(drain_s=60.0)
        with pytest.raises(EngineUnavailable, match="stopped while it started"):
            await start
        assert client.health.state is EngineState.STOPPED

    async def test_before_start_and_twice_is_harmless(self) -> None:
        client = worker_client()
        await client.stop()
        assert client.health.state is EngineState.STOPPED
        with pytest.raises(EngineUnavailable):
            submitted(client, counting_request("a", 1))
