"""Progress of long work on stderr: a moving bar in a terminal, plain lines in a log.

A log gets no control characters: it gets a line at the beginning, one every ten seconds, and one at the end.
"""

import shutil
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from tqdm import tqdm

tqdm.monitor_interval = 0  # no monitor thread: it would disturb measurements of an engine's steps

LOG_INTERVAL_S = 10.0
_LOG_LINE = "{desc}: {n_fmt} of {total_fmt} {unit} ({percentage:.0f}%), {elapsed} gone, {remaining} left{postfix}"


class _Lines:
    """A stream for tqdm that turns each state of a bar into a line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Write a line without cursor movements, unless it is empty."""
        line = text.replace("\r", "").strip()
        if line:
            self._stream.write(line + "\n")

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


def is_terminal() -> bool:
    """Return whether stderr is a terminal."""
    return sys.stderr.isatty()


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
    """Disable the bars of transformers in a log."""
    from transformers.utils.logging import disable_progress_bar  # slow to import

    if not is_terminal():
        disable_progress_bar()
