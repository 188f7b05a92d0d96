"""The trace file: appended to at each step, closed at the first failure. Knows bytes and the disk, not steps."""

import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from engine.trace.records import TraceHeader, TraceRecord, encoded_line

_logger = logging.getLogger(__name__)

_BUFFER_BYTES = 1 << 20  # so that the lines of a step are written at once


class TraceFile:
    """Owns an open file. Tracing must not fail a step: the first failure is logged, and nothing is written afterwards.

    A trace contains generated text, so only the owner can read a new file.
    """

    def __init__(self, path: Path, header: TraceHeader) -> None:
        """Open the file and append the header. Raises OSError if it cannot be opened."""
        is_torn = _is_torn(path)
        self._path = path
        self._file: BinaryIO | None = open(path, "ab", buffering=_BUFFER_BYTES, opener=_private)  # noqa: SIM115
        self._append([*([b"\n"] if is_torn else []), encoded_line(header)])

    def write(self, records: Iterable[TraceRecord]) -> None:
        """Append the records and flush them to the kernel, so that they survive this process."""
        self._append([encoded_line(record) for record in records])

    def _append(self, lines: list[bytes]) -> None:
        if self._file is None:
            return
        try:
            self._file.writelines(lines)
            self._file.flush()
        except OSError as error:
            _logger.error("tracing to %s ends: %s", self._path, error)
            self.close()

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # closing flushes the unwritten bytes again
                file.close()


def _is_torn(path: Path) -> bool:
    """Return whether an earlier writer died in the middle of a line."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)
