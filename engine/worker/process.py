"""The worker process: loads an engine, turns its loop, tells of every turn, and dies with its parent.

Knows the wire and one synchronous engine. Does not know who listens, nor why requests come and go. Importing this module
loads no model code: the client's process launches workers without paying for that.
"""

import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import zmq

from engine.core.config import EngineConfig
from engine.weights.errors import UnsupportedModel
from engine.worker.engine_loop import EngineFactory, EngineLoop, SteppedEngine
from engine.worker.messages import Addresses, Failed, Heartbeat, Letter, Ready, Report, Shutdown, decoded_command, encoded
from engine.worker.step_log import opened_black_box

_logger = logging.getLogger(__name__)

BEAT_S = 0.5
MOST_LETTERS = 256  # that are read before a step: some milliseconds
_LAST_WORDS_MS = 2000  # how long a dying worker tries to get its reports out
_MAX_ERROR_CHARS = 2000
_LOG_LINE = "%(asctime)s %(levelname)s worker[%(process)d] %(name)s: %(message)s"
_PROCESS_NAME, _SPARE_NAME = "latebranch-work", "latebranch-idle"  # the kernel keeps 15 characters

ReadLetters = Callable[[float], list[Letter]]  # MOST_LETTERS at most; waits for up to so many seconds if there is none
Say = Callable[[Report], None]  # must not wait for a reader


class Worker:
    """The loop: read letters, turn the engine once, tell of it.

    Each round says exactly one thing, a Turn or a Beat; so silence longer than BEAT_S means that a step is under way.
    """

    def __init__(self, engine: SteppedEngine, read: ReadLetters, say: Say) -> None:
        self._engine = engine
        self._engine_loop = EngineLoop(engine)
        self._read = read
        self._say = say

    def serve(self) -> None:
        """Say Ready, then turn until a Shutdown letter; raise what the engine raises, and IntegrityError."""
        self._say(Ready(self._engine.info))
        while self._take_commands():
            turn = self._engine_loop.turn()
            self._say(turn or Heartbeat())
            if turn is not None:
                _logger.debug("%d events, %s", len(turn.events), turn.stats)
                if not self._engine_loop.has_work:
                    self._engine_loop.check_idle()

    def _take_commands(self) -> bool:
        """Take the letters that are there, waiting for one if there is no work; return False after a Shutdown."""
        for letter in self._read(0.0 if self._engine_loop.has_work else BEAT_S):
            if isinstance(letter, Shutdown):
                return False
            self._engine_loop.take(letter)
        return True


def described(error: Exception) -> str:
    """Return an error's kind and text, cut to a length that fits an answer."""
    return f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]


class ProcessLauncher:
    """Starts worker processes for one configuration. `factory` must be a module-level function: the child imports it.

    With `preload`, such a function too, a spare process runs it ahead of the next launch: importing models takes longer than
    loading small ones. The spare has no weights and no device. `configure_logging` is such a function too, or a `partial` of
    one; without it a worker logs plain lines.
    """

    def __init__(
        self,
        config: EngineConfig,
        factory: EngineFactory,
        preload: Callable[[], None] | None = None,
        configure_logging: Callable[[], None] | None = None,
    ) -> None:
        self._config = config
        self._factory = factory
        level = logging.getLogger().getEffectiveLevel()
        plain_lines = partial(logging.basicConfig, level=level, format=_LOG_LINE)
        self._configure_logging = configure_logging or plain_lines
        self._preload = preload
        self._spare: _Idle | None = None

    def launch(self, addresses: Addresses) -> BaseProcess:
        """Return a worker process, the spare or a new one, that will read letters from and send reports to `addresses`."""
        order = _Order(self._config, self._factory, addresses)
        self._config = replace(self._config, is_restart=True)
        return self._spare_with(order) or _started(None, self._configure_logging).given(order)

    def _spare_with(self, order: "_Order") -> BaseProcess | None:
        """Return the spare process with its order; None without one, or if it is dead."""
        spare, self._spare = self._spare, None
        try:
            return None if spare is None else spare.given(order)
        except OSError:
            _logger.warning("the spare process is dead; a new one is started")
            return None

    def keep_spare(self) -> None:
        """Start a spare process unless there is one or there is nothing to preload."""
        if self._preload is not None and self._spare is None:
            self._spare = _started(self._preload, self._configure_logging)

    def close(self) -> None:
        """End the spare process."""
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.orders.close()
            spare.process.kill()
            spare.process.join()


@dataclass(frozen=True, slots=True)
class _Order:
    """What makes a worker of an idle process."""

    config: EngineConfig
    factory: EngineFactory
    addresses: Addresses


@dataclass(frozen=True, slots=True)
class _Idle:
    """A process that waits for its order."""

    process: BaseProcess
    orders: Connection

    def given(self, order: _Order) -> BaseProcess:
        """Send the order and return the process; raise OSError if it is dead."""
        with self.orders:
            self.orders.send(order)
        return self.process


def _started(preload: Callable[[], None] | None, configure_logging: Callable[[], None]) -> _Idle:
    context = multiprocessing.get_context("spawn")
    theirs, ours = context.Pipe(duplex=False)
    # daemon: ends with a parent that exits in order; a parent that is killed is noticed by the worker itself.
    process = context.Process(
        target=_worker_main, args=(theirs, preload, configure_logging), name="latebranch-worker", daemon=True
    )
    process.start()
    theirs.close()  # so that a send to a dead process fails
    return _Idle(process, ours)


def _worker_main(orders: Connection, preload: Callable[[], None] | None, configure_logging: Callable[[], None]) -> None:
    """Wait for the order, run a worker from its first word to its last; exit with status 1 if it failed."""
    _settle_process(configure_logging)
    if preload is not None:
        _name_process(_SPARE_NAME)
        preload()
        gc.collect()
        gc.freeze()
    with orders:
        order = orders.recv()
    _name_process(_PROCESS_NAME)
    with _streets(order.addresses) as (inbox, outbox):

        def say(report: Report) -> None:
            outbox.send(encoded(report))

        try:
            with _beating(say):
                engine = order.factory(order.config)
            gc.collect()
            gc.freeze()  # what is there now stays: collections in the midst of a stream need not go through it
            with opened_black_box(Path(order.addresses.step_log)) as step_log:
                engine.announce(step_log.note)
                Worker(engine, partial(_read_commands, inbox), say).serve()
        except Exception as error:
            _logger.error("the worker fails: %s", error, exc_info=not isinstance(error, UnsupportedModel))
            say(Failed(described(error)))
            sys.exit(1)


def _settle_process(configure_logging: Callable[[], None]) -> None:
    """Make the process deaf to Ctrl-C, mortal under SIGTERM and an orphan never."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal tells the whole group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=die_with_parent, name="die-with-parent", daemon=True).start()
    configure_logging()


def _name_process(name: str) -> None:
    with suppress(OSError):  # only Linux has it
        Path("/proc/self/comm").write_text(name)


def die_with_parent() -> None:
    """Wait for the parent's end, then end at once, even in the middle of a step or of loading."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _streets(addresses: Addresses) -> "Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]":
    """Open the inbox and the outbox; on leaving, give unsent reports a moment to get out."""
    with zmq.Context() as context, context.socket(zmq.PULL) as inbox, context.socket(zmq.PUSH) as outbox:
        # Letters are bounded by the client's queue, reports by max_tokens; a full buffer must never stop the loop.
        inbox.set_hwm(0)
        outbox.set_hwm(0)
        outbox.linger = _LAST_WORDS_MS
        inbox.bind(addresses.commands)
        outbox.connect(addresses.reports)
        yield inbox, outbox


def _read_commands(inbox: "zmq.Socket[bytes]", wait_s: float) -> list[Letter]:
    commands: list[Letter] = []
    inbox.poll(int(wait_s * 1000))
    while len(commands) < MOST_LETTERS and inbox.poll(0):
        commands.append(decoded_command(inbox.recv()))
    return commands


@contextmanager
def _beating(say: Say) -> Iterator[None]:
    """Beat from a thread while the caller loads models.

    The thread is gone when the block is left: afterwards only the loop beats, so that a hung step falls silent.
    """
    is_over = threading.Event()

    def beat() -> None:
        say(Heartbeat())
        while not is_over.wait(BEAT_S):
            say(Heartbeat())

    thread = threading.Thread(target=beat, name="beat-while-loading")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()  # also the memory barrier that ZeroMQ asks for when a socket changes threads
