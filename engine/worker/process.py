"""The worker process: loads an engine, runs its loop, sends events and exits with its parent.

Knows messages and one synchronous engine. Does not know the client. Importing this module loads no model code, since the
client's process imports it to launch workers.
"""

import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import zmq

from engine.core.config import EngineConfig
from engine.core.refusal import Refusal
from engine.utils.free_memory import return_free_memory
from engine.utils.process_name import name_process
from engine.utils.progress_bar import long_work
from engine.worker.delayed_results import joined_results
from engine.worker.engine_loop import EngineFactory, EngineLoop, SteppedEngine
from engine.worker.fork_template import start_template
from engine.worker.messages import (
    Addresses,
    Command,
    Failed,
    Heartbeat,
    Ready,
    Shutdown,
    StepResult,
    WorkerEvent,
    decode_command,
    encode_message,
)
from engine.worker.step_log import open_step_log

_logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
DELAY_S = 0.25  # of results that are not urgent; below HEARTBEAT_S
MAX_COMMANDS = 256  # read before one step, which bounds the delay of the step
_LINGER_MS = 2000  # how long a failed worker waits for its events to be sent
_MAX_ERROR_CHARS = 2000
_LOG_LINE = "%(asctime)s %(levelname)s worker[%(process)d] %(name)s: %(message)s"
_PROCESS_NAME = "latebranch-work"

ReadCommands = Callable[[float], list[Command]]  # at most MAX_COMMANDS; waits up to the given seconds for the first
SendEvents = Callable[[Sequence[WorkerEvent]], None]  # must not block


class Worker:
    """The worker's loop: read commands, step the engine once, send the result.

    Each iteration has one event, a StepResult or a Heartbeat. Results that are not urgent are sent together, after the first step
    that ends DELAY_S or more after the last message: the front end is woken once, which leaves the processor to the engine.
    Silence longer than HEARTBEAT_S means that a step runs.
    """

    def __init__(
        self, engine: SteppedEngine, read: ReadCommands, send: SendEvents, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._engine_loop = EngineLoop(engine)
        self._read = read
        self._send = send
        self._clock = clock
        self._delayed: list[tuple[float, StepResult]] = []  # with the times of their steps
        self._sent_s = clock()

    def serve(self) -> None:
        """Send Ready, then loop until a Shutdown. Raises the engine's errors and IntegrityError."""
        self._send([Ready(self._engine.info)])
        try:
            while self._handle_commands():
                self._step()
        finally:
            self._send_results()

    def _step(self) -> None:
        """Step the engine once. Send a heartbeat if it has no work, else its result, now or later."""
        result = self._engine_loop.step()
        if result is None:
            self._send_results()
            self._send([Heartbeat()])
            return
        _logger.debug("%d events, %s", len(result.events), result.stats)
        self._delayed.append((now_s := self._clock(), result))
        if self._engine_loop.is_urgent or now_s - self._sent_s >= DELAY_S:
            self._send_results()
        if not self._engine_loop.has_work:
            self._engine_loop.check_idle()

    def _send_results(self) -> None:
        """Send the results that have not been sent."""
        results, self._delayed, self._sent_s = self._delayed, [], self._clock()
        if results:
            self._send(joined_results(results, self._sent_s))

    def _handle_commands(self) -> bool:
        """Handle pending commands, waiting for one if the engine is idle. Return False after a Shutdown."""
        for command in self._read(0.0 if self._engine_loop.has_work else HEARTBEAT_S):
            if isinstance(command, Shutdown):
                return False
            self._engine_loop.handle(command)
        return True


def describe_error(error: Exception) -> str:
    """Return the type and text of an error, cut to _MAX_ERROR_CHARS."""
    return f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]


class ProcessLauncher:
    """Starts worker processes for one configuration. `factory` must be a module-level function: the child imports it.

    With `template`, the name of a module, workers are forked from a process that has imported it. That makes a launch fast, and
    the processes share the memory of imported modules. The template has no weights, no device and no threads of its own. It is
    multiprocessing's fork server: one for the whole program, started again if it dies. `configure_logging` is a module-level
    function too, or a `partial` of one; without it a worker logs plain lines.
    """

    def __init__(
        self,
        config: EngineConfig,
        factory: EngineFactory,
        template: str | None = None,
        configure_logging: Callable[[], None] | None = None,
    ) -> None:
        self._config = config
        self._factory = factory
        level = logging.getLogger().getEffectiveLevel()
        plain_lines = partial(logging.basicConfig, level=level, format=_LOG_LINE)
        self._configure_logging = configure_logging or plain_lines
        self._template = template

    def launch(self, addresses: Addresses) -> BaseProcess:
        """Return a worker process that uses `addresses`. Waits until the template has imported its module."""
        spec = _WorkerSpec(self._config, self._factory, addresses, self._configure_logging)
        self._config = replace(self._config, is_restart=True)
        if self._template is not None:
            try:
                start_template(self._template)
                return _started("forkserver", spec)
            except (EOFError, OSError) as error:
                _logger.warning("no worker can be forked (%s); one is started without the template", error)
        return _started("spawn", spec)


@dataclass(frozen=True, slots=True)
class _WorkerSpec:
    """All that a process needs to become a worker."""

    config: EngineConfig
    factory: EngineFactory
    addresses: Addresses
    configure_logging: Callable[[], None]


def _started(method: str, spec: _WorkerSpec) -> BaseProcess:
    # A daemon process ends when its parent exits regularly. `die_with_parent` handles a parent that is killed.
    process: BaseProcess = multiprocessing.get_context(method).Process(  # type: ignore[attr-defined]
        target=_worker_main, args=(spec,), name="latebranch-worker", daemon=True
    )
    process.start()
    return process


def _worker_main(spec: _WorkerSpec) -> None:
    """Run a worker. Exit with status 1 if it failed."""
    _configure_process(spec.configure_logging)
    name_process(_PROCESS_NAME)
    with _open_sockets(spec.addresses) as (inbox, outbox):

        def send(events: Sequence[WorkerEvent]) -> None:
            outbox.send_multipart([encode_message(event) for event in events])

        try:
            with _sending_heartbeats(send), long_work(f"loading {spec.config.model}", is_announced=False):
                engine = spec.factory(spec.config)
            gc.collect()
            gc.freeze()  # loaded objects stay alive, so later collections can skip them
            return_free_memory()
            with open_step_log(Path(spec.addresses.step_log)) as step_log:
                engine.add_step_listener(step_log.note)
                Worker(engine, partial(_read_commands, inbox), send).serve()
        except Exception as error:
            is_refusal = isinstance(error, Refusal)
            if not is_refusal:  # the front end reports it
                _logger.exception("the worker failed")
            send([Failed(str(error)[:_MAX_ERROR_CHARS] if is_refusal else describe_error(error), is_refusal)])
            sys.exit(1)


def _configure_process(configure_logging: Callable[[], None]) -> None:
    """Ignore SIGINT, end on SIGTERM, end with the parent, log to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the whole group; the parent handles it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=die_with_parent, name="die-with-parent", daemon=True).start()
    configure_logging()


def die_with_parent() -> None:
    """Wait until the parent ends, then exit at once, even in the middle of a step or of loading."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _open_sockets(addresses: Addresses) -> "Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]":
    """Open the inbox and the outbox. On exit, wait up to _LINGER_MS for unsent events."""
    with zmq.Context() as context, context.socket(zmq.PULL) as inbox, context.socket(zmq.PUSH) as outbox:
        # No high-water marks: a full buffer must never block the loop. The queue limit bounds commands, max_tokens bounds events.
        inbox.set_hwm(0)
        outbox.set_hwm(0)
        outbox.linger = _LINGER_MS
        inbox.bind(addresses.commands)
        outbox.connect(addresses.events)
        yield inbox, outbox


def _read_commands(inbox: "zmq.Socket[bytes]", wait_s: float) -> list[Command]:
    commands: list[Command] = []
    inbox.poll(int(wait_s * 1000))
    while len(commands) < MAX_COMMANDS and inbox.poll(0):
        commands.append(decode_command(inbox.recv()))
    return commands


@contextmanager
def _sending_heartbeats(send: SendEvents) -> Iterator[None]:
    """Send heartbeats from a thread while the caller loads models.

    The thread ends with the block. Afterwards only the loop sends heartbeats, so that a hung step is silent.
    """
    is_over = threading.Event()

    def send_heartbeats() -> None:
        send([Heartbeat()])
        while not is_over.wait(HEARTBEAT_S):
            send([Heartbeat()])

    thread = threading.Thread(target=send_heartbeats, name="heartbeat-while-loading")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()  # also the memory barrier that ZeroMQ requires when a socket changes threads
