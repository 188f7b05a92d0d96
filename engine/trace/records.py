"""Traces of steps: the records of a trace file, their JSON lines, and the reader.

Knows records and lines. Does not know engines, nor who writes the file; whoever learns from steps (a selector) or shows them
reads it from here. docs/traces.md is the schema for people.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from engine.core.row_trace import StepTrace, TracedRow
from engine.core.types import STAGES, StepStats

TRACE_VERSION = 1  # raised when a record no longer means what it meant; new fields with defaults do not raise it


class TraceError(Exception):
    """A file that is no trace, or one of a version unknown here; the message is one line."""


class TraceHeader(msgspec.Struct, frozen=True, tag="header", tag_field="type", kw_only=True):
    """What wrote the records that follow; one for each start of an engine."""

    version: int = TRACE_VERSION
    model: str
    drafter: str
    verifier: str
    policy: str
    dtype: str
    device: str


class TracedStep(msgspec.Struct, frozen=True, tag="step", tag_field="type"):
    """A step's seconds and counts; the rows of the step follow."""

    stats: StepStats


TraceRecord = TraceHeader | TracedStep | TracedRow


def step_trace(stats: StepStats, row: TracedRow) -> StepTrace:
    """Return the row with what is to be told of its step."""
    stage_s = {stage: getattr(stats, f"{stage}_s") for stage in STAGES}
    return StepTrace(row, stats.policy_reason, stats.step_s, stage_s)


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[TraceRecord] = msgspec.json.Decoder(TraceRecord)


def encoded_line(record: TraceRecord) -> bytes:
    """Return the record's line, its end included."""
    return _encoder.encode(record) + b"\n"


def read_trace(path: Path) -> Iterator[TraceRecord]:
    """Yield the records of a trace in order. Raises TraceError, or OSError if the file cannot be read.

    A line that was torn when its writer died is left out; it is the last, or a header (of the next engine) follows it.
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
    """Return the line's record, None if the line is torn."""
    try:
        return _decoder.decode(line)
    except msgspec.ValidationError as error:
        raise TraceError(f"{place} is no record of a trace of version {TRACE_VERSION}: {error}") from error
    except msgspec.DecodeError:
        return None


def _check_version(record: TraceHeader, path: Path) -> None:
    if record.version != TRACE_VERSION:
        raise TraceError(f"{path} is a trace of version {record.version}; only {TRACE_VERSION} can be read")
