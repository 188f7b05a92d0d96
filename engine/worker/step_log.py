"""The worker's current step, in a small memory-mapped file that the client reads after a crash.

The worker writes a note before each step, without a system call. Writes to a mapped file survive `kill -9`. The file is read
only after the worker is dead.

    [ length: 4 bytes | CRC-32: 4 bytes | msgpack of the StepNote ]      length 0: no note
"""

import mmap
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from engine.core.step_observer import StepObserver
from engine.core.step_plan import StepPlan

_HEADER = struct.Struct("<II")
_SIZE_BYTES = 1 << 20  # of a sparse file; thousands of rows


class RowNote(msgspec.Struct, frozen=True):
    """One row of a step: its cached tokens, its fed tokens and, if it is decoding, its expansion."""

    request_id: str
    context_len: int
    num_certain: int
    expansion: str | None


class StepNote(msgspec.Struct, frozen=True):
    """A summary of a step. `preparing`: requests whose grammars are being compiled at the same time."""

    step: int
    rows: tuple[RowNote, ...]
    preparing: tuple[str, ...] = ()

    @property
    def request_ids(self) -> frozenset[str]:
        """The requests in the step and the requests being prepared."""
        return frozenset((*(row.request_id for row in self.rows), *self.preparing))


def note_of(plan: StepPlan, preparing: tuple[str, ...]) -> StepNote:
    """Return the summary of a plan."""
    texts: dict[int, str] = {}  # of equal objects, since creating a text is slow
    notes = []
    for row in plan.rows:
        expansion = None
        if row.is_decoding and (expansion := texts.get(id(row.expansion))) is None:
            expansion = texts[id(row.expansion)] = str(row.expansion)
        notes.append(RowNote(row.request_id, row.context_len, len(row.certain_ids), expansion))
    return StepNote(plan.step, tuple(notes), preparing)


class StepNotes(StepObserver):
    """Calls a listener with a note of each step. `preparing` returns the requests whose grammars are being compiled."""

    def __init__(self, listener: Callable[[StepNote], None], preparing: Callable[[], tuple[str, ...]]) -> None:
        self._listener = listener
        self._preparing = preparing

    def before_step(self, plan: StepPlan) -> None:
        """Call the listener."""
        self._listener(note_of(plan, self._preparing()))


class StepLog:
    """The worker's side: owns the mapped memory, which holds one note."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._encoder = msgspec.msgpack.Encoder()

    def note(self, note: StepNote) -> None:
        """Replace the note. A note that is too long for the file is left out."""
        data = self._encoder.encode(note)
        self._memory[: _HEADER.size] = bytes(_HEADER.size)  # marks the note as absent while it is written
        if _HEADER.size + len(data) <= _SIZE_BYTES:
            self._memory[_HEADER.size : _HEADER.size + len(data)] = data
            self._memory[: _HEADER.size] = _HEADER.pack(len(data), zlib.crc32(data))


@contextmanager
def open_step_log(path: Path) -> Iterator[StepLog]:
    """Create the file and map it."""
    with path.open("w+b") as file:
        file.truncate(_SIZE_BYTES)
        with mmap.mmap(file.fileno(), _SIZE_BYTES) as memory:
            yield StepLog(memory)


def last_note(path: Path) -> StepNote | None:
    """Return the last note of a dead worker. Return None if there is none or it was only partly written."""
    try:
        with path.open("rb") as file:
            length, checksum = _HEADER.unpack(file.read(_HEADER.size))
            data = file.read(length)
    except (OSError, struct.error):
        return None
    if not length or zlib.crc32(data) != checksum:
        return None
    return msgspec.msgpack.decode(data, type=StepNote)
