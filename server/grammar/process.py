"""The process that compiles grammars: the library needs minutes for some small schemas, and only a process can be killed.

Knows one vocabulary and grammars. Used from one thread; `close` may be called from another.
"""

import logging
import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from engine.core.types import Grammar
from engine.structured_output.grammars import BadGrammar, CompiledGrammars, VocabularySource, require_first_mask
from engine.worker.process import die_with_parent

_logger = logging.getLogger(__name__)

_DEADLINE_S = 4.0  # of processor time; very large schemas compile in a tenth of it
_STALL_S = 4.0  # without any processor time
_START_S = 120.0
_START_STALL_S = 30.0  # the first start reads the library from disk
_CHECK_S = 0.1
_JOIN_S = 5.0
_HAS_PROC = Path("/proc/self/stat").exists()
# Signals that a process causes itself. Other signals come from an operator or from a kernel that is out of memory.
_OWN_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})


class GrammarProcessFailed(Exception):
    """The process did not answer; the message gives the reason. `is_own_crash`: the process crashed by itself."""

    def __init__(self, reason: str, *, is_own_crash: bool = False) -> None:
        super().__init__(reason)
        self.is_own_crash = is_own_crash


class _TooExpensive(Exception):
    """The process was killed because an answer took too much processor time."""


class GrammarProcess:
    """Owns the process. It is started when first needed, and replaced after it ended. It compiles each grammar once."""

    def __init__(self) -> None:
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._sender: threading.Thread | None = None
        self._is_closed = False

    def check(self, source: VocabularySource, grammar: Grammar) -> None:
        """Raise BadGrammar unless the grammar is valid and compiles in time.

        A process that dies or stops is replaced once. If the second one fails too, raise GrammarProcessFailed. If both crashed by
        themselves, the grammar is the cause: raise BadGrammar.
        """
        try:
            self._check_once(source, grammar)
        except GrammarProcessFailed as first:
            if self._is_closed:
                raise
            _logger.warning("%s; the grammar is compiled in a new one", first)
            try:
                self._check_once(source, grammar)
            except GrammarProcessFailed as second:
                if first.is_own_crash and second.is_own_crash:
                    raise BadGrammar("the library cannot compile it") from second
                raise

    def close(self) -> None:
        """Kill the process, even while it works."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()

    def _check_once(self, source: VocabularySource, grammar: Grammar) -> None:
        if self._process is None or not self._process.is_alive():
            self._start(source)
        try:
            self._exchange(grammar, _DEADLINE_S, _STALL_S)
        except _TooExpensive:
            raise BadGrammar(f"it takes longer than {_DEADLINE_S:g} s to compile") from None

    def _start(self, source: VocabularySource) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), name="latebranch-grammars", daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._exchange(source, _START_S, _START_STALL_S)
        except (_TooExpensive, GrammarProcessFailed) as error:
            raise GrammarProcessFailed("the process that compiles grammars does not start") from error

    def _exchange(self, request: VocabularySource | Grammar, limit_s: float, stall_s: float) -> None:
        """Send a request and wait for the reply: the reason why it was refused, or None. Raise BadGrammar with the reason."""
        assert self._pipe is not None
        try:
            # A vocabulary is larger than the pipe, and a process that has stopped does not read it.
            self._sender = threading.Thread(target=_send, args=(self._pipe, request), name="grammar-sender", daemon=True)
            self._sender.start()
            self._wait(limit_s, stall_s)
            reason = self._pipe.recv()
        except (EOFError, OSError) as error:
            code = self._end()
            is_own_crash = code is not None and (code > 0 or -code in _OWN_SIGNALS)
            what = f"the process that compiles grammars ended with code {code}"
            raise GrammarProcessFailed(what, is_own_crash=is_own_crash) from error
        if reason is not None:
            raise BadGrammar(reason)

    def _wait(self, limit_s: float, stall_s: float) -> None:
        """Wait for a reply. Kill the process if it used too much processor time, or none at all for too long.

        If the system does not report processor time, wall-clock time is counted.
        """
        assert self._process is not None
        assert self._pipe is not None
        used_before = used = _processor_s(self._process.pid)
        progress_at = time.monotonic()
        while not self._pipe.poll(_CHECK_S):
            latest = _processor_s(self._process.pid)
            if latest > used:
                used, progress_at = latest, time.monotonic()
            if used - used_before > limit_s:
                self._end()
                raise _TooExpensive
            if time.monotonic() - progress_at > stall_s:
                self._end()
                raise GrammarProcessFailed("the process that compiles grammars has stopped")

    def _end(self) -> int | None:
        """Kill the process and return its exit code; if it had died before, that code."""
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        assert process is not None
        assert pipe is not None
        process.kill()
        process.join(_JOIN_S)
        if self._sender is not None:
            self._sender.join(_JOIN_S)  # its pipe is broken
        pipe.close()
        return process.exitcode


def _send(pipe: Connection, request: VocabularySource | Grammar) -> None:
    """Send a request. If the process is gone, the wait for its reply fails."""
    with suppress(OSError):
        pipe.send(request)


def _processor_s(pid: int | None) -> float:
    """Return the processor time of a process, 0 if it is gone; wall-clock time if the system does not report it."""
    if not _HAS_PROC:
        return time.monotonic()
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime of proc(5)
    except OSError:
        return 0.0


def _serve(pipe: Connection) -> None:
    """Run in the process: answer requests until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=die_with_parent, name="die-with-parent", daemon=True).start()
    grammars: CompiledGrammars | None = None
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        try:
            if isinstance(request, VocabularySource):
                grammars = CompiledGrammars(request.load)
                _ = grammars.vocabulary
            elif grammars is not None:
                require_first_mask(grammars.matcher(request))
            pipe.send(None)
        except BadGrammar as error:
            pipe.send(str(error))
