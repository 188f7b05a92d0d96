"""Workers that die, hang or never start: what they left unfinished goes on where it was, and each request ends once."""

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import zmq

import engine.worker.process
from engine.core.config import EngineConfig, SchedulerConfig
from engine.core.service import EngineRefused, EngineState, EngineUnavailable
from engine.core.tree import Expansion
from engine.core.types import ErrorCode, FinishReason, Progress, Request, SamplingParams
from engine.worker.client import WorkerClient
from engine.worker.connection import WorkerConnection, WorkerDied
from engine.worker.crash_dump import CrashDumps
from engine.worker.engine_loop import EngineFactory, SteppedEngine
from engine.worker.messages import Addresses
from engine.worker.process import HEARTBEAT_S, ProcessLauncher, Worker
from engine.worker.restart_limits import Supervision
from engine.worker.step_log import StepNote
from server.adaptive_engine import served_engine
from tests.clients import SWIFT, collect, end_of, patiently, running, submitted, tokens_of, until, worker_client
from tests.counting_engine import Trick, build_counting, build_unless_marked, build_without_weights, counting_request

ENDLESS = 500_000
LONG_HANG_LIMIT_S = 3600.0  # of skipped time: on a busy machine a slow worker is not a hung one
SILENCE_S = 4 * HEARTBEAT_S
IMPATIENT = replace(SWIFT, min_backoff_s=0.01, max_backoff_s=0.02, max_deaths=1)
PATIENT = replace(SWIFT, hang_limit_s=LONG_HANG_LIMIT_S)
LEISURELY = replace(SWIFT, min_backoff_s=3600.0, max_backoff_s=3600.0)
_PATIENCE_MS = 60_000


def signal_worker(number: signal.Signals) -> None:
    (process,) = multiprocessing.active_children()
    assert process.pid is not None
    os.kill(process.pid, number)


async def until_ready_again(client: WorkerClient, num_restarts: int = 1) -> None:
    await until(lambda: client.health.num_restarts == num_restarts and client.health.state is EngineState.READY)


async def until_between_workers(client: WorkerClient) -> None:
    """Have a leisurely client wait for long: of two crashes the second makes it."""
    signal_worker(signal.SIGABRT)
    await until_ready_again(client)
    signal_worker(signal.SIGABRT)
    await until(lambda: client.health.state is EngineState.RESTARTING)


class ForgetfulClient(WorkerClient):
    """The mutant: drops a dead worker without taking back its requests."""

    def _handle_death(self, death: WorkerDied, note: StepNote | None) -> None:
        with patch.object(self._recovery, "on_death"):
            super()._handle_death(death, note)


class RepeatingClient(WorkerClient):
    """The mutant: resumes requests from their prompts."""

    def _post_add(self, request: Request) -> None:
        super()._post_add(replace(request, progress=Progress()))


async def check_a_death_is_survived(client: WorkerClient, limit_s: float = 600.0) -> None:
    """Kill the worker under requests that run, wait and have been aborted or closed; all others must get their tokens, once."""
    async with running(client):
        requests = [counting_request(f"r{n}", Trick.PACE, 100 * n, max_tokens=20 + n) for n in range(20)]
        streams = [submitted(client, request) for request in requests]
        first = await anext(streams[0])
        await streams[1].aclose()
        client.abort("r2")
        signal_worker(signal.SIGKILL)
        async with asyncio.timeout(limit_s):
            events = [[event async for event in stream] for stream in streams]
        events[0].insert(0, first)
        assert end_of(events[2]).finish is FinishReason.ABORT
        for n in (0, *range(3, 20)):
            assert tokens_of(events[n]) == list(range(100 * n + 1, 100 * n + 21 + n))
            assert end_of(events[n]).finish is FinishReason.LENGTH
        assert client.health.num_restarts == 1
        assert "killed by signal 9" in client.health.detail


async def test_kill_9_loses_nothing_and_repeats_nothing() -> None:
    await check_a_death_is_survived(worker_client(scheduler=SchedulerConfig(max_running=4)))


@pytest.mark.parametrize(
    ("kind", "symptom", "limit_s"), [(ForgetfulClient, TimeoutError, 5.0), (RepeatingClient, AssertionError, 600.0)]
)
async def test_client_losing_or_repeating_events_is_detected(
    kind: type[WorkerClient], symptom: type[Exception], limit_s: float
) -> None:
    with pytest.raises(symptom):
        await check_a_death_is_survived(worker_client(scheduler=SchedulerConfig(max_running=4), kind=kind), limit_s)


def build_noise_aware(config: EngineConfig) -> SteppedEngine:
    """Return a tiny target whose drafter's trees end depending on the noise of later positions."""
    from engine.core.policy import FixedExpansion  # here, so that the process that kills needs no torch
    from engine.testing import tiny_engine, tiny_pair

    return tiny_engine(*tiny_pair(), FixedExpansion(Expansion(0, 2, 3, "noise_aware", 4)), "coupled", config.scheduler)


class RedrawingClient(WorkerClient):
    """The mutant: a request is resumed with another drawn seed."""

    def _post_add(self, request: Request) -> None:
        super()._post_add(replace(request, drawn_seed=request.drawn_seed + len(request.progress.token_ids)))


async def text_through_a_death(kind: type[WorkerClient], request: Request) -> list[int]:
    """Return what an unseeded request gets whose worker is killed after its first tokens."""
    scheduler = SchedulerConfig(num_slots=4096, max_model_len=2048)
    client = worker_client(build_noise_aware, scheduler=scheduler, kind=kind)
    async with running(client):
        stream = submitted(client, request)
        events = [await anext(stream)]
        signal_worker(signal.SIGKILL)
        events += [event async for event in stream]
        assert client.health.num_resumed == 1
    return tokens_of(events)


async def test_an_unseeded_request_keeps_its_noise() -> None:
    """Each worker drew its own seed. Noise after a reported step must be the noise that ended the step."""
    scheduler = SchedulerConfig(num_slots=4096, max_model_len=2048)
    request = Request("r", (5, 6, 7), SamplingParams(max_tokens=1000, ignore_eos=True))
    engine = build_noise_aware(EngineConfig("tiny", scheduler=scheduler))
    engine.add(request)
    undisturbed: list[int] = []
    while engine.has_work:
        undisturbed += tokens_of([*engine.step().events])
    assert await text_through_a_death(WorkerClient, request) == undisturbed
    assert await text_through_a_death(RedrawingClient, request) != undisturbed


@pytest.mark.parametrize(
    ("trick", "error"), [(Trick.RAISE, "RuntimeError: an evil forward"), (Trick.KILL, "it was killed by signal 9 (Killed)")]
)
async def test_worker_killing_request_fails_others_complete(trick: Trick, error: str, tmp_path: Path) -> None:
    client = worker_client(supervision=IMPATIENT, dumps=CrashDumps(tmp_path / "dumps"))
    async with running(client):
        good = [asyncio.create_task(collect(client, counting_request(f"g{n}", Trick.PACE, 0, max_tokens=9))) for n in range(3)]
        await asyncio.sleep(0)
        end = end_of(await collect(client, counting_request("evil", trick)))
        assert (end.finish, end.error_code) == (FinishReason.ERROR, ErrorCode.WORKER_CRASHED)
        assert end.error is not None
        assert end.error.endswith(f" workers died of this request, the last when it ran alone: {error}")
        for events in await asyncio.gather(*good):
            assert tokens_of(events) == list(range(1, 10))
        assert tokens_of(await collect(client, counting_request("late", 1, max_tokens=1))) == [2]
        assert client.health.num_restarts in (2, 3)
        dumps = [json.loads(path.read_bytes()) for path in sorted((tmp_path / "dumps").iterdir())]
        assert len(dumps) == client.health.num_restarts
        assert [row["request_id"] for row in dumps[-1]["last_step_begun"]["rows"]] == ["evil"]
        assert {dump["cause"] for dump in dumps} == {error}


async def test_leak_found_when_idle_replaces_worker(tmp_path: Path) -> None:
    client = worker_client()
    async with running(client):
        events = await collect(client, counting_request("a", Trick.LEAK, max_tokens=1))
        assert end_of(events).finish is FinishReason.LENGTH
        await until_ready_again(client)
        assert "IntegrityError: a slot leaked" in client.health.detail
        (_,) = tmp_path.glob("latebranch-*/*")  # noqa: ASYNC240 (of dead workers nothing is left)


async def test_between_two_workers_nothing_is_admitted() -> None:
    client = worker_client(supervision=LEISURELY)
    async with running(client):
        await until_between_workers(client)
        with pytest.raises(EngineUnavailable, match="restarting") as unavailable:
            submitted(client, counting_request("a", 1))
        assert unavailable.value.retry_after_s == 30.0
        assert client.health.heartbeat_age_s is None


async def test_worker_dying_while_draining_is_replaced() -> None:
    client = worker_client()
    async with running(client):
        stream = submitted(client, counting_request("a", Trick.PACE, max_tokens=50))
        first = await anext(stream)
        stopping = asyncio.create_task(client.stop(drain_s=3600.0))
        await asyncio.sleep(0)
        signal_worker(signal.SIGKILL)
        await patiently(stopping)
        events = [first, *[event async for event in stream]]
        assert tokens_of(events) == list(range(Trick.PACE + 1, Trick.PACE + 51))


async def test_drain_between_two_workers_ends_all() -> None:
    client = worker_client(supervision=LEISURELY)
    async with running(client):
        stream = submitted(client, counting_request("a", Trick.PACE, max_tokens=ENDLESS))
        await anext(stream)
        await until_between_workers(client)
        await patiently(client.stop(drain_s=0.1))
        assert end_of([event async for event in stream]).finish is FinishReason.ABORT


async def test_request_cancelled_between_workers_ends_immediately() -> None:
    client = worker_client(supervision=LEISURELY)
    async with running(client):
        streams = [submitted(client, counting_request(name, Trick.PACE, max_tokens=ENDLESS)) for name in "ab"]
        await anext(streams[0])
        await until_between_workers(client)
        client.abort("a")
        assert end_of([event async for event in streams[0]]).finish is FinishReason.ABORT
        await streams[1].aclose()
        assert len(client._request_table) == 0


class SkippingClock:
    """The clock of the connection: real time plus the skipped time."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.skipped_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SkippingClock:
    clock = SkippingClock()
    monkeypatch.setattr("engine.worker.connection.time", clock)
    return clock


async def check_a_hung_step_is_seen(client: WorkerClient, clock: SkippingClock, limit_s: float = 600.0) -> None:
    """A hung worker reads no letter: that its request ends is the watch's doing."""
    async with running(client):
        good = submitted(client, counting_request("b", Trick.PACE, 1, max_tokens=ENDLESS))
        first = await anext(good)
        stream = submitted(client, counting_request("a", Trick.HANG))
        await until(lambda: "a" in in_step(client))
        async with asyncio.timeout(limit_s):
            await silence_of(client)
        clock.skipped_s += 1.5 * LONG_HANG_LIMIT_S
        client.abort("a")
        assert end_of([event async for event in stream]).finish is FinishReason.ABORT
        assert "it hung (no heartbeat for" in client.health.detail
        assert tokens_of([first, await anext(good)]) == [2, 3]
        await until_ready_again(client)


def in_step(client: WorkerClient) -> frozenset[str]:
    """Return the requests in the step that the worker has begun."""
    note = client._connection.last_note if client._connection else None
    return note.request_ids if note else frozenset()


async def silence_of(client: WorkerClient) -> None:
    await until(lambda: (client.health.heartbeat_age_s or 0.0) > SILENCE_S)


async def test_a_hung_step_is_seen(clock: SkippingClock) -> None:
    await check_a_hung_step_is_seen(worker_client(supervision=PATIENT), clock)


def _serve_noisily(self: Worker) -> None:
    with engine.worker.process._sending_heartbeats(self._send):
        _serve(self)


_serve = Worker.serve


def build_noisily(config: EngineConfig) -> SteppedEngine:
    """The mutant: a worker whose heartbeat comes from a thread, whatever the loop does."""
    Worker.serve = _serve_noisily  # type: ignore[method-assign]
    return build_counting(config)


async def test_a_heartbeat_that_proves_nothing_is_noticed(clock: SkippingClock) -> None:
    noisy = worker_client(build_noisily, supervision=PATIENT)
    with pytest.raises(TimeoutError):
        await check_a_hung_step_is_seen(noisy, clock, limit_s=2 * SILENCE_S)


async def test_a_stopped_process_is_a_hang_too(clock: SkippingClock) -> None:
    client = worker_client(supervision=PATIENT)
    async with running(client):
        stream = submitted(client, counting_request("a", Trick.PACE, 0, max_tokens=50))
        first = await anext(stream)
        signal_worker(signal.SIGSTOP)
        await silence_of(client)
        clock.skipped_s += 1.5 * LONG_HANG_LIMIT_S
        assert tokens_of([first, *[event async for event in stream]]) == list(range(1, 51))
        assert "it hung" in client.health.detail


async def check_slow_event_loop_restarts_no_worker(client: WorkerClient, clock: SkippingClock) -> None:
    async with running(client):
        await until(lambda: client.health.heartbeat_age_s is not None)
        assert client._connection is not None
        assert zmq.Socket.shadow(client._connection._inbox).poll(_PATIENCE_MS), "nothing runs here until the worker has spoken"
        clock.skipped_s += 1.5 * LONG_HANG_LIMIT_S
        for _ in range(2):  # a worker that was killed may still have had time to answer once
            assert tokens_of(await collect(client, counting_request("a", 1, max_tokens=1))) == [2]
        assert client.health.num_restarts == 0


async def test_slow_event_loop_blames_no_request(clock: SkippingClock) -> None:
    await check_slow_event_loop_restarts_no_worker(worker_client(supervision=PATIENT), clock)


async def test_judging_before_reading_the_mail_is_noticed(clock: SkippingClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: a link that looks at the clock first and at its inbox afterwards."""
    receive = WorkerConnection._receive

    def hasty(self: WorkerConnection) -> None:
        self._kill_if_silent()
        receive(self)

    monkeypatch.setattr(WorkerConnection, "_receive", hasty)
    with pytest.raises((AssertionError, EngineUnavailable)):
        await check_slow_event_loop_restarts_no_worker(worker_client(supervision=PATIENT), clock)


async def test_failed_start_returns_the_worker_message() -> None:
    client = worker_client(build_without_weights, model="gone")
    with pytest.raises(EngineUnavailable, match=r"the engine's worker did not start: FileNotFoundError: no weights at 'gone'"):
        await client.start()
    assert client.health.state is EngineState.FAILED
    assert client.health.num_restarts == 0, "what never ran is not tried again"
    assert multiprocessing.active_children() == []
    with pytest.raises(EngineUnavailable, match="failed"):
        submitted(client, counting_request("a", 1))
    await client.stop()


async def test_repeated_failed_restarts_end_in_failed(tmp_path: Path) -> None:
    marker = tmp_path / "gone"
    client = worker_client(build_unless_marked, model=str(marker))
    async with running(client):
        stream = submitted(client, counting_request("a", Trick.PACE, max_tokens=ENDLESS))
        await anext(stream)
        marker.touch()
        signal_worker(signal.SIGKILL)
        await until(lambda: client.health.state is EngineState.FAILED)
        assert client.health.num_restarts == 3
        assert "FileNotFoundError" in client.health.detail
        end = end_of([event async for event in stream])
        assert (end.error_code, end.error) == (ErrorCode.ENGINE_FAILED, client.health.detail)


async def test_unlaunchable_worker_fails_the_start() -> None:
    class BrokenLauncher:
        def launch(self, addresses: Addresses) -> BaseProcess:
            raise OSError("no more processes")

    client = WorkerClient(BrokenLauncher(), SchedulerConfig())
    with pytest.raises(EngineUnavailable, match="no more processes"):
        await client.start()


async def test_silent_process_is_given_up() -> None:
    class MuteLauncher:
        def launch(self, addresses: Addresses) -> BaseProcess:
            process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(3600,), daemon=True)
            process.start()
            return process

    client = WorkerClient(MuteLauncher(), SchedulerConfig(), Supervision(first_heartbeat_limit_s=0.2))
    with pytest.raises(EngineUnavailable, match=r"it sent nothing for 0\.2 s after its launch"):
        await client.start()


async def test_the_served_engine_is_the_real_one() -> None:
    client = WorkerClient(ProcessLauncher(EngineConfig("/no/such/model"), served_engine), SchedulerConfig())
    with pytest.raises(EngineRefused, match=r"^'/no/such/model' is no model: "):
        await client.start()


FAULTS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}


class NotingClient(WorkerClient):
    """Records the notes about deaths."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.from_outside: list[bool] = []
        note = self._deaths.note

        def noting(ready_for_s: float | None, is_from_outside: bool = False) -> None:
            self.from_outside.append(is_from_outside)
            note(ready_for_s, is_from_outside)

        self._deaths.note = noting  # type: ignore[method-assign]


def noting_client(supervision: Supervision = LEISURELY) -> NotingClient:
    client = worker_client(supervision=supervision, kind=NotingClient)
    assert isinstance(client, NotingClient)
    return client


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
async def test_repeated_kills_lengthen_no_pause(number: signal.Signals) -> None:
    """The bug: each death within 30 s doubled the wait, also after a signal from outside. The wait here would be an hour."""
    client = noting_client()
    async with running(client):
        reader = asyncio.create_task(collect(client, counting_request("a", Trick.PACE, 10, max_tokens=300)))
        for restarts in (1, 2, 3):
            await until(lambda: all(not entry.num_deaths for entry in client._request_table.entries))
            signal_worker(number)
            await until_ready_again(client, restarts)
            assert client._deaths.backoff_s == 0.0
        assert tokens_of(await patiently(reader)) == list(range(11, 311))
    assert client.from_outside == [True] * 3


@pytest.mark.parametrize("number", sorted(FAULTS))
async def test_repeated_crashes_lengthen_the_pause(number: signal.Signals) -> None:
    client = noting_client(SWIFT)
    async with running(client):
        for restarts in (1, 2, 3):
            signal_worker(number)
            await until_ready_again(client, restarts)
    assert client.from_outside == [False] * 3
    assert client._deaths.backoff_s == 2 * SWIFT.min_backoff_s


async def test_kills_during_quarantine_lengthen_the_pause() -> None:
    """A request that has its worker killed, as by the memory killer, is a crash like any other once it is suspected."""
    client = noting_client(replace(SWIFT, max_deaths=2))
    async with running(client):
        events = await patiently(collect(client, counting_request("evil", Trick.KILL)))
        assert end_of(events).error_code is ErrorCode.WORKER_CRASHED
        await until(lambda: client.health.num_restarts == 3)
    assert client.from_outside == [True, False, True], "the last death ended it"


async def test_errors_and_hangs_have_internal_causes() -> None:
    client = noting_client(replace(SWIFT, max_deaths=5))
    async with running(client):
        stream = submitted(client, counting_request("evil", Trick.RAISE))
        await until(lambda: len(client.from_outside) >= 2)
        await stream.aclose()
    assert not any(client.from_outside[:2])


TEMPLATE = "engine.worker.messages"  # a module that is imported at once


def forking_client(factory: EngineFactory = build_counting, model: str = "counting", template: str = TEMPLATE) -> WorkerClient:
    return WorkerClient(ProcessLauncher(EngineConfig(model), factory, template), SchedulerConfig(), SWIFT)


def parent_of(pid: int | None) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("template", [TEMPLATE, "no.such.module"])
async def test_workers_are_forked_from_one_template(template: str) -> None:
    """So a worker that replaces a dead one has nothing to import. A template that cannot import its module forks all the same."""
    client = forking_client(template=template)
    async with running(client):
        pids, parents = {client.worker_pid}, {parent_of(client.worker_pid)}
        for restarts in (1, 2):
            assert client.worker_pid is not None
            os.kill(client.worker_pid, signal.SIGKILL)
            await until_ready_again(client, restarts)
            pids.add(client.worker_pid)
            parents.add(parent_of(client.worker_pid))
        assert len(pids) == 3
        assert len(parents) == 1
        assert parents != {os.getpid()}
        assert "killed by signal 9" in client.health.detail
        assert tokens_of(await collect(client, counting_request("a", 10, max_tokens=3))) == [11, 12, 13]


async def test_a_dead_template_is_replaced() -> None:
    """Its death ends the worker, whose exit status it would have reported; requests go on in one of a new template."""
    client = forking_client()
    async with running(client):
        worker, template = client.worker_pid, parent_of(client.worker_pid)
        stream = submitted(client, counting_request("a", Trick.PACE, 10, max_tokens=20))
        first = await anext(stream)
        os.kill(template, signal.SIGKILL)
        await until_ready_again(client)
        assert parent_of(client.worker_pid) not in {template, os.getpid()}
        assert tokens_of([first, *[event async for event in stream]]) == list(range(11, 31))
        await until(lambda: not Path(f"/proc/{worker}").exists())


async def test_no_template_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that refuses to start the template still gets its worker."""

    def refuse(module: str) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(engine.worker.process, "start_template", refuse)
    client = forking_client()
    async with running(client):
        assert parent_of(client.worker_pid) == os.getpid()


def test_a_template_ignores_the_terminals_interrupt(tmp_path: Path) -> None:
    """The bug: Ctrl-C while the template still imported ended it with a traceback."""
    (tmp_path / "slow_template.py").write_text("import time\ntime.sleep(0.5)\n")
    code = (
        "import os, signal, time; from multiprocessing import forkserver; from engine.worker.process import start_template;"
        "start_template('slow_template'); pid = forkserver._forkserver._forkserver_pid; os.kill(pid, signal.SIGINT);"
        "time.sleep(1.0); print(os.waitpid(pid, os.WNOHANG)[0])"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert (ran.stdout.strip(), ran.stderr) == ("0", "")


def build_and_note_restarts(config: EngineConfig) -> SteppedEngine:
    with Path(config.model).open("a") as notes:
        notes.write(f"{config.is_restart}\n")
    return build_counting(config)


@pytest.mark.parametrize("template", [None, TEMPLATE])
async def test_a_restarted_worker_knows_that_it_is(tmp_path: Path, template: str | None) -> None:
    notes = tmp_path / "notes"
    client = WorkerClient(ProcessLauncher(EngineConfig(str(notes)), build_and_note_restarts, template), SchedulerConfig(), SWIFT)
    async with running(client):
        for restarts in (1, 2):
            assert client.worker_pid is not None
            os.kill(client.worker_pid, signal.SIGKILL)
            await until_ready_again(client, restarts)
    assert notes.read_text().split() == ["False", "True", "True"]


def test_the_template_imports_what_the_engine_needs() -> None:
    """A forked worker has nothing of weight left to import. No device is touched, and transformers is not imported."""
    code = (
        "import sys, torch, server.worker_imports; from server.adaptive_engine import served_engine; before = set(sys.modules);"
        "from engine.build import build_served; from selector.build import adaptive_policy;"
        "print(set(sys.modules) - before, 'transformers' in sys.modules, torch.cuda.is_initialized())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["set()", "False", "False"]
