"""One worker process and the two sockets to it, from launch to death.

Knows how a worker is heard, how its death or silence is noticed, and how to say what happened. Does not know requests, nor
what comes after: a link is closed once and never reused, so nothing an earlier worker said can reach a later one's requests.
"""

import logging
import shutil
import signal
import time
from collections.abc import AsyncGenerator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

import zmq
import zmq.asyncio

from engine.worker.messages import Addresses, Failed, Report, Shutdown, decoded_report, encoded
from engine.worker.step_log import StepNote, last_note
from engine.worker.supervision import Supervision

_logger = logging.getLogger(__name__)

_CHECK_MS = 250
_LAST_WORDS_MS = 200
_REAP_S = 5.0
_FAULTS = frozenset(
    [signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP]
)  # signals of a process's own making


class WorkerDied(Exception):
    """The worker is gone; the text says how, as the end of a sentence about it.

    `is_from_outside`: by a signal that another process sent, or the kernel for lack of memory.
    """

    def __init__(self, text: str, is_from_outside: bool = False) -> None:
        super().__init__(text)
        self.is_from_outside = is_from_outside


class Launcher(Protocol):
    """Starts workers."""

    def launch(self, addresses: Addresses) -> BaseProcess:
        """Return a started process that reads letters from and sends reports to `addresses`."""
        ...

    def keep_spare(self) -> None:
        """Prepare the next launch, if that makes it faster. May be called again."""
        ...

    def close(self) -> None:
        """Free what was prepared."""
        ...


class WorkerConnection:
    """Owns one worker process, its sockets and their folder, a new one in `parent`."""

    def __init__(self, launcher: Launcher, parent: Path, number: int, limits: Supervision) -> None:
        self._limits = limits
        self._folder = parent / str(number)
        self._folder.mkdir()
        self._black_box = self._folder / "steps"
        self._addresses = Addresses(f"ipc://{self._folder}/letters", f"ipc://{self._folder}/reports", str(self._black_box))
        self._launched_at = time.monotonic()
        self._heard_at: float | None = None
        self._cause: str | None = None
        self._context = zmq.Context()
        self._inbox = zmq.asyncio.Socket(self._context, zmq.PULL)
        self._outbox = self._context.socket(zmq.PUSH)
        try:
            self._open_streets()
            self._process = launcher.launch(self._addresses)
        except BaseException:
            self._close_streets()
            raise
        _logger.info("worker %d launched as process %s", number, self._process.pid)

    def _open_streets(self) -> None:
        # No high-water marks: letters are bounded by the queue limit, reports by max_tokens, and neither side may block.
        self._inbox.set_hwm(0)
        self._outbox.set_hwm(0)
        self._inbox.bind(self._addresses.reports)
        self._outbox.connect(self._addresses.commands)  # letters wait here until the worker has bound its end

    def _close_streets(self) -> None:
        self._inbox.close(linger=0)
        self._outbox.close(linger=0)
        self._context.term()

    @property
    def heartbeat_age_s(self) -> float | None:
        """Seconds since the worker last said anything; None before it first did."""
        return None if self._heard_at is None else time.monotonic() - self._heard_at

    @property
    def pid(self) -> int | None:
        """The process's id."""
        return self._process.pid

    @property
    def last_note(self) -> StepNote | None:
        """The last step that the worker, which must be dead, has begun, as far as it is known."""
        return last_note(self._black_box)

    def post(self, data: bytes) -> None:
        """Send an encoded letter without waiting."""
        self._outbox.send(data, zmq.NOBLOCK)

    def dismiss(self) -> None:
        """Ask the worker to end after its step."""
        self.post(encoded(Shutdown()))

    def kill(self, cause: str) -> None:
        """End the worker at once. The first cause noted is the one told."""
        self._cause = self._cause or cause
        self._process.kill()

    async def reports(self) -> AsyncGenerator[Report, None]:
        """Yield what the worker says for as long as it lives; then raise WorkerDied."""
        poller = zmq.asyncio.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        poller.register(self._process.sentinel, zmq.POLLIN)
        # The exit code is read besides the sentinel, which a grandchild could keep open.
        while self._process.exitcode is None:
            await poller.poll(_CHECK_MS)
            for report in await self._unread():
                yield report
            self._kill_if_silent()
        while await self._inbox.poll(_LAST_WORDS_MS):  # sent before the end, read from the kernel's buffer after it
            for report in await self._unread():
                yield report
        raise WorkerDied(self._obituary(), self._is_from_outside)

    async def _unread(self) -> list[Report]:
        """Return the reports that lie in the inbox, the worker's last words excepted: they belong to its obituary."""
        reports: list[Report] = []
        while await self._inbox.poll(0):
            report = decoded_report(await self._inbox.recv())
            self._heard_at = time.monotonic()
            if isinstance(report, Failed):
                self._cause = report.error
            else:
                reports.append(report)
        return reports

    def _kill_if_silent(self) -> None:
        # Called right after the inbox was emptied, so an event loop that was itself asleep does not blame the worker.
        age_s = self.heartbeat_age_s
        if age_s is None and time.monotonic() - self._launched_at > self._limits.first_word_limit_s:
            self.kill(f"it said nothing for {self._limits.first_word_limit_s:g} s after its launch and was killed")
        if age_s is not None and age_s > self._limits.hang_limit_s:
            self.kill(f"it hung (no heartbeat for {age_s:.1f} s) and was killed")

    def _obituary(self) -> str:
        if self._cause is not None:
            return self._cause
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"it was killed by signal {-code} ({signal.strsignal(-code)})"
        return f"it exited with status {code}"

    @property
    def _is_from_outside(self) -> bool:
        code = self._process.exitcode
        return self._cause is None and code is not None and code < 0 and -code not in _FAULTS

    def close(self) -> None:
        """Kill the worker if it lives, and free everything."""
        self._process.kill()
        self._process.join(_REAP_S)
        if self._process.exitcode is None:
            _logger.error("process %s does not die", self._process.pid)
        else:
            self._process.close()
        self._close_streets()
        shutil.rmtree(self._folder, ignore_errors=True)  # a process that does not die may still write; the parent goes last
