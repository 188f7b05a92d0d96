"""Engine services over the counting engine, for tests: begun, used, ended, and proved to have left nothing behind."""

import asyncio
import multiprocessing
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from engine.core.config import EngineConfig, SchedulerConfig
from engine.core.service import EngineService, EngineState
from engine.core.types import Request, TokenEvent
from engine.worker.client import WorkerClient
from engine.worker.crash_dump import CrashDumps
from engine.worker.engine_loop import EngineFactory
from engine.worker.inprocess import InProcessEngine
from engine.worker.process import ProcessLauncher
from engine.worker.request_table import TokenEventStream
from engine.worker.restart_limits import Supervision
from tests.counting_engine import build_counting

# A busy machine may take minutes to start a process.
SWIFT = Supervision(first_heartbeat_limit_s=600.0, min_backoff_s=0.05, max_backoff_s=0.2)
_PATIENCE_S = 120.0

T = TypeVar("T")


def worker_client(
    factory: EngineFactory = build_counting,
    model: str = "counting",
    scheduler: SchedulerConfig | None = None,
    supervision: Supervision = SWIFT,
    kind: type[WorkerClient] = WorkerClient,
    dumps: CrashDumps | None = None,
) -> WorkerClient:
    """Return a client, not started, of a worker that will count."""
    config = EngineConfig(model, scheduler=scheduler or SchedulerConfig())
    return kind(ProcessLauncher(config, factory), config.scheduler, supervision, dumps)


@asynccontextmanager
async def running(service: EngineService) -> AsyncIterator[None]:
    """Start and stop a service; afterwards no process, task, thread or folder of it may be left."""
    threads = set(threading.enumerate())
    tasks = asyncio.all_tasks()
    await service.start()
    try:
        yield
    finally:
        await service.stop()
    assert service.health.state is EngineState.STOPPED
    assert multiprocessing.active_children() == []
    assert asyncio.all_tasks() - tasks == set()
    assert set(threading.enumerate()) - threads == set()
    assert list(Path(tempfile.gettempdir()).glob("latebranch-*")) == []  # noqa: ASYNC240


def submitted(service: WorkerClient | InProcessEngine, request: Request) -> TokenEventStream:
    """Return the remaining events of a request that has no siblings."""
    (stream,) = service.submit([request])
    return stream


async def collect(service: WorkerClient | InProcessEngine, request: Request) -> list[TokenEvent]:
    """Return all events of a request."""
    return [event async for event in submitted(service, request)]


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [token_id for event in events for token_id in event.token_ids]


def end_of(events: list[TokenEvent]) -> TokenEvent:
    """Return the one event with `finish`, which must be the last."""
    finishes = [event.finish for event in events]
    assert [finish for finish in finishes if finish is not None] == finishes[-1:], finishes
    return events[-1]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that will come."""
    async with asyncio.timeout(_PATIENCE_S):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event to wait on)
            await asyncio.sleep(0.01)


async def patiently(work: Awaitable[T]) -> T:
    """Await what should come soon, but on a busy machine may take its time."""
    return await asyncio.wait_for(work, _PATIENCE_S)
