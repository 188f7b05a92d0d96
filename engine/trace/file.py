"""The file that a trace is written to: appended to, a step at a time, and given up at the first failure.

Knows bytes and the disk. Does not know what a step is.
"""

import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from engine.trace.records import TraceHeader, TraceRecord, encoded_line

_logger = logging.getLogger(__name__)

_BUFFER_BYTES = 1 << 20  # a step's lines leave in one write; more than this waits for none


class TraceFile:
    """Owns an open file. Tracing must not fail a step: what goes wrong is logged once, and nothing is written any more.

    A trace tells what was generated, so a new file can be read by its owner alone.
    """

    def __init__(self, path: Path, header: TraceHeader) -> None:
        """Open the file and append the header. Raises OSError if it cannot be opened."""
        is_torn = _is_torn(path)
        self._path = path
        self._file: BinaryIO | None = open(path, "ab", buffering=_BUFFER_BYTES, opener=_private)  # noqa: SIM115
        self._append([*([b"\n"] if is_torn else []), encoded_line(header)])

    def write(self, records: Iterable[TraceRecord]) -> None:
        """Append the records and hand them to the system, so that they outlive this process."""
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
        """Write no more. A second time does nothing."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # it tries once more to get rid of what could not be written
                file.close()


def _is_torn(path: Path) -> bool:
    """Return whether a writer before us died in the middle of a line."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)
