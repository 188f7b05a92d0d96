"""One worker process and the two sockets to it, from launch to death.

Receives the worker's events, detects its death or silence and describes the cause. Does not know requests. A connection is
never reused, so events of an earlier worker cannot reach requests of a later one.
"""

import asyncio
import logging
import shutil
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

import zmq

from engine.utils.daemon_thread import in_daemon_thread
from engine.worker.messages import Addresses, Failed, Shutdown, WorkerEvent, decode_event, encode_message
from engine.worker.restart_limits import Supervision
from engine.worker.step_log import StepNote, last_note

_logger = logging.getLogger(__name__)

_CHECK_S = 0.25
_LINGER_S = 0.2
_REAP_S = 5.0
_FAULTS = frozenset(
    [signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP]
)  # signals that a process causes itself


class WorkerDied(Exception):
    """The worker is dead. The text completes a sentence that starts with "the worker".

    `is_from_outside`: it was killed by another process, or by the kernel for lack of memory. `is_refusal`: its
    configuration cannot be served, and the text is the reason.
    """

    def __init__(self, text: str, is_from_outside: bool = False, is_refusal: bool = False) -> None:
        super().__init__(text)
        self.is_from_outside, self.is_refusal = is_from_outside, is_refusal


class Launcher(Protocol):
    """Starts workers."""

    def launch(self, addresses: Addresses) -> BaseProcess:
        """Return a started process that reads commands from and sends events to `addresses`. It may take seconds."""
        ...


class WorkerConnection:
    """Owns one worker process, its sockets and their folder, which is created in `parent`."""

    def __init__(self, launcher: Launcher, parent: Path, number: int, limits: Supervision) -> None:
        self._limits = limits
        self._folder = parent / str(number)
        self._folder.mkdir()
        self._step_log_path = self._folder / "steps"
        self._addresses = Addresses(f"ipc://{self._folder}/commands", f"ipc://{self._folder}/events", str(self._step_log_path))
        self._launcher, self._number = launcher, number
        self._launched_at = time.monotonic()
        self._process: BaseProcess | None = None
        self._last_event_at: float | None = None
        self._cause: str | None = None
        self._is_refusal = False
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()  # messages, or the end of the process
        self._messages: list[bytes] = []  # received, not decoded
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = self._context.socket(zmq.PUSH)
        try:
            self._open_sockets()
        except BaseException:
            self._close_sockets()
            raise

    async def launch(self) -> None:
        """Launch the worker, off the event loop. Raises the errors of the launcher."""
        self._process = await in_daemon_thread(lambda: self._launcher.launch(self._addresses), "worker-launcher")
        self._launched_at = time.monotonic()
        _logger.info("worker %d launched as process %s", self._number, self._process.pid)
        if self._cause is not None:
            self._process.kill()

    def _open_sockets(self) -> None:
        # No high-water marks: neither side may block. The queue limit bounds commands, max_tokens bounds events.
        self._inbox.set_hwm(0)
        self._outbox.set_hwm(0)
        self._inbox.bind(self._addresses.events)
        self._outbox.connect(self._addresses.commands)  # buffers commands until the worker has bound its end
        # Not zmq.asyncio: it has a future and several callbacks for each message.
        self._loop.add_reader(self._inbox.FD, self._receive)

    def _close_sockets(self) -> None:
        self._loop.remove_reader(self._inbox.FD)
        self._inbox.close(linger=0)
        self._outbox.close(linger=0)
        self._context.term()

    @property
    def heartbeat_age_s(self) -> float | None:
        """Seconds since the worker's last event; None before the first."""
        return None if self._last_event_at is None else time.monotonic() - self._last_event_at

    @property
    def pid(self) -> int | None:
        """The id of the process."""
        return None if self._process is None else self._process.pid

    @property
    def last_note(self) -> StepNote | None:
        """The last step that the worker began, None if unknown. Valid once the worker is dead."""
        return last_note(self._step_log_path)

    def post(self, data: bytes) -> None:
        """Send an encoded command without waiting."""
        self._outbox.send(data, zmq.NOBLOCK)

    def request_shutdown(self) -> None:
        """Send a Shutdown: the worker ends after its current step."""
        self.post(encode_message(Shutdown()))

    def kill(self, cause: str) -> None:
        """Kill the worker, or have it killed once it is launched. WorkerDied reports the first cause."""
        self._cause = self._cause or cause
        if self._process is not None:
            self._process.kill()

    async def events(self) -> AsyncGenerator[WorkerEvent, None]:
        """Yield the worker's events until it dies, then raise WorkerDied."""
        assert self._process is not None
        self._loop.add_reader(self._process.sentinel, self._note_end)
        while True:
            events = await self._unread(_CHECK_S)
            for event in events:
                yield event
            if not events:
                self._kill_if_silent()
                if self._process.exitcode is not None:  # the sentinel is not enough: a grandchild could keep it open
                    break
        self._arrived.clear()
        while events := await self._unread(_LINGER_S):  # that the worker sent before it died
            for event in events:
                yield event
        raise WorkerDied(self._cause_of_death(), self._is_from_outside, self._is_refusal)

    def _note_end(self) -> None:
        assert self._process is not None
        self._loop.remove_reader(self._process.sentinel)  # it stays readable
        self._arrived.set()

    async def _unread(self, wait_s: float) -> list[WorkerEvent]:
        """Wait for events and return them. There may be none after `wait_s`, or at the end of the process.

        Failed is not among them: its error becomes the cause of death.
        """
        timer = self._loop.call_later(wait_s, self._arrived.set)
        await self._arrived.wait()
        timer.cancel()
        self._arrived.clear()
        if not self._messages:
            self._receive()
        messages, self._messages = self._messages, []
        events: list[WorkerEvent] = []
        for event in map(decode_event, messages):
            if isinstance(event, Failed):
                self._cause, self._is_refusal = event.error, event.is_refusal
            else:
                events.append(event)
        return events

    def _receive(self) -> None:
        """Empty the inbox: its descriptor is readable again only for new messages."""
        with suppress(zmq.Again):
            while True:
                self._messages.append(self._inbox.recv(zmq.NOBLOCK))
                self._last_event_at = time.monotonic()
                self._arrived.set()

    def _kill_if_silent(self) -> None:
        # Called right after the inbox was emptied, so that a stalled event loop is not mistaken for a silent worker.
        age_s = self.heartbeat_age_s
        if age_s is None and time.monotonic() - self._launched_at > self._limits.first_heartbeat_limit_s:
            self.kill(f"it sent nothing for {self._limits.first_heartbeat_limit_s:g} s after its launch and was killed")
        if age_s is not None and age_s > self._limits.hang_limit_s:
            self.kill(f"it hung (no heartbeat for {age_s:.1f} s) and was killed")

    def _cause_of_death(self) -> str:
        if self._cause is not None:
            return self._cause
        code = self._exit_code
        if code is not None and code < 0:
            return f"it was killed by signal {-code} ({signal.strsignal(-code)})"
        return f"it exited with status {code}"

    @property
    def _exit_code(self) -> int | None:
        return None if self._process is None else self._process.exitcode

    @property
    def _is_from_outside(self) -> bool:
        code = self._exit_code
        return self._cause is None and code is not None and code < 0 and -code not in _FAULTS

    def close(self) -> None:
        """Kill the worker if it is alive and free all resources."""
        if self._process is not None:
            self._loop.remove_reader(self._process.sentinel)
            self._process.kill()
            self._process.join(_REAP_S)
            if self._process.exitcode is None:
                _logger.error("process %s did not exit after SIGKILL", self._process.pid)
            else:
                self._process.close()
        self._close_sockets()
        shutil.rmtree(self._folder, ignore_errors=True)  # a process that survived may still write to it
