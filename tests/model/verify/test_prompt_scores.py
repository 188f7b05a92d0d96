"""Log-probabilities of prompts are the target's own, reported once, with chunks, preemption and trees in the batch."""

from dataclasses import replace

import pytest
import torch
from msgspec import structs

from engine.core.config import SchedulerConfig
from engine.core.types import ErrorCode, FinishReason, Progress, Request, SamplingParams
from engine.engine import Engine
from engine.model.passes import NO_DRAWS
from engine.testing import tiny_engine
from engine.verify import prompt_logprobs as prompt_scores
from engine.verify.dispatch import logprobs_of
from tests.model.driving import Session, greedy, run
from tests.model.kv_cache.test_kv_cache import RandomExpansion
from tests.model.mixed import PROMPTS, mixed_requests
from tests.model.tiny import own_logits, pair

CROWDED = SchedulerConfig(max_running=8, max_step_tokens=24, num_slots=90, max_model_len=64)


def requests_with_scores() -> list[Request]:
    """Mixed requests with ever more alternatives, one with a prompt of one token, and one without prompt scores."""
    requests = [*mixed_requests(max_tokens=16), greedy("short", [7])]
    scored = [replace(one, sampling=replace(one.sampling, num_prompt_logprobs=row)) for row, one in enumerate(requests)]
    return [*scored, greedy("silent", PROMPTS[2])]


def session_of(config: SchedulerConfig = CROWDED) -> Session:
    return run(tiny_engine(*pair("llama"), RandomExpansion(3), config=config), requests_with_scores())


def check(session: Session) -> None:
    """Compare with a pass over the prompt alone."""
    for request in requests_with_scores():
        events = session.outcomes[request.request_id].events
        reported = [one for event in events for one in event.prompt_logprobs]
        num_top = request.sampling.num_prompt_logprobs
        if num_top is None:
            assert not reported
            continue
        first = next(index for index, event in enumerate(events) if event.token_ids)
        assert not any(event.prompt_logprobs for event in events[first + 1 :])
        probs = torch.log_softmax(own_logits("llama", [request.prompt_ids])[0, :-1].double(), -1)
        assert len(reported) == len(probs) == len(request.prompt_ids) - 1
        for distribution, token_id, one in zip(probs, request.prompt_ids[1:], reported, strict=True):
            assert (
                one.rank == 1 + int((distribution > distribution[token_id] + 1e-4).sum())
                or distribution.sub(distribution[token_id]).abs().sort().values[1] < 1e-3
            )
            assert one.logprob == pytest.approx(float(distribution[token_id]), abs=1e-4)
            assert list(one.top_logprobs) == pytest.approx(distribution.topk(num_top).values.tolist(), abs=1e-4)


def test_prompts_are_scored_by_the_target():
    check(session_of(SchedulerConfig(num_slots=2048, max_model_len=256)))


def test_chunks_and_preemption_change_nothing():
    session = session_of()
    assert sum(stats.num_preemptions for stats in session.stats)
    assert any(event.prompt_logprobs and not event.token_ids for one in session.outcomes.values() for event in one.events)
    check(session)


def reported_again(plan, trees):
    """All of a chunk, fed for the first time or not."""
    rows = [
        structs.replace(row, num_new_prompt_tokens=max(0, min(row.end, row.num_prompt_tokens) - row.context_len))
        for row in plan.rows
    ]
    return _SCORED_BY(structs.replace(plan, rows=tuple(rows)), trees)


def after_the_token_itself(plan, trees):
    return [replace(one, sources=range(one.sources.start + 1, one.sources.stop + 1)) for one in _SCORED_BY(plan, trees)]


def trees_forgotten(plan, trees):
    return _SCORED_BY(plan, [type(tree).single(tree.token_ids[0]) for tree in trees])


def first_place_for_all(logits, nodes, ids, num_top):
    return logprobs_of(logits, [nodes[0]] * len(ids), ids, num_top)


_SCORED_BY = prompt_scores.scored_prompt_tokens


@pytest.mark.parametrize(
    ("where", "mutant"),
    [
        ("engine.engine.scored_prompt_tokens", reported_again),
        ("engine.engine.scored_prompt_tokens", after_the_token_itself),
        ("engine.engine.scored_prompt_tokens", trees_forgotten),
        ("engine.verify.prompt_logprobs.logprobs_of", first_place_for_all),
    ],
)
def test_scores_detect_mutants(where, mutant, monkeypatch):
    monkeypatch.setattr(where, mutant)
    with pytest.raises((AssertionError, IndexError)):  # an index: behind the last place there is none
        check(session_of())


def test_a_prompt_is_scored_without_generating() -> None:
    """`max_tokens` 0 was refused. Such a request has its scores and its end, also where its prompt fills every slot."""
    full = SchedulerConfig(max_running=4, max_step_tokens=16, num_slots=48, max_model_len=48)
    prompt = tuple(3 + 7 * at % 50 for at in range(48))
    scored = Request("scored", prompt, SamplingParams(max_tokens=0, num_prompt_logprobs=1, num_logprobs=1))
    echoed = Request("echoed", prompt[:5], SamplingParams(temperature=0.0, max_tokens=0))
    engine = tiny_engine(*pair("llama"), RandomExpansion(3), config=full)
    outcomes = run(engine, [scored, echoed, greedy("beside", prompt[:7])]).outcomes
    assert len(outcomes["beside"].ids) == 12
    for name in ("scored", "echoed"):
        assert (outcomes[name].ids, outcomes[name].finish) == ([], FinishReason.LENGTH)
    reported = [one for event in outcomes["scored"].events for one in event.prompt_logprobs]
    distribution = torch.log_softmax(own_logits("llama", [prompt])[0, :-1].double(), -1)
    assert [one.logprob for one in reported] == pytest.approx(
        [float(row[i]) for row, i in zip(distribution, prompt[1:])], abs=1e-4
    )


@pytest.mark.parametrize("num_reported", [0, 3])
def test_a_scored_prompt_is_resumed(num_reported: int) -> None:
    """A resumed request without tokens is not finished, although it generates none."""
    request = Request("r", (5, 6, 7, 8, 9, 5), SamplingParams(max_tokens=0, num_prompt_logprobs=0))
    resumed = replace(request, progress=Progress((), num_reported))
    reported = [
        [one.logprob for event in run(tiny_engine(*pair("llama")), [each]).outcomes["r"].events for one in event.prompt_logprobs]
        for each in (request, resumed)
    ]
    assert reported[1] == pytest.approx(reported[0][num_reported:], abs=1e-4)


BROKEN = "specinfer"


def with_a_broken_probs(engine: Engine) -> Engine:
    """Return the engine with NaN in the last distribution of each chunk of one request's prompt only."""
    forward = engine.target.forward

    def broken(plan, trees, places=(), draws=NO_DRAWS, walks=None):
        logits_NV = forward(plan, trees, places, draws, walks).clone()
        first = sum(tree.num_nodes for tree in trees)
        for one in _SCORED_BY(plan, trees):
            first += len(one.token_ids)
            if one.row.request_id == BROKEN and one.token_ids:
                logits_NV[first - 1, 3] = float("nan")
        return logits_NV

    engine.target.forward = broken  # type: ignore[method-assign]
    return engine


def check_a_broken_distribution_ends_its_request_alone(config: SchedulerConfig) -> None:
    requests = requests_with_scores()
    engine = with_a_broken_probs(tiny_engine(*pair("llama"), RandomExpansion(3), config=config))
    session = run(engine, requests)
    (event,) = session.outcomes.pop(BROKEN).events
    assert (event.finish, event.error_code, event.token_ids) == (FinishReason.ERROR, ErrorCode.LOGITS_NOT_FINITE, ())
    assert not event.prompt_logprobs
    engine.check_integrity()
    for one in session.outcomes.values():
        assert one.events[-1].finish in (FinishReason.STOP, FinishReason.LENGTH)


@pytest.mark.parametrize("config", [CROWDED, SchedulerConfig(num_slots=2048, max_model_len=256)], ids=["chunks", "whole"])
def test_broken_prompt_distribution_fails_only_its_request(config):
    """The bug: its log-probabilities were reported as NaN, which JSON does not have."""
    check_a_broken_distribution_ends_its_request_alone(config)


def test_unrequested_broken_distribution_is_detected(monkeypatch):
    monkeypatch.setattr(prompt_scores, "are_valid", lambda logits_NV: [True] * len(logits_NV))
    with pytest.raises((AssertionError, ValueError)):
        check_a_broken_distribution_ends_its_request_alone(CROWDED)
