"""An EngineService whose engine runs in a thread of this process: for tests and tools that need no second process.

Same loop, same ledger and same promises as the worker process and its client, but for one: a thread cannot be killed, so a
failed or hung engine is reported and not replaced.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from engine.core.config import SchedulerConfig
from engine.core.service import EngineHealth, EngineState, EngineUnavailable
from engine.core.types import ErrorCode, ModelInfo, Request
from engine.worker.engine_loop import SteppedEngine
from engine.worker.messages import Abort, Add, Failed, Letter, Ready, Report, Shutdown, StepResult
from engine.worker.process import MOST_LETTERS, Worker, described
from engine.worker.request_table import MAX_RETRY_S, EventStream, RequestTable
from engine.worker.stats_listeners import Listener, Listeners

_logger = logging.getLogger(__name__)

_STOP_LIMIT_S = 30.0


class InProcessEngine:
    """Started once, stopped once, used on one event loop. `build` is called in the thread that then turns the engine."""

    def __init__(self, build: Callable[[], SteppedEngine], limits: SchedulerConfig) -> None:
        self._build = build
        self._commands: queue.SimpleQueue[Letter] = queue.SimpleQueue()
        self._request_table = RequestTable(limits, lambda request_id: self._commands.put(Abort(request_id)))
        self._listeners = Listeners()
        self._state = EngineState.STOPPED
        self._detail = ""
        self._model: ModelInfo | None = None
        self._heard_at: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_settled = asyncio.Event()
        self._has_ended = asyncio.Event()

    @property
    def model(self) -> ModelInfo:
        """The loaded models; raises EngineUnavailable before the engine is first ready."""
        if self._model is None:
            raise EngineUnavailable("the engine has not been ready yet")
        return self._model

    @property
    def health(self) -> EngineHealth:
        """Where the engine stands."""
        age_s = None if self._heard_at is None else time.monotonic() - self._heard_at
        return EngineHealth(self._state, age_s, 0, self._detail)

    async def start(self) -> None:
        """Build the engine in its thread and return once it is ready; raise EngineUnavailable if it cannot be built."""
        if self._thread is not None:
            raise RuntimeError("an InProcessEngine is started once")
        self._state = EngineState.STARTING
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(self._loop,), name="engine", daemon=True)
        self._thread.start()
        await self._is_settled.wait()
        if self._state is not EngineState.READY:
            raise EngineUnavailable(self._detail or "the engine was stopped while it started", MAX_RETRY_S)

    async def stop(self, drain_s: float = 0.0) -> None:
        """Admit nothing more, drain for up to `drain_s`, end the rest with ABORT, end the thread after its step."""
        if self._thread is not None and self._state is not EngineState.STOPPED:
            self._state = EngineState.STOPPING
            await self._request_table.wait_empty(drain_s)
            self._request_table.abort_all()
            self._commands.put(Shutdown())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_ended.wait(), _STOP_LIMIT_S)
                self._thread.join()  # to say that it ends was its last act
        self._state = EngineState.STOPPED

    def submit(self, requests: Sequence[Request]) -> list[EventStream]:
        """Queue the requests of one answer and return each one's events, the last with `finish`; closing one early aborts it.

        Raises EngineUnavailable, EngineBusy, or ValueError for an id that is in use; then nothing was queued.
        """
        if self._state is not EngineState.READY:
            raise EngineUnavailable(f"the engine is {self._state}: {self._detail}".rstrip(": "), MAX_RETRY_S)
        self._request_table.make_room(requests)
        streams = self._request_table.open(requests)
        for request in requests:
            self._commands.put(Add(request))
        return streams

    def abort(self, request_id: str) -> None:
        """Ask that a request end; its iterator then gives a last event with ABORT. Unknown ids are ignored."""
        self._request_table.abort(request_id)

    def add_listener(self, listener: Listener) -> None:
        """Have `listener` called on the event loop with the numbers of each step."""
        self._listeners.add(listener)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Be the engine's thread."""

        def say(report: Report) -> None:
            loop.call_soon_threadsafe(self._hear, report)

        try:
            Worker(self._build(), self._read_commands, say).serve()
        except Exception as error:
            _logger.exception("the engine fails")
            say(Failed(described(error)))
        finally:
            loop.call_soon_threadsafe(self._has_ended.set)

    def _read_commands(self, wait_s: float) -> list[Letter]:
        commands: list[Letter] = []
        with suppress(queue.Empty):
            commands.append(self._commands.get(block=wait_s > 0, timeout=wait_s))
            while len(commands) < MOST_LETTERS:
                commands.append(self._commands.get_nowait())
        return commands

    def _hear(self, report: Report) -> None:
        """Act on a report; on the event loop."""
        self._heard_at = time.monotonic()
        match report:
            case Ready(info):
                self._model = info
                self._settle(EngineState.READY)
            case StepResult(events, stats):
                self._request_table.deliver(events)
                if stats is not None:
                    self._listeners.tell(stats)
            case Failed(error):
                self._detail = f"the engine failed: {error}"
                self._settle(EngineState.FAILED)
                self._request_table.fail_all(ErrorCode.ENGINE_FAILED, self._detail)

    def _settle(self, state: EngineState) -> None:
        if self._state is EngineState.STARTING or state is EngineState.FAILED:
            self._state = state
        self._is_settled.set()
