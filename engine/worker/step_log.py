"""What a worker was about to do, kept where its death does not reach: a small file that the worker maps and the client reads.

A note is written before each step, without a system call: what a process has written to a map of a file survives `kill -9`.
Nothing is read while the worker lives.

    [ length: 4 bytes | CRC-32: 4 bytes | msgpack of the StepNote ]      length 0: no note
"""

import mmap
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from engine.core.step_plan import Row, StepPlan

_HEADER = struct.Struct("<II")
_SIZE_BYTES = 1 << 20  # of a sparse file; thousands of rows


class RowNote(msgspec.Struct, frozen=True):
    """One row of a step: how much of its text is cached, how much is fed, and the tree that grows from it if one does."""

    request_id: str
    context_len: int
    num_certain: int
    expansion: str | None


class StepNote(msgspec.Struct, frozen=True):
    """A step in a few words. `preparing`: requests whose grammars are compiled beside it."""

    step: int
    rows: tuple[RowNote, ...]
    preparing: tuple[str, ...] = ()

    @property
    def request_ids(self) -> frozenset[str]:
        """The requests that are worked on."""
        return frozenset((*(row.request_id for row in self.rows), *self.preparing))


def note_of(plan: StepPlan, preparing: tuple[str, ...]) -> StepNote:
    """Return what a plan says in a few words."""
    return StepNote(plan.step, tuple(_row_note(row) for row in plan.rows), preparing)


def _row_note(row: Row) -> RowNote:
    return RowNote(row.request_id, row.context_len, len(row.certain_ids), str(row.expansion) if row.is_decoding else None)


class StepLog:
    """The worker's side: owns the map. Its last note stands until the next."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._encoder = msgspec.msgpack.Encoder()

    def note(self, note: StepNote) -> None:
        """Replace the note; one too long for the file leaves none."""
        data = self._encoder.encode(note)
        self._memory[: _HEADER.size] = bytes(_HEADER.size)  # while the rest is written there is none
        if _HEADER.size + len(data) <= _SIZE_BYTES:
            self._memory[_HEADER.size : _HEADER.size + len(data)] = data
            self._memory[: _HEADER.size] = _HEADER.pack(len(data), zlib.crc32(data))


@contextmanager
def opened_black_box(path: Path) -> Iterator[StepLog]:
    """Make the file and map it."""
    with path.open("w+b") as file:
        file.truncate(_SIZE_BYTES)
        with mmap.mmap(file.fileno(), _SIZE_BYTES) as memory:
            yield StepLog(memory)


def last_note(path: Path) -> StepNote | None:
    """Return the note that a dead worker left; None if it left none, or died while it wrote one."""
    try:
        with path.open("rb") as file:
            length, checksum = _HEADER.unpack(file.read(_HEADER.size))
            data = file.read(length)
    except (OSError, struct.error):
        return None
    if not length or zlib.crc32(data) != checksum:
        return None
    return msgspec.msgpack.decode(data, type=StepNote)
