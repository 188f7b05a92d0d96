"""Events of requests: ends, aborts, broken logits, refusals, log-probabilities, and consistent counts."""

from dataclasses import replace

import pytest
import torch
from msgspec import structs

from engine import engine as engine_module
from engine.core.config import SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.tree import Expansion
from engine.core.types import ErrorCode, FinishReason, Request, SamplingParams, Speculation
from engine.core.validation import RequestRefused
from engine.engine import Engine
from engine.model.causal_lm import adopt
from engine.scheduler.scheduler import Scheduler
from engine.testing import tiny_engine, tiny_module
from engine.verify import dispatch as judge
from tests.model.driving import Session, greedy, run, sampled
from tests.model.engine.test_engine import LONG, TIGHT, engine_of, generated, mixed_requests, seeded_text
from tests.model.kv_cache.test_kv_cache import RandomExpansion
from tests.model.passes import CPU
from tests.model.tiny import model, own_logits, pair

CHAIN = Expansion(4, 1, 0)


def perfect_engine(expansion: Expansion = CHAIN) -> Engine:
    """Return an engine whose drafter is its target. Whole paths are accepted, so sequences end inside them."""
    return tiny_engine(model("llama"), model("llama"), FixedExpansion(expansion))


# Where texts end.


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_is_exact(max_tokens):
    session = run(perfect_engine(), [greedy("r", LONG, max_tokens)])
    assert session.outcomes["r"].ids == generated("llama", tuple(LONG), 12)[:max_tokens]
    assert session.outcomes["r"].finish is FinishReason.LENGTH


TEXT = generated("llama", tuple(LONG), 12)


@pytest.mark.parametrize("stop_id", dict.fromkeys(TEXT))
@pytest.mark.parametrize("source", ["request", "model"])
def test_stop_token_inside_path_ends_the_sequence(stop_id, source):
    engine = perfect_engine()
    request = greedy("r", LONG)
    if source == "model":
        engine.info = replace(engine.info, eos_token_ids=(stop_id,))
        request = replace(request, sampling=replace(request.sampling, ignore_eos=False))
    else:
        request = replace(request, sampling=replace(request.sampling, stop_token_ids=(stop_id,)))
    outcome = run(engine, [request]).outcomes["r"]
    assert outcome.ids == TEXT[: TEXT.index(stop_id) + 1]
    assert outcome.finish is FinishReason.STOP
    assert outcome.events[-1].stop_token_id == stop_id


def test_model_end_token_is_ignored_on_request():
    engine = perfect_engine()
    engine.info = replace(engine.info, eos_token_ids=(TEXT[3],))
    assert run(engine, [greedy("r", LONG)]).outcomes["r"].ids == TEXT


# Aborts.


def test_waiting_and_running_requests_can_be_aborted():
    engine = tiny_engine(*pair("llama"), config=SchedulerConfig(max_running=1, num_slots=256, max_model_len=64))
    for name in ("running", "waiting", "other"):
        engine.add(greedy(name, LONG))
    session = Session()
    session.take(engine.step())
    engine.abort("running")
    engine.abort("waiting")
    engine.abort("waiting")
    engine.abort("unknown")
    engine.check_integrity()
    session.take(engine.step())
    assert session.outcomes["running"].finish is FinishReason.ABORT
    assert session.outcomes["waiting"].finish is FinishReason.ABORT
    assert not session.outcomes["waiting"].ids
    assert run(engine, []).texts() == {"other": TEXT[len(session.outcomes["other"].ids) :]}


def test_last_abort_is_reported_without_a_pass():
    """The step had no token to feed, and the model was run on none: the whole engine failed."""
    engine = perfect_engine()
    engine.add(greedy("r", LONG))
    engine.step()
    engine.abort("r")
    session = run(engine, [])
    assert session.outcomes["r"].finish is FinishReason.ABORT
    assert [stats.num_used_slots for stats in session.stats] == [0]


# Broken logits.

BROKEN_ID = 60


def broken_engine(drafter: bool) -> Engine:
    """Return an engine whose models know NaN of one token and nothing else that is wrong."""
    models = []
    for seed in (0, 0):
        module = tiny_module("llama", seed)
        models.append(adopt(module, CPU))
        module.model.embed_tokens.weight.data[BROKEN_ID] = float("nan")
    config = SchedulerConfig(num_slots=200, max_model_len=64)
    return tiny_engine(models[0], models[1] if drafter else None, FixedExpansion(Expansion(1, 2, 2)), config=config)


@pytest.mark.parametrize("has_drafter", [True, False])
@pytest.mark.parametrize(
    "kind", [SamplingParams(temperature=0.0), SamplingParams(seed=1), SamplingParams()], ids=["greedy", "seeded", "unseeded"]
)
def test_nan_fails_only_its_own_request(kind, has_drafter):
    """The other requests continue. A request that gets its slots afterwards reads none of its keys."""
    engine = broken_engine(has_drafter)
    broken = Request("broken", (5, BROKEN_ID, 7), replace(kind, max_tokens=8, ignore_eos=True))
    mates = [greedy("greedy", LONG), sampled("seeded", LONG[:7], seed=3, top_k=3)]
    session = run(engine, [mates[0], broken, mates[1]])
    event = session.outcomes["broken"].events[-1]
    assert (event.finish, event.token_ids) == (FinishReason.ERROR, ())
    assert event.error == "the target's logits are not finite (at position 2)"
    assert event.error_code is ErrorCode.LOGITS_NOT_FINITE
    assert session.outcomes["greedy"].ids == TEXT
    assert session.outcomes["seeded"].ids == seeded_text("llama", mates[1])
    later = [greedy(str(row), LONG) for row in range(4)]
    assert run(engine, later).texts() == {str(row): TEXT for row in range(4)}


# Refusals.


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request("r", ()), "at least one token"),
        (Request("r", (5,) * 60, SamplingParams(max_tokens=5)), "60 prompt tokens and 5 to generate exceed 64"),
        (Request("r", (5, 61)), r"must be in \[0, 61\)"),
        (Request("r", (5, -1)), r"must be in \[0, 61\)"),
        (Request("r", (5,), prediction_ids=(5, 61)), r"must be in \[0, 61\)"),
        (Request("r", (5,), prediction_ids=(5,) * 65), "a prediction of 65 tokens exceeds 64"),
        (Request("r", (5,), speculation=Speculation(verifier="majority")), "no verifier is named 'majority'"),
    ],
)
def test_impossible_request_is_refused(request_, reason):
    engine = engine_of("llama", "none", config=TIGHT)
    with pytest.raises(RequestRefused, match=reason):
        engine.add(request_)
    assert not engine.has_work


def test_the_longest_request_that_fits_runs():
    config = SchedulerConfig(max_running=4, max_step_tokens=16, num_slots=64, max_model_len=64)
    engine = engine_of("llama", "model", CHAIN, config)
    assert len(run(engine, [greedy("r", (5,) * 50, 14)]).outcomes["r"].ids) == 14


def test_id_in_use_is_refused_then_free():
    engine = perfect_engine()
    engine.add(greedy("r", LONG))
    with pytest.raises(ValueError, match="in use"):
        engine.add(greedy("r", LONG))
    run(engine, [])
    assert run(engine, [greedy("r", LONG)]).outcomes["r"].ids == TEXT


# Log-probabilities.


def check_logprobs(session: Session, requests: list[Request]) -> None:
    """Compare with the raw log-probabilities of a teacher-forced pass, at every emitted token."""
    for request in requests:
        outcome = session.outcomes[request.request_id]
        num_top = request.sampling.num_logprobs
        text = [*request.prompt_ids, *outcome.ids]
        probs = torch.log_softmax(own_logits("llama", [text])[0, len(request.prompt_ids) - 1 : -1].double(), -1)
        assert len(outcome.logprobs) == len(outcome.ids) == len(probs)
        for distribution, token_id, one in zip(probs, outcome.ids, outcome.logprobs, strict=True):
            assert one.logprob == pytest.approx(float(distribution[token_id]), abs=1e-4)
            assert list(one.top_logprobs) == pytest.approx(distribution.topk(num_top).values.tolist(), abs=1e-4)
            assert [float(distribution[i]) for i in one.top_ids] == pytest.approx(one.top_logprobs, abs=1e-4)


def requests_with_logprobs() -> list[Request]:
    requests = [
        greedy("greedy", LONG),
        sampled("coupled", LONG[:6], seed=3, temperature=0.5),
        sampled("traversal", LONG[:9], seed=4, verifier="traversal", temperature=0.5),
        sampled("specinfer", LONG[:3], seed=5, verifier="specinfer", top_p=0.8),
    ]
    return [replace(one, sampling=replace(one.sampling, num_logprobs=row)) for row, one in enumerate(requests)]


def test_logprobs_are_the_targets_own():
    """Each token has one, also when accepted inside a tree. Without a request for them there are none."""
    requests = requests_with_logprobs()
    engine = tiny_engine(*pair("llama"), RandomExpansion(2))
    session = run(engine, [*requests, greedy("silent", LONG)])
    assert not session.outcomes["silent"].logprobs
    for request in requests:
        assert sum(event.num_accepted_tokens for event in session.outcomes[request.request_id].events) > 0
    check_logprobs(session, requests)


def test_logprobs_detect_one_node_for_the_path(monkeypatch):
    monkeypatch.setattr(
        engine_module,
        "logprobs_of",
        lambda logits, nodes, ids, num_top: judge.logprobs_of(logits, [nodes[0]] * len(ids), ids, num_top),
    )
    requests = requests_with_logprobs()
    with pytest.raises(AssertionError):
        check_logprobs(run(tiny_engine(*pair("llama"), RandomExpansion(2)), requests), requests)


# Numbers.


def check_stats(session: Session, requests: list[Request]) -> None:
    """Compare each step's numbers with its events, and their sums with the texts."""
    is_preempting = any(stats.num_preemptions for stats in session.stats)
    for stats in session.stats:
        accepted, rows = stats.num_accepted_tokens, stats.num_decoding_rows
        assert sum(stats.accepted_per_depth) == accepted
        assert sum(stats.expansions.values()) == rows
        assert accepted <= stats.num_generated_tokens <= accepted + rows
        fed = stats.num_target_tokens - stats.num_draft_tokens
        assert fed >= rows
        if not is_preempting:  # else tokens are fed a second time
            assert fed <= stats.num_prompt_tokens + rows
        assert stats.num_used_slots <= stats.num_slots
        assert min(stats.expected_tokens, stats.num_realised_tokens) >= stats.num_expected_rows
    assert [stats.step for stats in session.stats] == list(range(1, len(session.stats) + 1))
    outcomes = session.outcomes.values()
    events = [event for outcome in outcomes for event in outcome.events]
    assert sum(stats.num_generated_tokens for stats in session.stats) == sum(len(outcome.ids) for outcome in outcomes)
    assert sum(stats.num_accepted_tokens for stats in session.stats) == sum(event.num_accepted_tokens for event in events)
    assert sum(stats.num_draft_tokens for stats in session.stats) == sum(event.num_draft_tokens for event in events)
    unfinished = [event for event in events if event.finish is None]
    assert all(len(event.token_ids) == event.num_accepted_tokens + 1 for event in unfinished)
    reached = sum(stats.num_prompt_tokens + stats.num_prefix_hits for stats in session.stats)
    assert reached == sum(len(request.prompt_ids) for request in requests)
    assert (session.stats[-1].num_running, session.stats[-1].num_waiting, session.stats[-1].num_used_slots) == (0, 0, 0)


@pytest.mark.parametrize("config", [TIGHT, SchedulerConfig(num_slots=1024, max_model_len=64)], ids=["tight", "roomy"])
def test_numbers_add_up(config):
    requests = mixed_requests()
    check_stats(run(engine_of("llama", "model", Expansion(2, 2, 1), config), requests), requests)


def test_counts_detect_accepted_tokens_before_the_cut(monkeypatch):
    commit = Scheduler.commit
    monkeypatch.setattr(
        Scheduler, "commit", lambda self, row, result: structs.replace(commit(self, row, result), num_accepted=len(result.path))
    )
    with pytest.raises(AssertionError):
        check_stats(run(perfect_engine(), [greedy("r", LONG)]), [greedy("r", LONG)])
