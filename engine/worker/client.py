"""The front end's side of the worker process: requests in, events out, a dead or hung worker replaced and its requests resumed.

Knows requests, the life of a worker and the event loop. Does not know models or HTTP, nor how a worker is made: a Launcher
does. Client and worker share nothing but the wire.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from engine.core.config import SchedulerConfig
from engine.core.service import EngineHealth, EngineState, EngineUnavailable
from engine.core.types import ErrorCode, ModelInfo, Request, StepStats
from engine.utils.run_folder import run_folder
from engine.worker.connection import Launcher, WorkerConnection, WorkerDied
from engine.worker.crash_dump import CrashDumps, Death
from engine.worker.messages import Abort, Add, Letter, Ready, Report, StepResult, encoded
from engine.worker.recovery import Recovery
from engine.worker.request_table import MAX_RETRY_S, EventStream, RequestTable, clamped_retry_s
from engine.worker.stats_listeners import Listener, Listeners
from engine.worker.step_log import StepNote
from engine.worker.supervision import DeathRecord, Supervision

_logger = logging.getLogger(__name__)


class WorkerClient:
    """An EngineService whose engine runs in another process. Started once, stopped once, used on one event loop.

    One task, the supervisor, owns the worker: it launches, listens, buries and launches again.

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
        self._readmission = Recovery(self._request_table, self._post_add, self._supervision.max_deaths, limits.max_running)
        self._listeners = Listeners()
        self._dumps = dumps
        self._last_stats: StepStats | None = None  # of the worker that lives
        self._deaths = DeathRecord(self._supervision)
        self._state = EngineState.STOPPED
        self._detail = ""
        self._model: ModelInfo | None = None
        self._link: WorkerConnection | None = None
        self._num_launches = 0
        self._launched_at = 0.0
        self._ready_at: float | None = None
        self._start_took_s = 0.0
        self._supervisor: asyncio.Task[None] | None = None
        self._is_settled = asyncio.Event()  # the first start succeeded or failed
        self._is_stopping = False  # nothing more is admitted
        self._is_over = asyncio.Event()  # nobody is left who waits for an end

    @property
    def model(self) -> ModelInfo:
        """The loaded models; raises EngineUnavailable before the engine is first ready."""
        if self._model is None:
            raise EngineUnavailable("the engine has not been ready yet")
        return self._model

    @property
    def health(self) -> EngineHealth:
        """Where the engine stands; `detail` tells of the last death, also after recovery."""
        age_s = self._link.heartbeat_age_s if self._link else None
        return EngineHealth(self._state, age_s, max(0, self._num_launches - 1), self._detail, self._readmission.num_resumed)

    @property
    def worker_pid(self) -> int | None:
        """The process that loads or runs the engine; None between two of them."""
        return self._link.pid if self._link else None

    async def start(self) -> None:
        """Launch the worker and return once it is ready; raise EngineUnavailable with its own words if it cannot be."""
        if self._supervisor is not None:
            raise RuntimeError("a WorkerClient is started once")
        self._state = EngineState.STARTING
        self._supervisor = asyncio.create_task(self._supervise(), name="worker-supervisor")
        await self._is_settled.wait()
        if self._state is not EngineState.READY:
            raise EngineUnavailable(self._detail or "the engine was stopped while it started", MAX_RETRY_S)

    async def stop(self, drain_s: float = 0.0) -> None:
        """Admit nothing more, drain for up to `drain_s`, end the rest with ABORT, end the worker.

        A worker that dies while it drains is replaced, like any other. May be called again while it drains: a second call with
        less patience forces the first.
        """
        self._is_stopping = True
        if self._supervisor is not None and not self._supervisor.done():
            self._state = EngineState.STOPPING
            await self._request_table.wait_empty(drain_s)
            self._is_over.set()
            self._request_table.abort_all()
            await self._end_worker(self._supervisor)
        self._state = EngineState.STOPPED

    async def _end_worker(self, supervisor: asyncio.Task[None]) -> None:
        """Let the worker leave by itself; kill it if it is still loading or does not leave in time."""
        if self._link is not None and self._ready_at is not None:
            self._link.dismiss()
            await asyncio.wait({supervisor}, timeout=self._supervision.stop_limit_s)
        if self._link is not None:
            self._link.kill("the engine was stopped")
        await supervisor

    def submit(self, requests: Sequence[Request]) -> list[EventStream]:
        """Queue the requests of one answer and return each one's events, the last with `finish`; closing one early aborts it.

        Raises EngineUnavailable, EngineBusy, or ValueError for an id that is in use; then nothing was queued.
        """
        self._require_ready()
        for request in requests:
            encoded(Add(request))  # what cannot be encoded is refused here and not when its turn comes
        self._request_table.make_room(requests)
        return self._readmission.enter(requests)

    def abort(self, request_id: str) -> None:
        """Ask that a request end; its iterator then gives a last event with ABORT. Unknown ids are ignored."""
        self._request_table.abort(request_id)

    def add_listener(self, listener: Listener) -> None:
        """Have `listener` called on the event loop with the numbers of each step."""
        self._listeners.add(listener)

    def _require_ready(self) -> None:
        if self._state is not EngineState.READY:
            raise EngineUnavailable(f"the engine is {self._state}: {self._detail}".rstrip(": "), self._retry_after_s)

    @property
    def _retry_after_s(self) -> float:
        """Seconds until a restart may be over, judging by the last start."""
        if self._state is not EngineState.RESTARTING:
            return MAX_RETRY_S
        return clamped_retry_s(self._deaths.backoff_s + self._start_took_s)

    def _post_add(self, request: Request) -> None:
        self._post(Add(request))

    def _post_abort(self, request_id: str) -> None:
        self._post(Abort(request_id))

    def _post(self, letter: Letter) -> None:
        assert self._link is not None  # who has a request that is posted lives, or is being buried
        self._link.post(encoded(letter))

    async def _supervise(self) -> None:
        """Keep a worker alive as long as somebody needs one, or until it is hopeless."""
        try:
            with run_folder() as folder:
                await self._live_and_die(folder)
                while self._is_needed and not self._deaths.is_hopeless:
                    await self._pause(self._deaths.backoff_s)
                    await self._live_and_die(folder)
        except Exception as error:
            _logger.exception("the supervisor fails")
            self._detail = f"the supervisor failed: {error!r}"
        finally:
            self._launcher.close()
            self._give_up()

    @property
    def _is_needed(self) -> bool:
        """Whether requests may come, or wait for an end that only a worker can bring."""
        return not self._is_over.is_set() and (not self._is_stopping or len(self._request_table) > 0)

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._is_over.wait(), seconds)
        except TimeoutError:
            return

    async def _live_and_die(self, folder: Path) -> None:
        """Run one worker to its end, and take back every request it leaves behind."""
        if not self._is_needed:
            return
        self._num_launches += 1
        self._launched_at, self._ready_at, self._last_stats = time.monotonic(), None, None
        link = self._link = WorkerConnection(self._launcher, folder, self._num_launches, self._supervision)
        try:
            async for report in link.reports():
                self._read(report)
        except WorkerDied as death:
            self._bury(death, link.last_note)
        finally:
            self._link = None
            link.close()

    def _read(self, report: Report) -> None:
        match report:
            case Ready(info):
                self._be_ready(info)
            case StepResult(events, stats):
                self._request_table.deliver(events)
                self._readmission.go_on()
                if stats is not None:
                    self._last_stats = stats
                    self._listeners.tell(stats)

    def _be_ready(self, info: ModelInfo) -> None:
        self._model = info
        self._ready_at = time.monotonic()
        self._start_took_s = self._ready_at - self._launched_at
        _logger.info("worker %d is ready after %.1f s", self._num_launches, self._start_took_s)
        if not self._is_stopping:
            self._state = EngineState.READY
        self._is_settled.set()
        self._readmission.begin()
        self._launcher.keep_spare()

    def _bury(self, death: WorkerDied, note: StepNote | None) -> None:
        if not self._is_needed:  # it left as it was told
            return
        if not self._is_stopping:
            self._state = EngineState.RESTARTING
        cause = str(death)
        served_s = None if self._ready_at is None else time.monotonic() - self._ready_at
        verb = "did not start" if self._ready_at is None else "died"
        self._detail = f"the engine's worker {verb}: {cause}"
        _logger.error("%s (worker %d, %d requests in flight)", self._detail, self._num_launches, len(self._request_table))
        if self._dumps is not None:
            self._dumps.write(Death(cause, self._num_launches, served_s, note, self._last_stats), self._request_table.entries)
        self._readmission.end(note.request_ids if note else None, cause)
        self._deaths.note(served_s, death.is_from_outside and not self._readmission.has_suspects)

    def _give_up(self) -> None:
        """Leave nobody waiting, neither for tokens nor for the start."""
        self._state = EngineState.STOPPED if self._is_stopping else EngineState.FAILED
        self._request_table.fail_all(ErrorCode.ENGINE_FAILED, self._detail)
        self._is_settled.set()
