"""The engine in a thread keeps the promises that the worker process keeps."""

import asyncio
import threading
from contextlib import aclosing

import pytest

from engine.core.config import SchedulerConfig
from engine.core.service import EngineBusy, EngineState, EngineUnavailable
from engine.core.types import FinishReason, StepStats
from engine.worker.inprocess import InProcessEngine
from tests.clients import collect, end_of, running, submitted, tokens_of, until
from tests.counting_engine import CountingEngine, Trick, counting_request

ENDLESS = 500_000


def in_process(scheduler: SchedulerConfig | None = None) -> InProcessEngine:
    scheduler = scheduler or SchedulerConfig()
    return InProcessEngine(lambda: CountingEngine(scheduler.max_running), scheduler)


async def test_many_requests_and_their_numbers() -> None:
    service = in_process(SchedulerConfig(max_running=4))
    stats: list[StepStats] = []
    service.add_listener(stats.append)
    async with running(service):
        assert service.model.name == "counting"
        requests = [counting_request(str(n), 100 * n, max_tokens=3) for n in range(20)]
        results = await asyncio.gather(*(collect(service, request) for request in requests))
        assert [tokens_of(events) for events in results] == [[100 * n + 1, 100 * n + 2, 100 * n + 3] for n in range(20)]
        assert {end_of(events).finish for events in results} == {FinishReason.LENGTH}
        assert service.health.heartbeat_age_s is not None
    assert sum(one.num_generated_tokens for one in stats) == 60


async def test_abort_close_and_a_full_queue() -> None:
    service = in_process(SchedulerConfig(max_running=1, max_waiting=1))
    async with running(service), aclosing(submitted(service, counting_request("a", Trick.PACE, max_tokens=ENDLESS))) as first:
        await anext(first)
        waiting = submitted(service, counting_request("b", 1))
        with pytest.raises(EngineBusy):
            submitted(service, counting_request("c", 1))
        service.abort("b")
        service.abort("unknown")
        assert end_of([event async for event in waiting]).finish is FinishReason.ABORT
        await first.aclose()
        await until(lambda: len(service._request_table) == 0)


@pytest.mark.parametrize(
    ("max_tokens", "drain_s", "finish"), [(5, 3600.0, FinishReason.LENGTH), (ENDLESS, 0.05, FinishReason.ABORT)]
)
async def test_stop_drains_or_aborts(max_tokens: int, drain_s: float, finish: FinishReason) -> None:
    service = in_process()
    async with running(service):
        stream = submitted(service, counting_request("a", Trick.PACE, max_tokens=max_tokens))
        await service.stop(drain_s)
        assert end_of([event async for event in stream]).finish is finish
        with pytest.raises(EngineUnavailable, match="stopped"):
            submitted(service, counting_request("late", 1))


async def test_a_failure_answers_everybody_and_is_final() -> None:
    service = in_process()
    async with running(service):
        bystander = submitted(service, counting_request("good", Trick.PACE, max_tokens=ENDLESS))
        evil = submitted(service, counting_request("evil", Trick.RAISE))
        for stream in (bystander, evil):
            end = end_of([event async for event in stream])
            assert (end.finish, end.error) == (FinishReason.ERROR, "the engine failed: RuntimeError: an evil forward")
        assert service.health.state is EngineState.FAILED
        with pytest.raises(EngineUnavailable, match="an evil forward"):
            submitted(service, counting_request("late", 1))


async def test_unbuildable_engine_fails_the_start() -> None:
    def build() -> CountingEngine:
        raise FileNotFoundError("no weights")

    service = InProcessEngine(build, SchedulerConfig())
    with pytest.raises(EngineUnavailable, match="FileNotFoundError: no weights"):
        await service.start()
    await service.stop()
    await until(lambda: "engine" not in {thread.name for thread in threading.enumerate()})
