"""Who is told of each step for the trace: nobody, or a file.

Knows what of a step is worth keeping. Does not know files' formats or failures.
"""

from collections.abc import Iterator
from typing import Protocol

from engine.stats import RowOutcome, StepRecord
from engine.trace import TracedRow, TracedSampling, TracedStep, TraceHeader, TraceRecord
from engine.trace_file import TraceFile
from engine.types import ModelInfo, SamplingParams, StepStats
from engine.verify.verdict import Unjudged, Verdict


class Tracer(Protocol):
    """Is told of every step once it is over. It must not raise."""

    def on_step(self, record: StepRecord, stats: StepStats) -> None:
        """Keep what it wants of the step."""
        ...


class NoTracer:
    """Keeps nothing."""

    def on_step(self, record: StepRecord, stats: StepStats) -> None:
        """Forget the step."""


class FileTracer:
    """Writes every step down."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file

    def on_step(self, record: StepRecord, stats: StepStats) -> None:
        """Append the step's lines."""
        self._file.write(records_of(record, stats))


def header_of(info: ModelInfo) -> TraceHeader:
    """Return the header of a trace of this engine."""
    return TraceHeader(
        model=info.name,
        drafter=info.drafter,
        verifier=info.verifier,
        policy=info.policy,
        dtype=info.dtype,
        device=info.device,
    )


def records_of(record: StepRecord, stats: StepStats) -> Iterator[TraceRecord]:
    """Yield the step's records: its numbers, then its decoding rows in order."""
    yield TracedStep(stats)
    for outcome in record.outcomes:
        yield _traced_row(record.plan.step, outcome)


def _traced_row(step: int, outcome: RowOutcome) -> TracedRow:
    row, verdict, emission = outcome.row, outcome.verdict, outcome.emission
    judged = verdict if isinstance(verdict, Verdict) else None
    return TracedRow(
        step=step,
        request_id=row.request_id,
        root_position=row.root_position,
        verifier=row.verifier,
        expansion=str(row.expansion),
        sampling=_traced_sampling(row.sampling),
        tree=outcome.tree,
        path=judged.path if judged else (),
        extra_id=judged.extra_id if judged else None,
        expected_tokens=outcome.expected_tokens,
        emitted_ids=emission.new_ids if emission else (),
        finish=emission.finish if emission else None,
        error=verdict.reason if isinstance(verdict, Unjudged) else None,
    )


def _traced_sampling(sampling: SamplingParams) -> TracedSampling:
    return TracedSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        is_seeded=sampling.seed is not None,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=sampling.bad_words,
        min_tokens=sampling.min_tokens,
        typical_p=sampling.typical_p,
    )
