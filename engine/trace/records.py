"""The records of a trace file, their JSON lines, and the reader.

Knows records and lines. Does not know engines. docs/traces.md documents the schema.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import structs

from engine.core.row_trace import RowTrace, TracedRow
from engine.core.types import STAGES, Peaks, StepStats

TRACE_VERSION = 1  # incremented when the meaning of a record changes, but not for new fields with defaults


class TraceError(Exception):
    """The file is no trace or has an unknown version. The message is one line."""


class TraceHeader(msgspec.Struct, frozen=True, tag="header", tag_field="type", kw_only=True):
    """The engine that wrote the following records; one for each start of an engine."""

    version: int = TRACE_VERSION
    model: str
    drafter: str
    verifier: str
    policy: str
    dtype: str
    device: str


class TracedStep(msgspec.Struct, frozen=True, tag="step", tag_field="type"):
    """A step's statistics. The rows of the step follow."""

    stats: StepStats


TraceRecord = TraceHeader | TracedStep | TracedRow


def step_trace(stats: StepStats, row: TracedRow, peaks: Peaks | None = None) -> RowTrace:
    """Return the row with the reason, the seconds and the amounts of its step; with `peaks` also the shares of these."""
    stage_s = {stage: getattr(stats, f"{stage}_s") for stage in STAGES}
    found = RowTrace(row, stats.policy_reason, stats.step_s, stage_s, stats.num_read_bytes, stats.num_operations)
    if peaks is None or not stats.step_s:
        return found
    shares = (stats.num_read_bytes / peaks.bytes_per_s, stats.num_operations / peaks.operations_per_s)
    return structs.replace(found, bandwidth_share=shares[0] / stats.step_s, compute_share=shares[1] / stats.step_s)


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[TraceRecord] = msgspec.json.Decoder(TraceRecord)


def encoded_line(record: TraceRecord) -> bytes:
    """Return the record's line, including the line end."""
    return _encoder.encode(record) + b"\n"


def read_trace(path: Path) -> Iterator[TraceRecord]:
    """Yield the records of a trace in order. Raises TraceError, or OSError if the file cannot be read.

    An incomplete line of a writer that died is skipped. It is the last line, or the header of the next engine follows.
    """
    torn: str | None = None
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            record = _decoded(line, f"{path}, line {number}")
            if torn is not None and not isinstance(record, TraceHeader):
                raise TraceError(torn)
            torn = None if record is not None else f"{path}, line {number} is no JSON"
            if number == 1 and not isinstance(record, TraceHeader):
                raise TraceError(f"{path} is no trace: it does not begin with a header")
            if isinstance(record, TraceHeader):
                _check_version(record, path)
            if record is not None:
                yield record


def _decoded(line: bytes, place: str) -> TraceRecord | None:
    """Return the line's record, or None if the line is incomplete."""
    try:
        return _decoder.decode(line)
    except msgspec.ValidationError as error:
        raise TraceError(f"{place} is no record of a trace of version {TRACE_VERSION}: {error}") from error
    except msgspec.DecodeError:
        return None


def _check_version(record: TraceHeader, path: Path) -> None:
    if record.version != TRACE_VERSION:
        raise TraceError(f"{path} is a trace of version {record.version}; only {TRACE_VERSION} can be read")
