"""Workers that die, hang or never start: each request still ends once, and what can be served again is."""

import asyncio
import multiprocessing
import os
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

import pytest
import zmq

import engine.worker
from engine.client import WorkerClient
from engine.config import EngineConfig, SchedulerConfig
from engine.desk import SteppedEngine
from engine.link import WorkerLink
from engine.service import EngineState, EngineUnavailable
from engine.supervision import Supervision
from engine.types import FinishReason, Request, SamplingParams, TokenEvent
from engine.wire import Addresses, Report
from engine.worker import ProcessLauncher, Worker
from server.assembly import served_engine
from tests.clients import collect, end_of, running, tokens_of, until, worker_client
from tests.counting_engine import Trick, build_counting, build_unless_marked, build_without_weights, counting_request

ENDLESS = 500_000
HANG_LIMIT_S = 3.0
WATCHFUL = Supervision(hang_limit_s=HANG_LIMIT_S, min_backoff_s=0.05)
LONG_HANG_LIMIT_S = 3600.0  # of skipped time, for whoever must not be blamed
PATIENT = Supervision(hang_limit_s=LONG_HANG_LIMIT_S, min_backoff_s=0.05)
_PATIENCE_MS = 60_000


def signal_worker(number: signal.Signals) -> None:
    (process,) = multiprocessing.active_children()
    assert process.pid is not None
    os.kill(process.pid, number)


async def until_ready_again(client: WorkerClient, num_restarts: int = 1) -> None:
    await until(lambda: client.health.num_restarts == num_restarts and client.health.state is EngineState.READY)


class ForgetfulClient(WorkerClient):
    """The mutant: buries a worker without telling those who wait for it."""

    def _bury(self, cause: str) -> None:
        with patch.object(self._ledger, "end_all"):
            super()._bury(cause)


async def check_a_death_answers_everybody(client: WorkerClient) -> None:
    """Kill the worker under requests that run, wait and have been aborted or closed; each open one must end, once."""
    async with running(client):
        requests = [counting_request(f"r{n}", Trick.PACE, 100 * n, max_tokens=ENDLESS) for n in range(20)]
        streams = [client.submit(request) for request in requests]
        await anext(streams[0])
        await streams[1].aclose()
        client.abort("r2")
        signal_worker(signal.SIGKILL)
        await until_ready_again(client)
        for stream in (streams[0], *streams[2:]):
            async with asyncio.timeout(1.0):  # it lies there already
                end = end_of([event async for event in stream])
            assert end.finish in (FinishReason.ERROR, FinishReason.ABORT)
            assert end.finish is FinishReason.ABORT or end.error == "the engine's worker died: it was killed by signal 9 (Killed)"
        assert tokens_of(await collect(client, counting_request("r0", 7, max_tokens=2))) == [8, 9]
        assert "killed by signal 9" in client.health.detail


async def test_kill_9_answers_everybody_and_the_next_worker_serves() -> None:
    await check_a_death_answers_everybody(worker_client(scheduler=SchedulerConfig(max_running=4)))


async def test_a_client_that_forgets_its_requests_is_noticed() -> None:
    with pytest.raises(TimeoutError):
        await check_a_death_answers_everybody(worker_client(kind=ForgetfulClient))


@pytest.mark.parametrize(
    ("trick", "error"), [(Trick.RAISE, "RuntimeError: an evil forward"), (Trick.KILL, "it was killed by signal 9 (Killed)")]
)
async def test_a_step_that_fails_says_why(trick: Trick, error: str) -> None:
    client = worker_client()
    async with running(client):
        end = end_of(await collect(client, counting_request("evil", trick)))
        assert (end.finish, end.error) == (FinishReason.ERROR, f"the engine's worker died: {error}")
        await until_ready_again(client)
        assert tokens_of(await collect(client, counting_request("good", 1, max_tokens=1))) == [2]


async def test_a_leak_found_when_idle_replaces_the_worker() -> None:
    client = worker_client()
    async with running(client):
        events = await collect(client, counting_request("a", Trick.LEAK, max_tokens=1))
        assert end_of(events).finish is FinishReason.LENGTH
        await until_ready_again(client)
        assert "IntegrityError: a slot leaked" in client.health.detail


async def test_between_two_workers_nothing_is_admitted() -> None:
    client = worker_client(supervision=Supervision(min_backoff_s=60.0))
    async with running(client):
        signal_worker(signal.SIGKILL)
        await until(lambda: client.health.state is EngineState.RESTARTING)
        with pytest.raises(EngineUnavailable, match="restarting") as unavailable:
            client.submit(counting_request("a", 1))
        assert unavailable.value.retry_after_s == 30.0
        assert client.health.heartbeat_age_s is None


async def test_a_worker_that_dies_while_it_drains_leaves_nobody_waiting() -> None:
    client = worker_client()
    async with running(client):
        stream = client.submit(counting_request("a", Trick.PACE, max_tokens=ENDLESS))
        await anext(stream)
        stopping = asyncio.create_task(client.stop(drain_s=3600.0))
        await asyncio.sleep(0)
        signal_worker(signal.SIGKILL)
        await stopping
        assert end_of([event async for event in stream]).error == "the engine's worker died: it was killed by signal 9 (Killed)"


async def hung_end(client: WorkerClient, request: Request, limit_s: float) -> TokenEvent:
    async with asyncio.timeout(limit_s):
        return end_of(await collect(client, request))


async def check_a_hung_step_is_seen(client: WorkerClient, limit_s: float = 60.0) -> None:
    async with running(client):
        end = await hung_end(client, counting_request("a", Trick.HANG), limit_s)
        assert end.error is not None
        assert "it hung (no heartbeat for" in end.error
        await until_ready_again(client)


async def test_a_hung_step_is_seen() -> None:
    await check_a_hung_step_is_seen(worker_client(supervision=WATCHFUL))


def _serve_noisily(self: Worker) -> None:
    with engine.worker._beating(self._say):
        _serve(self)


_serve = Worker.serve


def build_noisily(config: EngineConfig) -> SteppedEngine:
    """The mutant: a worker whose heartbeat comes from a thread, whatever the loop does."""
    Worker.serve = _serve_noisily  # type: ignore[method-assign]
    return build_counting(config)


async def test_a_heartbeat_that_proves_nothing_is_noticed() -> None:
    noisy = worker_client(build_noisily, supervision=WATCHFUL)
    with pytest.raises(TimeoutError):
        await check_a_hung_step_is_seen(noisy, limit_s=2 * HANG_LIMIT_S)


async def test_a_stopped_process_is_a_hang_too() -> None:
    client = worker_client(supervision=WATCHFUL)
    async with running(client):
        stream = client.submit(counting_request("a", Trick.PACE, max_tokens=ENDLESS))
        await anext(stream)
        signal_worker(signal.SIGSTOP)
        end = end_of([event async for event in stream])
        assert end.error is not None
        assert "it hung" in end.error
        await until_ready_again(client)


class SkippingClock:
    """What the link reads for the time: the real one, and whatever was skipped."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.skipped_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SkippingClock:
    clock = SkippingClock()
    monkeypatch.setattr("engine.link.time", clock)
    return clock


async def check_a_sleepy_event_loop_blames_nobody(client: WorkerClient, clock: SkippingClock) -> None:
    async with running(client):
        await until(lambda: client.health.heartbeat_age_s is not None)
        assert client._link is not None
        assert zmq.Socket.shadow(client._link._inbox).poll(_PATIENCE_MS), "nothing runs here until the worker has spoken"
        clock.skipped_s += 1.5 * LONG_HANG_LIMIT_S
        for _ in range(2):  # a worker that was killed may still have had time to answer once
            assert tokens_of(await collect(client, counting_request("a", 1, max_tokens=1))) == [2]
        assert client.health.num_restarts == 0


async def test_a_sleepy_event_loop_blames_nobody(clock: SkippingClock) -> None:
    await check_a_sleepy_event_loop_blames_nobody(worker_client(supervision=PATIENT), clock)


async def test_judging_before_reading_the_mail_is_noticed(clock: SkippingClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: a link that looks at the clock first and at its inbox afterwards."""
    unread = WorkerLink._unread

    async def hasty(self: WorkerLink) -> list[Report]:
        self._kill_if_silent()
        return await unread(self)

    monkeypatch.setattr(WorkerLink, "_unread", hasty)
    with pytest.raises((AssertionError, EngineUnavailable)):
        await check_a_sleepy_event_loop_blames_nobody(worker_client(supervision=PATIENT), clock)


async def test_a_start_that_fails_tells_the_workers_own_words() -> None:
    client = worker_client(build_without_weights, model="gone")
    with pytest.raises(EngineUnavailable, match=r"the engine's worker did not start: FileNotFoundError: no weights at 'gone'"):
        await client.start()
    assert client.health.state is EngineState.FAILED
    assert client.health.num_restarts == 0, "what never ran is not tried again"
    assert multiprocessing.active_children() == []
    with pytest.raises(EngineUnavailable, match="failed"):
        client.submit(counting_request("a", 1))
    await client.stop()


async def test_restarts_that_fail_in_a_row_end_in_failed(tmp_path: Path) -> None:
    marker = tmp_path / "gone"
    client = worker_client(build_unless_marked, model=str(marker))
    async with running(client):
        marker.touch()
        signal_worker(signal.SIGKILL)
        await until(lambda: client.health.state is EngineState.FAILED)
        assert client.health.num_restarts == 3
        assert "FileNotFoundError" in client.health.detail


async def test_a_worker_that_cannot_be_launched_fails_the_start() -> None:
    class BrokenLauncher:
        def launch(self, addresses: Addresses) -> BaseProcess:
            raise OSError("no more processes")

    client = WorkerClient(BrokenLauncher(), SchedulerConfig())
    with pytest.raises(EngineUnavailable, match="no more processes"):
        await client.start()


async def test_a_process_that_never_says_a_word_is_given_up() -> None:
    class MuteLauncher:
        def launch(self, addresses: Addresses) -> BaseProcess:
            process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(3600,), daemon=True)
            process.start()
            return process

    client = WorkerClient(MuteLauncher(), SchedulerConfig(), Supervision(first_word_limit_s=0.2))
    with pytest.raises(EngineUnavailable, match=r"it said nothing for 0\.2 s after its launch"):
        await client.start()


def build_tiny(config: EngineConfig) -> SteppedEngine:
    from engine.testing import tiny_engine, tiny_model  # here, so that the workers of other tests need no torch

    return tiny_engine(tiny_model(), config=config.scheduler)


@pytest.mark.slow
async def test_the_real_engine_gives_the_same_text_after_a_restart() -> None:
    """A seeded text is the same; the mutant is the same request without its seed."""
    client = worker_client(build_tiny, scheduler=SchedulerConfig(num_slots=2048, max_model_len=512))
    requests = [Request(f"r{n}", (n, 2, 3), SamplingParams(seed=n, max_tokens=24, ignore_eos=True)) for n in range(1, 5)]
    wild = Request("wild", (1, 2, 3), SamplingParams(max_tokens=24, ignore_eos=True))
    async with running(client):
        before = [tokens_of(events) for events in await asyncio.gather(*(collect(client, one) for one in (*requests, wild)))]
        assert {len(tokens) for tokens in before} == {24}
        stream = client.submit(Request("cut", (1, 2, 3), SamplingParams(max_tokens=500, ignore_eos=True)))
        await anext(stream)
        signal_worker(signal.SIGKILL)
        assert end_of([event async for event in stream]).finish is FinishReason.ERROR
        await until_ready_again(client)
        after = [tokens_of(events) for events in [await collect(client, one) for one in (*requests, wild)]]
    assert after[:-1] == before[:-1]
    assert after[-1] != before[-1]


async def test_the_served_engine_is_the_real_one() -> None:
    client = WorkerClient(ProcessLauncher(EngineConfig("/no/such/model"), served_engine), SchedulerConfig())
    with pytest.raises(EngineUnavailable, match="did not start") as failure:
        await client.start()
    assert "/no/such/model" in str(failure.value)
