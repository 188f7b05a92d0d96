"""Traces of real steps: the traced tokens of a request are its tokens, and the traced trees are the judged trees."""

from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.build import BadConfiguration, build_engine
from engine.core.config import EngineConfig, SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.row_trace import TracedRow, TreeProbs
from engine.core.tree import Expansion
from engine.core.types import FinishReason, Request, SamplingParams
from engine.engine import Engine
from engine.testing import tiny_engine, tiny_module
from engine.trace import tracer
from engine.trace.file import TraceFile
from engine.trace.records import TracedStep, TraceHeader, read_trace
from engine.trace.stats import RowOutcome
from engine.trace.tracer import FileTracer, header_of
from tests.model.driving import Session, greedy, run, sampled
from tests.model.engine.test_engine import LONG, TIGHT, engine_of, mixed_requests
from tests.model.engine.test_engine_events import broken_engine
from tests.model.tiny import model

TREE = Expansion(2, 2, 1)


def traced_run(engine: Engine, requests: list[Request], path: Path) -> Session:
    file = TraceFile(path, header_of(engine.info))
    engine.add_observer(FileTracer(file))
    session = run(engine, requests)
    file.close()
    return session


def requests_of_all_kinds() -> list[Request]:
    """Greedy, coupled and i.i.d. rows; some end inside a path by a stop token."""
    others = [sampled("traversal", LONG, 4, verifier="traversal"), sampled("block", LONG[:7], 5, verifier="block")]
    stopping = [replace(one, sampling=replace(one.sampling, stop_token_ids=tuple(range(20)))) for one in others]
    return [*mixed_requests(), *others, *(replace(one, request_id=f"{one.request_id} stops") for one in stopping)]


def rows_of(path: Path) -> dict[str, list[TracedRow]]:
    rows = [record for record in read_trace(path) if isinstance(record, TracedRow)]
    return {name: list(own) for name, own in groupby(sorted(rows, key=lambda row: row.request_id), lambda row: row.request_id)}


def check_trace(path: Path, session: Session, requests: list[Request]) -> None:
    """Compare a trace with the requests' events and with itself."""
    first, *records = read_trace(path)
    assert isinstance(first, TraceHeader)
    assert [record.stats for record in records if isinstance(record, TracedStep)] == session.stats
    rows = rows_of(path)
    assert sum(map(len, rows.values())) == sum(stats.num_decoding_rows for stats in session.stats)
    for request in requests:
        check_rows(rows[request.request_id], request, session.outcomes[request.request_id].ids)


def check_rows(rows: list[TracedRow], request: Request, text: list[int]) -> None:
    """Check that rows follow each other: each tree starts at the previous last token, and its outcome is on its path."""
    sampling = request.sampling
    sequence = [*request.prompt_ids]
    for row in rows:
        assert (row.root_position, row.tree.token_ids[0]) == (len(sequence) - 1, sequence[-1])
        assert row.tree.path(row.path[-1]) == row.path
        assert (row.sampling.temperature, row.sampling.top_p) == (sampling.temperature, sampling.top_p)
        assert row.sampling.is_seeded == (sampling.seed is not None)
        outcome = [*(row.tree.token_ids[node] for node in row.path[1:]), row.extra_id]
        assert list(row.emitted_ids) == outcome[: len(row.emitted_ids)]
        assert len(row.emitted_ids) == len(outcome) or row.finish is not None
        sequence.extend(row.emitted_ids)
    assert sequence[len(request.prompt_ids) :] == text
    assert [row.finish is not None for row in rows] == [False] * (len(rows) - 1) + [True]


@pytest.mark.parametrize("drafter", ["model", "ngram", "none"])
@pytest.mark.parametrize("config", [TIGHT, SchedulerConfig(num_slots=1024, max_model_len=64)], ids=["tight", "roomy"])
def test_trace_reports_what_happened(drafter, config, tmp_path):
    """Preempted requests too: tokens that are fed twice are reported once."""
    requests = requests_of_all_kinds()
    session = traced_run(engine_of("llama", drafter, TREE, config), requests, tmp_path / "trace")
    check_trace(tmp_path / "trace", session, requests)


def test_trace_contains_all_inputs_of_distributions(tmp_path):
    """The bug: penalties, bias and masks were missing, so a reader could not recompute the distributions."""
    limits: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5, "min_tokens": 2}
    tokens: dict[str, Any] = {"logit_bias": ((7, 1.5),), "allowed_token_ids": tuple(range(3, 20)), "bad_words": ((4, 5),)}
    sampling = SamplingParams(0.8, top_p=0.9, top_k=9, min_p=0.01, max_tokens=4, **limits, **tokens)
    traced_run(engine_of("llama", "model", TREE), [Request("r", tuple(LONG), sampling)], tmp_path / "trace")
    for row in rows_of(tmp_path / "trace")["r"]:
        recorded = {name: value for name, value in msgspec.structs.asdict(row.sampling).items() if name != "is_seeded"}
        assert recorded == {name: getattr(sampling, name) for name in recorded}
        assert set(limits) | set(tokens) <= set(recorded)


def before_the_cut(step: int, outcome: RowOutcome, probs: TreeProbs) -> TracedRow:
    """It reports accepted tokens also if a limit cut them."""
    row = _TRACED(step, outcome, probs)
    ids = tuple(row.tree.token_ids[node] for node in row.path[1:])
    return msgspec.structs.replace(row, emitted_ids=(*ids, row.extra_id or 0))


def without_the_extra_token(step: int, outcome: RowOutcome, probs: TreeProbs) -> TracedRow:
    row = _TRACED(step, outcome, probs)
    return msgspec.structs.replace(row, emitted_ids=row.emitted_ids[: len(row.path) - 1])


def path_without_its_root(step: int, outcome: RowOutcome, probs: TreeProbs) -> TracedRow:
    row = _TRACED(step, outcome, probs)
    return msgspec.structs.replace(row, path=row.path[1:] or row.path)


def position_of_the_extra_token(step: int, outcome: RowOutcome, probs: TreeProbs) -> TracedRow:
    row = _TRACED(step, outcome, probs)
    return msgspec.structs.replace(row, root_position=row.root_position + len(row.path))


_TRACED = tracer._traced_row


@pytest.mark.parametrize("mutant", [before_the_cut, without_the_extra_token, path_without_its_root, position_of_the_extra_token])
def test_traces_detect_mutants(mutant, tmp_path, monkeypatch):
    monkeypatch.setattr(tracer, "_traced_row", mutant)
    requests = requests_of_all_kinds()
    session = traced_run(engine_of("llama", "model", TREE), requests, tmp_path / "trace")
    with pytest.raises(AssertionError):
        check_trace(tmp_path / "trace", session, requests)


def test_predicted_tokens_are_in_the_trace(tmp_path):
    requests = requests_of_all_kinds()
    session = traced_run(engine_of("llama", "model", TREE), requests, tmp_path / "trace")
    known = [row for rows in rows_of(tmp_path / "trace").values() for row in rows if row.expected_tokens is not None]
    assert sum(row.expected_tokens or 0.0 for row in known) == pytest.approx(sum(one.expected_tokens for one in session.stats))
    assert sum(len(row.path) for row in known) == sum(one.num_realised_tokens for one in session.stats)


def test_broken_row_states_its_reason(tmp_path):
    broken = Request("broken", (5, 60, 7), SamplingParams(max_tokens=8))
    traced_run(broken_engine(drafter=False), [greedy("sound", LONG), broken], tmp_path / "trace")
    (row,) = rows_of(tmp_path / "trace")["broken"]
    assert (row.error, row.path, row.emitted_ids) == ("the target's logits are not finite", (), ())


class FullDisk(TraceFile):
    """Fails from the third write on."""

    num_writes = 0

    def write(self, records):
        self.num_writes += 1
        if self.num_writes == 3 and self._file is not None:
            self._file.close()
            self._file = Path("/dev/full").open("ab")  # noqa: SIM115
        super().write(records)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
def test_full_disk_fails_no_step(tmp_path, caplog):
    engine = tiny_engine(model("llama"), None, FixedExpansion(TREE))
    file = FullDisk(tmp_path / "trace", header_of(engine.info))
    engine.add_observer(FileTracer(file))
    assert run(engine, [greedy("r", LONG)]).outcomes["r"].finish is FinishReason.LENGTH
    assert len([record for record in caplog.records if "tracing" in record.message]) == 1
    assert len(list(read_trace(tmp_path / "trace"))) == 1 + 2 * 2


def saved_model(folder: Path) -> str:
    """Return the reference of a tiny model on the disk; nothing here reads its tokenizer."""
    tiny_module("llama").save_pretrained(folder / "model")
    (folder / "model" / "tokenizer.json").write_text("{}")
    return str(folder / "model")


def test_configured_engine_traces_requests_not_warmup(tmp_path):
    """Not its own warm-up."""
    engine = build_engine(EngineConfig(saved_model(tmp_path), "tiny", "ngram", trace_file=str(tmp_path / "trace")))
    requests = [greedy("r", LONG)]
    session = run(engine, requests)
    first, *records = read_trace(tmp_path / "trace")
    info = engine.info
    assert isinstance(first, TraceHeader)
    assert (first.model, first.drafter, first.verifier, first.policy) == ("tiny", "ngram", "traversal", info.policy)
    assert (first.dtype, first.device) == ("float32", info.device)
    assert [record.stats for record in records if isinstance(record, TracedStep)] == session.stats
    check_rows(rows_of(tmp_path / "trace")["r"], requests[0], session.outcomes["r"].ids)
    tracer = engine._observers[-1]
    assert isinstance(tracer, FileTracer)
    tracer._file.close()


def test_unwritable_trace_is_reported_before_serving(tmp_path):
    with pytest.raises(BadConfiguration, match=r"trace file .*nowhere.* cannot be written: No such file"):
        build_engine(EngineConfig(saved_model(tmp_path), trace_file=str(tmp_path / "nowhere" / "trace")))
