"""The benchmark counts correctly, runs the named cases, and fails when speculation changes greedy tokens."""

import argparse
from dataclasses import replace

import pytest
import torch
from msgspec import structs

from benchmarks.load import in_turns
from engine.core.policy import FixedExpansion
from engine.core.step_observer import StepObserver
from engine.core.tree import PLAIN, Expansion
from engine.core.types import FinishReason, TokenEvent
from engine.draft.recorded_text import RecordedText
from engine.testing import tiny_engine, tiny_pair
from engine.verify import coupled
from server.cli import bench_run
from server.cli.bench_compare import (
    BenchLoad,
    Case,
    OutputsDiffer,
    RequestFailed,
    cases_of,
    compare,
    compare_with_oracle,
    run_case,
    table,
)
from server.settings import Settings

SHAPES = [Expansion(3, 1, 0), Expansion(1, 2, 2)]


@pytest.fixture(scope="module")
def engine():
    return tiny_engine(*tiny_pair())


def load(temperature):
    return BenchLoad(((5, 6, 7), (8, 9), (3,), (11, 12)), temperature, max_tokens=20, concurrency=3)


def test_every_case_makes_every_token(engine):
    for result in compare(engine, cases_of(["traversal", "nss"], SHAPES, 1.0), load(1.0), "tiny", num_rounds=2):
        assert result.num_tokens == 2 * 4 * 20
        assert 1.0 <= result.block_efficiency <= 4.0
        assert result.ratio_low <= result.ratio <= result.ratio_high
        assert sum(result.shares.values()) == pytest.approx(1.0)


def test_plain_decoding_runs_first_as_baseline(engine):
    plain, *others = compare(engine, cases_of(["traversal"], SHAPES, 0.0), load(0.0), "tiny", num_rounds=1)
    assert (plain.case, plain.block_efficiency, plain.ratio) == ("plain", 1.0, 1.0)
    assert max(other.block_efficiency for other in others) > 1.5  # the tiny drafter is nearly the target


def test_concurrency_is_kept(engine):
    run = run_case(engine, load(0.0).requests(Case("traversal", PLAIN), 0), concurrency=2)
    assert max(step.num_decoding_rows for step in run.steps) == 2


def test_contender_with_fewest_tokens_steps_next():
    """One engine emits four tokens a step, the other one token. Both finish all tokens."""
    engines = {"drafts": tiny_engine(*tiny_pair()), "plain": tiny_engine(*tiny_pair())}
    order: list[str] = []
    for name, one in engines.items():
        one.add_observer(Noting(name, order))
    cases = {"drafts": Case("traversal", SHAPES[0]), "plain": Case("traversal", PLAIN)}
    runs = in_turns({name: (one, load(0.0).requests(cases[name], 0)) for name, one in engines.items()}, batch=3)
    assert runs["drafts"].texts == runs["plain"].texts
    num_tokens = dict.fromkeys(engines, 0)
    steps = {name: iter(run.steps) for name, run in runs.items()}
    for name in order:
        others = [num_tokens[other] for other in engines if other != name and num_tokens[other] < 80]
        assert num_tokens[name] <= min(others, default=80)
        num_tokens[name] += next(steps[name]).num_generated_tokens
    assert num_tokens == {"drafts": 80, "plain": 80}


class Noting(StepObserver):
    """Notes whose step it was."""

    def __init__(self, name, order):
        self._name, self._order = name, order

    def after_step(self, stats, rows):
        self._order.append(self._name)


def test_a_request_that_fails_fails_the_benchmark(engine, monkeypatch):
    """The bug: a failed request was counted as one with few tokens."""
    failed = structs.replace(engine.step(), events=(TokenEvent("bench-0", finish=FinishReason.ERROR, error="out of memory"),))
    monkeypatch.setattr(engine, "step", lambda: failed)
    monkeypatch.setattr(engine, "add", lambda _: None)
    with pytest.raises(RequestFailed, match="bench-0: out of memory"):
        run_case(engine, load(0.0).requests(Case("traversal", PLAIN), 0), concurrency=1)


def test_one_verifier_is_benchmarked_at_temperature_0():
    assert [case.name for case in cases_of(["traversal", "nss"], SHAPES, 0.0)] == ["plain", "traversal 3.1.0", "traversal 1.2.2"]
    assert len(cases_of(["traversal", "nss"], SHAPES, 0.7)) == 5


def test_table_has_one_line_per_result(engine):
    results = compare(engine, cases_of(["traversal"], SHAPES, 0.0), load(0.0), "tiny", num_rounds=1)
    assert len(table(results).splitlines()) == 1 + len(results)


def test_verifier_that_changes_tokens_is_detected(engine, monkeypatch):
    """The mutant: whatever is accepted, the extra token is 1 more than it should be, but only where something was drafted."""

    def shifted(trees, choices):
        verdicts = coupled.judge_greedy(trees, choices)
        return [
            type(verdict)(verdict.path, (verdict.extra_id + 1) % 61) if tree.num_nodes > 1 else verdict
            for tree, verdict in zip(trees, verdicts, strict=True)
        ]

    monkeypatch.setattr("engine.verify.dispatch.judge_greedy", shifted)
    with pytest.raises(OutputsDiffer, match="temperature 0"):
        compare(engine, cases_of(["traversal"], SHAPES, 0.0), load(0.0), "tiny", num_rounds=1)


@pytest.mark.parametrize("error", [OutputsDiffer("traversal 3.1.0 differs"), RequestFailed("bench-0: out of memory")])
def test_failed_run_is_one_line(error, monkeypatch, capsys):
    """A failed request, or a greedy text that drafts changed, ended the command in a traceback."""

    def fail(*_):
        raise error

    monkeypatch.setattr(bench_run, "_bench", fail)
    assert bench_run.bench(Settings(model="smollm2-135m"), {}, argparse.Namespace()) == 1
    assert capsys.readouterr().err == f"latebranch bench: {error}\n"


def oracle_of(target):
    drafter = RecordedText(target.vocab_size, torch.device("cpu"))
    return tiny_engine(target, drafter, FixedExpansion(PLAIN), "coupled")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_oracle_accepts_every_recorded_token(temperature):
    """Chains of 4 bring 20 tokens in 4 steps; the own drafter's texts are the same and take more steps."""
    target, draft = tiny_pair()
    own, oracle = tiny_engine(target, draft, verifier="coupled"), oracle_of(target)
    results, ceiling = compare_with_oracle(own, oracle, load(temperature), "tiny", num_rounds=2)
    by_name = {result.case: result for result in results}
    assert by_name["oracle 4.1.0"].block_efficiency == 5.0
    assert by_name["oracle 32.1.0"].block_efficiency == 20.0
    assert 1.0 < by_name["own drafter"].block_efficiency < 5.0
    assert {result.num_tokens for result in results} == {2 * 4 * 20}
    assert ceiling.own_share_low <= ceiling.own_share <= ceiling.own_share_high
    assert ceiling.ceiling == max(result.tokens_per_s for result in results if result.case.startswith("oracle"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("verifier", ["coupled", "traversal"])
def test_wrong_record_changes_no_text(temperature, verifier):
    """The mutant of the record: a wrong token ends its use. A verifier that needs draft distributions gets no drafts."""
    oracle = oracle_of(tiny_pair()[0])
    texts: dict[str, dict[str, list[int]]] = {}
    for name, chain in {"plain": PLAIN, "right": Expansion(4, 1, 0), "wrong": Expansion(4, 1, 0)}.items():
        requests = list(load(temperature).requests(Case(verifier, chain), 0))
        if name != "plain":
            recorded = [texts["plain"][one.request_id][:10] for one in requests]
            for ids in recorded if name == "wrong" else ():
                ids[7] += 1
            requests = [replace(one, prediction_ids=tuple(ids)) for one, ids in zip(requests, recorded, strict=True)]
        run = run_case(oracle, iter(requests), 2)
        texts[name] = run.texts
        if verifier == "coupled" or temperature == 0.0:
            num_steps = {"plain": 20, "right": 12, "wrong": 14}[name]
            assert sum(step.num_decoding_rows for step in run.steps) == num_steps * len(requests)
    assert texts["right"] == texts["wrong"] == texts["plain"]
