"""The observer that writes a trace file, and the conversion of a step's rows to trace records and events.

Knows which data of a step are traced. Does not know file formats or failures.
"""

from collections.abc import Mapping, Sequence

from msgspec import structs

from engine.core.row_trace import TracedRow, TracedSampling, TreeProbs
from engine.core.step_observer import StepObserver
from engine.core.types import ModelInfo, Peaks, SamplingParams, StepStats, TokenEvent
from engine.trace.file import TraceFile
from engine.trace.records import TracedStep, TraceHeader, step_trace
from engine.trace.stats import RowOutcome, StepRecord
from engine.verify.verdict import Verdict, VerificationFailure


class FileTracer(StepObserver):
    """Appends every step to a file."""

    wants_rows = True

    def __init__(self, file: TraceFile) -> None:
        self._file = file

    def after_step(self, stats: StepStats, rows: Sequence[TracedRow]) -> None:
        """Append the records of the step."""
        self._file.write([TracedStep(stats), *rows])


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


def traced_rows(record: StepRecord, probs: Mapping[str, TreeProbs]) -> list[TracedRow]:
    """Return the records of the traced decoding rows, in order. `probs` maps request ids to the probabilities of their trees."""
    return [
        _traced_row(record.plan.step, outcome, probs.get(outcome.row.request_id, TreeProbs()))
        for outcome in record.outcomes
        if outcome.row.is_traced
    ]


def with_traces(
    events: Sequence[TokenEvent], stats: StepStats, rows: Sequence[TracedRow], peaks: Peaks | None
) -> tuple[TokenEvent, ...]:
    """Return a step's events with the traces of their rows."""
    if not rows:
        return tuple(events)
    by_request = {row.request_id: step_trace(stats, row, peaks) for row in rows}
    return tuple(structs.replace(event, trace=by_request.get(event.request_id)) for event in events)


def _traced_row(step: int, outcome: RowOutcome, probs: TreeProbs) -> TracedRow:
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
        error=verdict.reason if isinstance(verdict, VerificationFailure) else None,
        sources=outcome.sources,
        probs=probs,
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
        grammar=sampling.grammar.kind if sampling.grammar else None,
    )
