"""Progress of long work on stderr: a moving bar in a terminal, plain lines in a log.

A log gets no control characters: it gets a line at the beginning, one every five seconds, and one at the end. After
`lines_to_logging` each line is a record of `logging`.
"""

import logging
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from tqdm import tqdm

_logger = logging.getLogger(__name__)
_is_logged = False
_last_line_s = 0.0
_running: list[object] = []  # of long_work, the innermost last

tqdm.monitor_interval = 0  # no monitor thread: it would disturb measurements of an engine's steps
tqdm.set_lock(threading.RLock())  # tqdm's own has a semaphore of the system, which a killed worker would leave behind

LOG_INTERVAL_S = LONG_INTERVAL_S = 5.0
_LOG_LINE = "{desc}: {n_fmt} of {total_fmt} {unit} ({percentage:.0f}%), {elapsed} elapsed, {remaining} left{postfix}"


class _Lines:
    """A stream for tqdm that turns each state of a bar into a line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Write a line without cursor movements, unless it is empty."""
        global _last_line_s
        line = text.replace("\r", "").strip()
        _last_line_s = time.monotonic()
        if line and _is_logged:
            _logger.info("%s", line)
        elif line:
            self._stream.write(line + "\n")

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


def lines_to_logging() -> None:
    """From now on, write lines of progress, also of transformers, as records of `logging`."""
    global _is_logged
    _is_logged = True


def progress_line(text: str) -> None:
    """Write one line of progress where there is no bar."""
    _Lines(sys.stderr).write(text)


@contextmanager
def long_work(what: str, is_announced: bool = True) -> Iterator[None]:
    """Write a line about a task, and again after each LONG_INTERVAL_S seconds without a line, until it is done.

    Work inside other work, or its bar, is written in its place. Without `is_announced` the first line comes later.
    """
    if is_announced:
        progress_line(what)
    is_over, begin_s = threading.Event(), time.monotonic()

    def repeat() -> None:
        while not is_over.wait(max(0.05, max(_last_line_s, begin_s) + LONG_INTERVAL_S - time.monotonic())):
            is_shown = _running[-1] is is_over and not getattr(tqdm, "_instances", ())  # no bar moves
            if is_shown and time.monotonic() - _last_line_s >= LONG_INTERVAL_S:
                progress_line(f"{what} ({time.monotonic() - begin_s:.0f} s so far)")

    thread = threading.Thread(target=repeat, name="progress", daemon=True)
    _running.append(is_over)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        _running.remove(is_over)


def is_terminal() -> bool:
    """Return whether stderr is a terminal that shows bars."""
    return sys.stderr.isatty() and not _is_logged


def progress_bar(
    iterable: Iterable[Any] | None = None,
    *,
    what: str,
    total: float,
    unit: str,
    initial: float = 0,
    is_shown: bool = True,
    **more: Any,
) -> "tqdm[Any]":
    """Return a bar over `total` units of work, to iterate over or to update, and to close; `more` is tqdm's."""
    if is_terminal():
        size = shutil.get_terminal_size()  # 80 x 24 if unknown
        more |= {"ncols": size.columns, "nrows": size.lines}
    else:
        more |= {"file": _Lines(sys.stderr), "mininterval": LOG_INTERVAL_S, "bar_format": _LOG_LINE}
    return tqdm(iterable, desc=what, total=total, unit=unit, initial=initial, disable=not is_shown, **more)


def quiet_libraries() -> None:
    """Disable the bars of transformers in a log, and give its lines the log's form."""
    from transformers.utils import logging as theirs  # slow to import

    if not is_terminal():
        theirs.disable_progress_bar()
    if _is_logged:
        theirs.disable_default_handler()
        theirs.enable_propagation()
