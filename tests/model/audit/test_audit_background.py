"""The background audit: sound engines pass, broken ones are found, and no client ever notices.

Seeds and request ids are fixed, so that a score is the same in every run.
"""

import asyncio
import logging
import secrets
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from msgspec import structs

from engine.audit.auditor import Auditor, is_selected
from engine.audit.background import AuditedEngine
from engine.audit.outcomes import CheckOutcome, Tally, tie_tolerance
from engine.audit.pit import NUM_BINS, uniformity_test
from engine.audit.record_check import Check, RecordCheck, check_of
from engine.build import build_served
from engine.core.config import EngineConfig, SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.rng_keys import Stream, stream_key
from engine.core.service import EngineHealth, EngineState
from engine.core.tree import Expansion
from engine.core.types import AuditStats, FinishReason, Progress, Request, SamplingParams, Speculation, TokenEvent
from engine.engine import Engine
from engine.sampling.distributions import warped_probs
from engine.teacher_forcing import MAX_CHUNK_LOGITS, MAX_CHUNK_TOKENS, KnownText
from engine.testing import tiny_engine
from engine.verify import coupled, two_phase
from engine.verify.verdict import Verdict
from engine.worker.inprocess import InProcessEngine
from server.metrics import ServerMetrics
from tests.clients import collect
from tests.model.driving import Session, greedy, run, sampled
from tests.model.tiny import own_logits, pair

PROMPT = (5, 9, 33, 4)
CONFIG = SchedulerConfig(max_running=64, max_step_tokens=1024, num_slots=4096, max_model_len=64)
TREE = Expansion(1, 3, 1)


@pytest.fixture
def numbered_secrets(monkeypatch):
    """Seeds that the engine makes are 0, 1, 2, ..., so that the run repeats itself."""
    seeds = count()
    monkeypatch.setattr(secrets, "randbits", lambda bits: next(seeds))


def audited(num_tokens=8, share=1.0, config=CONFIG, verifier="traversal", noise=0.1):
    engine = tiny_engine(*pair("llama", noise), FixedExpansion(TREE), verifier, config)
    return AuditedEngine(engine, Auditor(share, num_tokens, tie_tolerance("float32"), seed=1))


def news(session: Session) -> list[AuditStats]:
    return [stats.audit for stats in session.stats if stats.audit is not None]


def outcomes(session: Session) -> dict[str, Tally]:
    totals: dict[str, Tally] = {}
    for audit in news(session):
        for check, counts in audit.outcomes.items():
            tally = Tally(counts["match"], counts["near_tie"], counts["mismatch"])
            totals[check] = totals.get(check, Tally()) + tally
    return totals


def stats_of(auditor: Auditor) -> AuditStats:
    stats = auditor.taken_stats()
    assert stats is not None
    return stats


def bins(session: Session) -> list[int]:
    return [sum(column) for column in zip(*(audit.pit_bins for audit in news(session)), strict=True)]


def unseeded(number: int, max_tokens: int = 8, **sampling) -> Request:
    return Request(f"u{number}", (3 + number % 50, 9, 4), SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling))


def everything() -> list[Request]:
    """Return requests of all kinds, with every parameter that changes a distribution."""
    edits: dict[str, Any] = {
        "presence_penalty": 0.6,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": ((7, 2.0),),
    }
    return [
        greedy("g", PROMPT),
        replace(greedy("g-edits", PROMPT), sampling=SamplingParams(0.0, max_tokens=12, min_tokens=5, **edits)),
        sampled("c", PROMPT, seed=3),
        sampled("c-cut", PROMPT, seed=4, temperature=0.8, top_p=0.7, top_k=9, min_p=0.02, **edits),
        sampled("named", PROMPT, seed=5, verifier="traversal"),
        unseeded(1, top_p=0.8, temperature=1.3),
        unseeded(2, **edits),
    ]


@pytest.mark.usefixtures("numbered_secrets")
def test_a_resumed_request_is_not_audited():
    """Another engine returned the first tokens. The audit would judge the later tokens at the wrong positions."""
    begun, resumed = greedy("begun", PROMPT), replace(greedy("resumed", PROMPT), progress=Progress((7, 8)))
    alone, both = (run(audited(), requests) for requests in ([begun], [begun, resumed]))
    assert sum(tally.num_tokens for tally in outcomes(both).values()) == 8
    assert outcomes(both) == outcomes(alone)


def test_sound_engine_passes_the_audit():
    session = run(audited(num_tokens=6), everything())
    assert outcomes(session) == {Check.GREEDY: Tally(12), Check.COUPLED: Tally(12), Check.SAMPLED: Tally(12)}
    assert sum(bins(session)) == 12
    assert sum(audit.num_dropped for audit in news(session)) == 0


@pytest.mark.usefixtures("numbered_secrets")
@pytest.mark.parametrize("verifier", ["traversal", "specinfer", "block"])
def test_draws_of_sound_engine_fill_bins_evenly(verifier):
    session = run_in_turns(audited(verifier=verifier), 180)
    assert sum(bins(session)) == 180 * 8
    assert uniformity_test(bins(session)).p_value > 1e-3
    assert news(session)[-1].p_value == pytest.approx(uniformity_test(bins(session)).p_value)


def run_in_turns(engine, number):
    """Run unseeded requests, few enough at a time to find a place in the audit."""
    session = Session()
    for first in range(0, number, 60):
        part = run(engine, [unseeded(index) for index in range(first, first + 60)])
        session.stats += part.stats
    return session


def extra_after_the_root(trees, choices):
    """Take the extra token from the root's choice, wherever the path ends."""
    verdicts = _GREEDY(trees, choices)
    offsets = [sum(tree.num_nodes for tree in trees[:index]) for index in range(len(trees))]
    return [Verdict(one.path, choices[offset]) for one, offset in zip(verdicts, offsets, strict=True)]


_GREEDY = coupled.judge_greedy


def test_greedy_token_from_root_is_detected(monkeypatch, caplog):
    monkeypatch.setattr("engine.verify.dispatch.judge_greedy", extra_after_the_root)
    session = run(audited(noise=0.01), [greedy("g", PROMPT)])
    assert outcomes(session)[Check.GREEDY].num_mismatch
    assert any("greedy tokens are wrong" in record.message for record in caplog.records if record.levelno == logging.ERROR)


def test_noise_of_a_wrong_position_is_found(monkeypatch):
    monkeypatch.setattr(coupled, "_noise_key", lambda key, depth: stream_key(key.seed, key.root_position + depth, Stream.TOKEN))
    session = run(audited(), [sampled("c", PROMPT, seed=3)])
    assert outcomes(session)[Check.COUPLED].num_mismatch > 4


def draft_believed(self, forest, target_probs_NV, keys):
    """Accept the first path completely, whatever the target's probabilities."""
    return [
        Verdict((*one.path, *tree.children[one.path[-1]][:1]), one.extra_id)
        for tree, one in zip(forest.trees, _JUDGE(self, forest, target_probs_NV, keys), strict=True)
    ]


_JUDGE = two_phase.TwoPhase.judge


@pytest.mark.usefixtures("numbered_secrets")
def test_drafts_that_are_believed_are_found(monkeypatch, caplog):
    monkeypatch.setattr(two_phase.TwoPhase, "judge", draft_believed)
    session = run_in_turns(audited(), 180)
    assert news(session)[-1].p_value < 1e-6
    assert sum("do not have the target's distribution" in record.message for record in caplog.records) == 1


def one_token_more(logits_NV, sampling, rows):
    """Keep one token more than top-k allows."""
    return warped_probs(logits_NV, [replace(params, top_k=params.top_k + 1) for params in sampling], rows)


@pytest.mark.usefixtures("numbered_secrets")
def test_impossible_tokens_are_found(monkeypatch):
    monkeypatch.setattr("engine.verify.dispatch.warped_probs", one_token_more)
    session = run(audited(), [unseeded(index, top_k=2, temperature=1.5) for index in range(20)])
    assert outcomes(session)[Check.SAMPLED].num_mismatch


def stopped_at_the_likeliest(number):
    """Run requests that a client stops once it reads the likeliest first token, as stop strings do."""
    engine = audited(num_tokens=4)
    likeliest = int(own_logits("llama", [PROMPT])[0, -1].argmax())
    session = Session()
    for first in range(0, number, 60):
        for index in range(first, first + 60):
            engine.add(replace(unseeded(index, max_tokens=4, temperature=0.8), prompt_ids=PROMPT))
        while engine.has_work:
            output = engine.step()
            session.take(output)
            for event in output.events:
                if event.token_ids[:1] == (likeliest,):
                    engine.abort(event.request_id)
    return session


@pytest.mark.usefixtures("numbered_secrets")
def test_requests_that_are_aborted_count():
    session = stopped_at_the_likeliest(300)
    assert 300 < sum(bins(session)) < 1100
    assert uniformity_test(bins(session)).p_value > 1e-3


@pytest.mark.usefixtures("numbered_secrets")
def test_skipping_aborted_requests_flags_sound_engine(monkeypatch):
    """The mutant: only requests that ended by themselves count."""
    write = Auditor._append

    def without_aborted(self, record, event):
        if event.finish is FinishReason.ABORT:
            event = structs.replace(event, finish=FinishReason.ERROR)
        write(self, record, event)

    monkeypatch.setattr(Auditor, "_append", without_aborted)
    assert uniformity_test(bins(stopped_at_the_likeliest(600))).p_value < 1e-6


@pytest.mark.usefixtures("numbered_secrets")
def test_aborted_request_is_judged_by_its_tokens():
    engine = audited()
    engine.add(greedy("g", PROMPT))
    output = engine.step()
    engine.abort("g")
    session = run(engine, [])
    num_tokens = min(8, sum(len(event.token_ids) for event in output.events))
    assert outcomes(session) == {Check.GREEDY: Tally(num_tokens)}


@pytest.mark.parametrize("max_step_tokens", [8, 20, 1024])
def test_forced_sequence_has_the_target_logits(max_step_tokens):
    config = replace(CONFIG, max_running=8, max_step_tokens=max_step_tokens, max_model_len=256)
    engine = tiny_engine(*pair("llama"), config=config)
    text = KnownText(tuple(range(3, 60)) * 2, tuple(range(40, 55)))
    logits_NV = forced_logits(engine, text)
    expected_NV = own_logits("llama", [[*text.prompt_ids, *text.token_ids]])[0, len(text.prompt_ids) - 1 : -1]
    assert torch.allclose(logits_NV, expected_NV, atol=1e-4)
    assert not torch.allclose(logits_NV[1:], expected_NV[:-1], atol=1e-1)  # one place off would be seen
    assert not engine.has_work


def forced_logits(engine, text):
    forcing = engine.forcing()
    forcing.start(text)
    pieces = []
    while forcing.is_running:
        done = forcing.step()
        engine.check_integrity()
        assert done.num_tokens <= MAX_CHUNK_TOKENS, "a new client would wait for all of them"
        if done.logits_NV is not None:
            assert len(done.logits_NV) <= MAX_CHUNK_LOGITS
            pieces.append(done.logits_NV)
    assert forcing.num_used_slots == 0
    return torch.cat(pieces)


@pytest.mark.usefixtures("numbered_secrets")
def test_new_request_takes_slots_and_restarts_audit():
    """The prompt is longer than half the slots, so both cannot be in the cache."""
    config = SchedulerConfig(max_running=4, max_step_tokens=16, num_slots=64, max_model_len=64, prefix_block_tokens=0)
    engine, prompt = audited(config=config), tuple(range(3, 43))
    session = Session()
    engine.add(greedy("one", prompt))
    while not any(audit.num_pass_tokens for audit in news(session)):
        session.take(engine.step())
    engine.check_integrity()
    second = run(engine, [greedy("two", prompt)])
    assert second.stats[-1].num_used_slots == 0, "after the last pass nothing is in the cache"
    assert second.stats[0].num_used_slots == 16, "the chunk of the new request alone"
    session.stats += second.stats
    assert outcomes(session) == {Check.GREEDY: Tally(16)}


def test_audit_places_are_reserved_before_first_token():
    engine = audited()
    session = run(engine, [unseeded(index, max_tokens=2) for index in range(100)])
    assert sum(audit.num_dropped for audit in news(session)) == 36
    assert outcomes(session)[Check.SAMPLED].num_tokens == 64 * 2


def fail_at(name, monkeypatch):
    """Have the judge break down at a request of this name, after its first tokens."""
    add = RecordCheck.add

    def broken(self, logits_NV):
        if self.record.request.request_id == name and self.num_checked:
            raise ZeroDivisionError
        add(self, logits_NV)

    monkeypatch.setattr(RecordCheck, "add", broken)


@pytest.mark.parametrize("names", [("bad",), ("bad", "good"), ("good", "bad")])
def test_failed_judgement_drops_no_other_sequence(names, monkeypatch, caplog):
    """The bug: a failed judgement was dropped twice. The engine died, or a second sequence vanished."""
    fail_at("bad", monkeypatch)
    session = run(audited(num_tokens=12), [greedy(name, PROMPT) for name in names])
    assert sum(audit.num_dropped for audit in news(session)) == 1
    assert outcomes(session) == ({Check.GREEDY: Tally(12)} if "good" in names else {})
    assert all(outcome.finish is FinishReason.LENGTH for outcome in session.outcomes.values())
    assert "cannot be checked" in caplog.text


@pytest.mark.usefixtures("numbered_secrets")
def test_abandoned_sequence_is_not_counted(monkeypatch):
    fail_at("u1", monkeypatch)
    session = run(audited(num_tokens=12), [unseeded(1, max_tokens=12)])
    assert sum(map(sum, (audit.pit_bins for audit in news(session)))) == 0


def test_failed_pass_counts_for_no_request(monkeypatch):
    fail_at("bad", monkeypatch)
    session = run(audited(num_tokens=12), [greedy("bad", PROMPT)])
    (failed,) = [audit for audit in news(session) if audit.num_dropped]
    assert failed.is_pass
    metrics = ServerMetrics("tiny", 64, lambda: EngineHealth(EngineState.READY, 0.0, 0, ""))
    for stats in session.stats:
        metrics.steps.on_step(stats)
    real = sum(stats.audit is None or not stats.audit.is_pass for stats in session.stats)
    (line,) = [line for line in metrics.render().decode().splitlines() if line.startswith("latebranch_steps_total{")]
    assert float(line.split()[-1]) == real < len(session.stats)


def test_the_shortest_prompt_is_judged_first():
    """The bug: a long sequence at the head of the queue, too long for any idle moment, blocked all others."""
    auditor = Auditor(1.0, 4, tie_tolerance("float32"), seed=0)
    for name, prompt in (("long", tuple(range(40))), ("short", PROMPT), ("middle", tuple(range(9)))):
        auditor.select(greedy(name, prompt))
        auditor.observe([TokenEvent(name, (4,), finish=FinishReason.LENGTH)])
    order = []
    while auditor.has_pending:
        assert auditor.start().request.request_id == auditor.start().request.request_id, "one that was stopped begins anew"
        order.append(auditor.start().request.request_id)
        auditor.check(torch.zeros(1, 61))
    assert order == ["short", "middle", "long"]


def test_all_audit_series_exist_from_the_start():
    text = ServerMetrics("tiny", 64, lambda: EngineHealth(EngineState.STARTING, 0.0, 0, "")).render().decode()
    lines = [line for line in text.splitlines() if not line.startswith("#") and "created" not in line]
    tokens = [line for line in lines if line.startswith("latebranch_audit_tokens_total{")]
    assert len(tokens) == len(Check) * len(CheckOutcome)
    assert all(sum(f'check="{check}"' in line for line in tokens) == len(CheckOutcome) for check in Check)
    assert all(sum(f'outcome="{outcome}"' in line for line in tokens) == len(Check) for outcome in CheckOutcome)
    bins_ = [line for line in lines if line.startswith("latebranch_audit_pit_bins_total{")]
    assert len(bins_) == NUM_BINS
    assert any(f'bin="{NUM_BINS - 1}"' in line for line in bins_)


def test_logits_that_are_not_finite_never_match():
    auditor = Auditor(1.0, 4, tie_tolerance("float32"), seed=0)
    auditor.select(greedy("a", PROMPT))
    auditor.observe([TokenEvent("a", (4, 5), finish=FinishReason.LENGTH)])
    auditor.start()
    auditor.check(torch.full((2, 61), float("nan")))
    assert stats_of(auditor).outcomes == {"greedy": {"match": 0, "near_tie": 0, "mismatch": 2}}


@pytest.mark.parametrize(("temperature", "num_binned"), [(0.4, 0), (0.6, 1)])
def test_draws_within_rounding_fill_no_bin(temperature, num_binned):
    """In bfloat16 a near tie is no mismatch. If the near tie carries the whole distribution, its draws test nothing."""
    auditor = Auditor(1.0, 4, tie_tolerance("bfloat16"), seed=0)
    auditor.select(unseeded(1, max_tokens=1, temperature=temperature))
    auditor.observe([TokenEvent("u1", (1,), finish=FinishReason.LENGTH)])
    auditor.start()
    auditor.check(torch.tensor([[20.0, 19.75, *[0.0] * 59]]))
    assert sum(stats_of(auditor).pit_bins) == num_binned


def test_failed_request_is_not_judged():
    auditor = Auditor(1.0, 4, tie_tolerance("float32"), seed=0)
    auditor.select(greedy("a", PROMPT))
    auditor.observe([TokenEvent("a", (4,)), TokenEvent("a", finish=FinishReason.ERROR, error="x")])
    assert not auditor.has_pending
    assert auditor.taken_stats() is None


def test_audited_share_is_selected_by_name():
    chosen = [name for name in map(str, range(4000)) if is_selected(name, 0.1)]
    assert 300 < len(chosen) < 500
    assert set(chosen) <= {name for name in map(str, range(4000)) if is_selected(name, 0.2)}
    assert not any(is_selected(name, 0.0) for name in chosen)
    assert all(is_selected(str(index), 1.0) for index in range(100))


@pytest.mark.parametrize(
    ("temperature", "seed", "verifier", "check"),
    [
        (0.0, None, None, Check.GREEDY),
        (0.0, 3, "traversal", Check.GREEDY),
        (1.0, None, None, Check.SAMPLED),
        (1.0, None, "coupled", Check.SAMPLED),
        (1.0, 3, None, Check.COUPLED),
        (1.0, 3, "coupled", Check.COUPLED),
        (1.0, 3, "traversal", None),  # the same seed may come again and again: no fresh draws
    ],
)
def test_checkable_requests_are_selected(temperature, seed, verifier, check):
    request = Request("r", PROMPT, SamplingParams(temperature, seed=seed), Speculation(verifier=verifier))
    assert check_of(request) is check


def test_worker_runs_audit_only_if_enabled(monkeypatch):
    monkeypatch.setattr("engine.build.build_engine", lambda config, adaptive, **_: tiny_engine(*pair("llama")))
    assert isinstance(build_served(EngineConfig("tiny")), Engine)
    engine: Any = build_served(EngineConfig("tiny", audit_share=1.0, audit_tokens=3))
    assert outcomes(run(engine, [greedy("g", PROMPT)])) == {Check.GREEDY: Tally(3)}


async def test_served_engine_reports_its_audit():
    """From the engine's thread to the exposition text."""
    engine = InProcessEngine(audited, CONFIG)
    metrics = ServerMetrics("tiny", 64, lambda: engine.health)
    engine.add_listener(metrics.steps.on_step)
    engine.add_listener(metrics.audit.on_step)
    await engine.start()
    assert (await collect(engine, greedy("g", PROMPT)))[-1].finish is FinishReason.LENGTH
    steps = (await audited_text(metrics)).split("latebranch_steps_total{")[1].split("\n")[0]
    await engine.stop()
    assert float(steps.split()[-1]) <= 12, "passes of the audit are no steps"


async def audited_text(metrics):
    """Return the exposition text once it reports the audit of the request."""
    while True:
        text = metrics.render().decode()
        if 'check="greedy",engine="0",model_name="tiny",outcome="match"} 8.0' in text:
            assert "latebranch_audit_p_value" in text
            return text
        await asyncio.sleep(0.01)
