"""The front end's side of the worker process: sends requests, delivers events, replaces a dead or hung worker.

Knows requests, the life cycle of a worker and the event loop. Does not know models or HTTP. A Launcher starts the worker
processes. Client and worker share nothing but messages.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.core.cache_events import AllBlocksCleared, CacheEvent
from engine.core.config import SchedulerConfig
from engine.core.service import EngineHealth, EngineRefused, EngineState, EngineUnavailable, loaded
from engine.core.types import ErrorCode, ModelInfo, Request, StepStats
from engine.utils.run_folder import run_folder
from engine.worker.connection import Launcher, WorkerConnection, WorkerDied
from engine.worker.crash_dump import CrashDumps, WorkerDeath
from engine.worker.listeners import Listeners, StatsListener
from engine.worker.messages import Abort, Add, Command, Ready, StepResult, WorkerEvent, encode_message
from engine.worker.recovery import Recovery
from engine.worker.request_table import MAX_RETRY_S, RequestTable, TokenEventStream, clamped_retry_s
from engine.worker.restart_limits import DeathRecord, Supervision
from engine.worker.step_log import StepNote

_logger = logging.getLogger(__name__)


class WorkerClient:
    """An EngineService whose engine runs in another process. Started once, stopped once, used on one event loop.

    One task, the supervisor, owns the worker: it launches it, reads its events and launches the next after a death.

        STOPPED -start-> STARTING -> READY -death-> RESTARTING -> READY ...
                            |                           |
                            +-----------> FAILED <------+             from anywhere: STOPPING -> STOPPED
    """

    def __init__(
        self,
        launcher: Launcher,
        limits: SchedulerConfig,
        supervision: Supervision | None = None,
        dumps: CrashDumps | None = None,
    ) -> None:
        self._launcher = launcher
        self._supervision = supervision or Supervision()
        self._request_table = RequestTable(limits, self._post_abort)
        self._recovery = Recovery(self._request_table, self._post_add, self._supervision.max_deaths, limits.max_running)
        self._listeners: Listeners[StepStats] = Listeners()
        self._cache_listeners: Listeners[Sequence[CacheEvent]] = Listeners()
        self._dumps = dumps
        self._last_stats: StepStats | None = None  # of the current worker
        self._deaths = DeathRecord(self._supervision)
        self._state = EngineState.STOPPED
        self._detail = ""
        self._refusal: str | None = None  # why no worker can run this configuration
        self._model: ModelInfo | None = None
        self._connection: WorkerConnection | None = None
        self._num_launches = 0
        self._launched_at = 0.0
        self._ready_at: float | None = None
        self._start_took_s = 0.0
        self._supervisor: asyncio.Task[None] | None = None
        self._is_start_over = asyncio.Event()  # the first start succeeded or failed
        self._is_stopping = False  # no more requests are admitted
        self._is_drain_over = asyncio.Event()

    @property
    def model(self) -> ModelInfo:
        """The loaded models; raises EngineUnavailable before the engine is first ready."""
        return loaded(self._model)

    @property
    def health(self) -> EngineHealth:
        """The engine's state. `detail` describes the last death, also after recovery."""
        age_s = self._connection.heartbeat_age_s if self._connection else None
        return EngineHealth(self._state, age_s, max(0, self._num_launches - 1), self._detail, self._recovery.num_resumed)

    @property
    def worker_pid(self) -> int | None:
        """The id of the process that loads or runs the engine; None between two workers."""
        return self._connection.pid if self._connection else None

    async def start(self) -> None:
        """Launch the worker and return once it is ready. Raises EngineUnavailable with the worker's error if it fails.

        Raises EngineRefused if the configuration cannot be served.
        """
        if self._supervisor is not None:
            raise RuntimeError("a WorkerClient is started once")
        self._state = EngineState.STARTING
        self._supervisor = asyncio.create_task(self._supervise(), name="worker-supervisor")
        await self._is_start_over.wait()
        if self._refusal is not None:
            raise EngineRefused(self._refusal)
        if self._state is not EngineState.READY:
            raise EngineUnavailable(self._detail or "the engine was stopped while it started", MAX_RETRY_S)

    async def stop(self, drain_s: float = 0.0) -> None:
        """Admit no more requests, drain for up to `drain_s`, end the rest with ABORT, end the worker.

        A worker that dies during the drain is replaced. A second call with a shorter `drain_s` ends the drain earlier.
        """
        self._is_stopping = True
        if self._supervisor is not None and not self._supervisor.done():
            self._state = EngineState.STOPPING
            await self._request_table.wait_empty(drain_s)
            self._is_drain_over.set()
            self._request_table.abort_all()
            await self._end_worker(self._supervisor)
        self._state = EngineState.STOPPED

    async def _end_worker(self, supervisor: asyncio.Task[None]) -> None:
        """Request a shutdown. Kill the worker if it is still loading or does not exit in time."""
        if self._connection is not None and self._ready_at is not None:
            self._connection.request_shutdown()
            await asyncio.wait({supervisor}, timeout=self._supervision.stop_limit_s)
        if self._connection is not None:
            self._connection.kill("the engine was stopped")
        await supervisor

    def submit(self, requests: Sequence[Request]) -> list[TokenEventStream]:
        """Queue requests that belong together and return one event stream each. See EngineService.submit.

        Raises EngineUnavailable, EngineBusy, or ValueError for an id that is in use. Then no request was queued.
        """
        self._require_ready()
        for request in requests:
            encode_message(Add(request))  # fails here, not later, if the request cannot be encoded
        self._request_table.make_room(requests)
        return self._recovery.submit(requests)

    def abort(self, request_id: str) -> None:
        """Abort a request. Its stream then yields a last event with ABORT. Unknown ids are ignored."""
        self._request_table.abort(request_id)

    def add_listener(self, listener: StatsListener) -> None:
        """Call `listener` on the event loop with the statistics of each step."""
        self._listeners.add(listener)

    def add_cache_listener(self, listener: Callable[[Sequence[CacheEvent]], None]) -> None:
        """Call `listener` on the event loop with the changes of the prefix cache, which the end of a worker empties."""
        self._cache_listeners.add(listener)

    def _require_ready(self) -> None:
        if self._state is not EngineState.READY:
            raise EngineUnavailable(f"the engine is {self._state}: {self._detail}".rstrip(": "), self._retry_after_s)

    @property
    def _retry_after_s(self) -> float:
        """Estimated seconds until the restart is over, from the duration of the last start."""
        if self._state is not EngineState.RESTARTING:
            return MAX_RETRY_S
        return clamped_retry_s(self._deaths.backoff_s + self._start_took_s)

    def _post_add(self, request: Request) -> None:
        self._post(Add(request))

    def _post_abort(self, request_id: str) -> None:
        self._post(Abort(request_id))

    def _post(self, command: Command) -> None:
        assert self._connection is not None  # requests are posted only between launch and death
        self._connection.post(encode_message(command))

    async def _supervise(self) -> None:
        """Run one worker after another until none is needed or restarts are hopeless."""
        try:
            with run_folder() as folder:
                await self._run_worker(folder)
                while self._is_needed and not self._deaths.is_hopeless:
                    await self._pause(self._deaths.backoff_s)
                    await self._run_worker(folder)
        except Exception as error:
            _logger.exception("the supervisor failed")
            self._detail = f"the supervisor failed: {error!r}"
        finally:
            self._finish()

    @property
    def _is_needed(self) -> bool:
        """Whether new requests may arrive, or live requests need a worker."""
        return not self._is_drain_over.is_set() and (not self._is_stopping or len(self._request_table) > 0)

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._is_drain_over.wait(), seconds)
        except TimeoutError:
            return

    async def _run_worker(self, folder: Path) -> None:
        """Run one worker to its end and requeue its live requests."""
        if not self._is_needed:
            return
        self._num_launches += 1
        self._launched_at, self._ready_at, self._last_stats = time.monotonic(), None, None
        link = self._connection = WorkerConnection(self._launcher, folder, self._num_launches, self._supervision)
        try:
            await link.launch()
            async for event in link.events():
                self._handle_event(event)
        except WorkerDied as death:
            self._handle_death(death, link.last_note)
        finally:
            self._connection = None
            link.close()
            self._cache_listeners.notify((AllBlocksCleared(),))

    def _handle_event(self, event: WorkerEvent) -> None:
        match event:
            case Ready(info):
                self._handle_ready(info)
            case StepResult(events, stats, cache_events):
                if cache_events:
                    self._cache_listeners.notify(cache_events)
                self._request_table.deliver(events)
                self._recovery.on_events()
                if stats is not None:
                    self._last_stats = stats
                    self._listeners.notify(stats)

    def _handle_ready(self, info: ModelInfo) -> None:
        self._model = info
        self._ready_at = time.monotonic()
        self._start_took_s = self._ready_at - self._launched_at
        _logger.info("worker %d is ready after %.1f s", self._num_launches, self._start_took_s)
        if not self._is_stopping:
            self._state = EngineState.READY
        self._is_start_over.set()
        self._recovery.on_ready()

    def _handle_death(self, death: WorkerDied, note: StepNote | None) -> None:
        if not self._is_needed:  # the worker exited on request
            return
        if not self._is_stopping:
            self._state = EngineState.RESTARTING
        cause = str(death)
        served_s = None if self._ready_at is None else time.monotonic() - self._ready_at
        verb = "did not start" if self._ready_at is None else "died"
        self._detail = f"the engine's worker {verb}: {cause}"
        if death.is_refusal:
            self._refusal = cause
        level = logging.DEBUG if death.is_refusal else logging.ERROR
        _logger.log(level, "%s (worker %d, %d requests in flight)", self._detail, self._num_launches, len(self._request_table))
        if self._dumps is not None:
            self._dumps.write(
                WorkerDeath(cause, self._num_launches, served_s, note, self._last_stats), self._request_table.entries
            )
        self._recovery.on_death(note.request_ids if note else None, cause)
        self._deaths.note(served_s, death.is_from_outside and not self._recovery.has_quarantined)

    def _finish(self) -> None:
        """End every live request and release a waiting `start`."""
        self._state = EngineState.STOPPED if self._is_stopping else EngineState.FAILED
        self._request_table.fail_all(ErrorCode.ENGINE_FAILED, self._detail)
        self._is_start_over.set()
