"""Trace records made by hand."""

from engine.core.row_trace import TracedRow, TracedSampling
from engine.core.tree import TokenTree
from engine.core.types import FinishReason, StepStats
from engine.trace.records import TracedStep, TraceHeader, TraceRecord

HEADER = TraceHeader(model="tiny", drafter="ngram", verifier="traversal", policy="fixed 1.2.2", dtype="float32", device="cpu")
TREE = TokenTree((-1, 0, 1, 2, 1, 0), (5, 17, 33, 4, 8, 9), ((1, 1, 5), (2, 4, 4), (3,), (), (), ()))


def step(number: int, num_rows: int = 1) -> TracedStep:
    """Return a step of 8 ms."""
    return TracedStep(
        StepStats(
            number,
            num_running=num_rows,
            num_waiting=0,
            num_used_slots=9,
            num_slots=64,
            num_decoding_rows=num_rows,
            num_target_tokens=6 * num_rows,
            expansions={"0.3.2": num_rows},
            draft_s=0.001,
            verify_s=0.005,
            judge_s=0.0015,
            host_s=0.0005,
            step_s=0.008,
        )
    )


def bushy_row(number: int, request_id: str) -> TracedRow:
    """Return a row whose tree has every kind of branch; one node of five is accepted."""
    return TracedRow(
        step=number,
        request_id=request_id,
        root_position=34,
        verifier="traversal",
        expansion="0.3.2",
        sampling=TracedSampling(0.8, 0.95, 0, 0.0, is_seeded=False),
        tree=TREE,
        path=(0, 1),
        extra_id=6,
        expected_tokens=2.25,
        emitted_ids=(17, 6),
    )


def plain_row(number: int, request_id: str) -> TracedRow:
    """Return a greedy row that drafted nothing and ended."""
    return TracedRow(
        step=number,
        request_id=request_id,
        root_position=7,
        verifier="coupled",
        expansion="0.1.0",
        sampling=TracedSampling(0.0, 1.0, 5, 0.1, is_seeded=True),
        tree=TokenTree.single(2),
        path=(0,),
        extra_id=3,
        emitted_ids=(3,),
        finish=FinishReason.LENGTH,
    )


def broken_row(number: int, request_id: str) -> TracedRow:
    """Return a row that could not be judged."""
    return TracedRow(
        step=number,
        request_id=request_id,
        root_position=2,
        verifier="block",
        expansion="1.1.0",
        sampling=TracedSampling(1.0, 1.0, 0, 0.0, is_seeded=False),
        tree=TokenTree((-1, 0), (60, 1), ((1,), ())),
        error="the target's logits are not finite",
    )


RECORDS: list[TraceRecord] = [
    HEADER,
    step(1, 2),
    bushy_row(1, "a"),
    plain_row(1, "b"),
    step(2, 0),
    step(3, 2),
    bushy_row(3, "a"),
    broken_row(3, "c"),
]
