"""An EngineService whose engine runs in a thread of this process, for tests and tools.

It has the same loop, request table and guarantees as the worker process and its client, with one exception. A thread cannot be
killed, so a failed or hung engine is reported and not replaced.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from engine.core.config import SchedulerConfig
from engine.core.service import EngineHealth, EngineState, EngineUnavailable, loaded
from engine.core.types import ErrorCode, ModelInfo, Request, StepStats
from engine.worker.engine_loop import SteppedEngine
from engine.worker.listeners import Listeners, StatsListener
from engine.worker.messages import Abort, Add, Command, Failed, Ready, Shutdown, StepResult, WorkerEvent
from engine.worker.process import MAX_COMMANDS, Worker, describe_error
from engine.worker.request_table import MAX_RETRY_S, RequestTable, TokenEventStream

_logger = logging.getLogger(__name__)

_STOP_LIMIT_S = 30.0


class InProcessEngine:
    """Started once, stopped once, used on one event loop. `build` is called in the thread that then steps the engine."""

    def __init__(self, build: Callable[[], SteppedEngine], limits: SchedulerConfig) -> None:
        self._build = build
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._request_table = RequestTable(limits, lambda request_id: self._commands.put(Abort(request_id)))
        self._listeners: Listeners[StepStats] = Listeners()
        self._state = EngineState.STOPPED
        self._detail = ""
        self._model: ModelInfo | None = None
        self._last_event_at: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_start_over = asyncio.Event()
        self._has_ended = asyncio.Event()

    @property
    def model(self) -> ModelInfo:
        """The loaded models; raises EngineUnavailable before the engine is first ready."""
        return loaded(self._model)

    @property
    def health(self) -> EngineHealth:
        """The engine's state."""
        age_s = None if self._last_event_at is None else time.monotonic() - self._last_event_at
        return EngineHealth(self._state, age_s, 0, self._detail)

    async def start(self) -> None:
        """Build the engine in its thread and return once it is ready. Raises EngineUnavailable if the build fails."""
        if self._thread is not None:
            raise RuntimeError("an InProcessEngine is started once")
        self._state = EngineState.STARTING
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(self._loop,), name="engine", daemon=True)
        self._thread.start()
        await self._is_start_over.wait()
        if self._state is not EngineState.READY:
            raise EngineUnavailable(self._detail or "the engine was stopped while it started", MAX_RETRY_S)

    async def stop(self, drain_s: float = 0.0) -> None:
        """Admit no more requests, drain for up to `drain_s`, end the rest with ABORT, end the thread after its step."""
        if self._thread is not None and self._state is not EngineState.STOPPED:
            self._state = EngineState.STOPPING
            await self._request_table.wait_empty(drain_s)
            self._request_table.abort_all()
            self._commands.put(Shutdown())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_ended.wait(), _STOP_LIMIT_S)
                self._thread.join()
        self._state = EngineState.STOPPED

    def submit(self, requests: Sequence[Request]) -> list[TokenEventStream]:
        """Queue requests that belong together and return one event stream each. See EngineService.submit.

        Raises EngineUnavailable, EngineBusy, or ValueError for an id that is in use. Then no request was queued.
        """
        if self._state is not EngineState.READY:
            raise EngineUnavailable(f"the engine is {self._state}: {self._detail}".rstrip(": "), MAX_RETRY_S)
        self._request_table.make_room(requests)
        streams = self._request_table.open(requests)
        for request in requests:
            self._commands.put(Add(request))
        return streams

    def abort(self, request_id: str) -> None:
        """Abort a request. Its stream then yields a last event with ABORT. Unknown ids are ignored."""
        self._request_table.abort(request_id)

    def add_listener(self, listener: StatsListener) -> None:
        """Call `listener` on the event loop with the statistics of each step."""
        self._listeners.add(listener)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Build and step the engine; the thread's main function."""

        def send(events: Sequence[WorkerEvent]) -> None:
            for event in events:
                loop.call_soon_threadsafe(self._handle_event, event)

        try:
            Worker(self._build(), self._read_commands, send).serve()
        except Exception as error:
            _logger.exception("the engine failed")
            send([Failed(describe_error(error))])
        finally:
            loop.call_soon_threadsafe(self._has_ended.set)

    def _read_commands(self, wait_s: float) -> list[Command]:
        commands: list[Command] = []
        with suppress(queue.Empty):
            commands.append(self._commands.get(block=wait_s > 0, timeout=wait_s))
            while len(commands) < MAX_COMMANDS:
                commands.append(self._commands.get_nowait())
        return commands

    def _handle_event(self, event: WorkerEvent) -> None:
        """Handle an event of the engine's thread, on the event loop."""
        self._last_event_at = time.monotonic()
        match event:
            case Ready(info):
                self._model = info
                self._end_start(EngineState.READY)
            case StepResult(events, stats):
                self._request_table.deliver(events)
                if stats is not None:
                    self._listeners.notify(stats)
            case Failed(error):
                self._detail = f"the engine failed: {error}"
                self._end_start(EngineState.FAILED)
                self._request_table.fail_all(ErrorCode.ENGINE_FAILED, self._detail)

    def _end_start(self, state: EngineState) -> None:
        if self._state is EngineState.STARTING or state is EngineState.FAILED:
            self._state = state
        self._is_start_over.set()
