"""Several steps of plain decoding in a row: the texts, ends, events and accounts of single steps."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from engine.core.config import SchedulerConfig
from engine.core.policy import PlainDecoding
from engine.core.types import ErrorCode, FinishReason, Progress, Request, SamplingParams, Speculation
from engine.engine import Engine
from engine.model.causal_lm import adopt
from engine.model.linear_backends import NATIVE
from engine.native.walks import Steps
from engine.scheduler.run_pacing import RunPacing
from engine.scheduler.scheduler import MostSteps, Scheduler
from engine.scheduler.sequence import Sequence
from engine.scheduler.slot_allocator import IntegrityError
from engine.testing import tiny_engine, tiny_module
from engine.verify import dispatch
from engine.worker.inprocess import InProcessEngine
from tests.api.harness import MODEL, in_process
from tests.model.driving import Session, greedy, run, run_arriving, sampled
from tests.model.mixed import PROMPTS, mixed_requests
from tests.model.native_models import native
from tests.model.passes import CPU
from tests.needs import needs_library
from tests.tokenizers_for_tests import byte_level

pytestmark = needs_library
ROOMY = SchedulerConfig(num_slots=2048, max_model_len=256)
CRAMPED = SchedulerConfig(num_slots=96, max_model_len=90)  # less than the requests need together
CACHING = SchedulerConfig(num_slots=512, max_model_len=256, prefix_block_tokens=4)
REQUESTS = [
    *mixed_requests(max_tokens=31),
    sampled("nucleus", PROMPTS[1], seed=5, max_tokens=23, top_p=0.7, top_k=20),
    sampled("floor", PROMPTS[0], seed=6, max_tokens=19, min_p=0.05, temperature=1.4),
    Request("stops", (4, 5, 6), SamplingParams(seed=5, max_tokens=60, stop_token_ids=(3, 7, 9))),
    Request("greedy stops", (9, 5), SamplingParams(temperature=0.0, max_tokens=60, stop_token_ids=tuple(range(20)))),
    greedy("short", PROMPTS[2], max_tokens=2),
]


def engine_of(most_steps, monkeypatch, config=ROOMY, family="llama", precision="float32") -> Engine:
    """Return an engine that decodes plainly, and checks every slot that it reads."""
    monkeypatch.setattr(RunPacing, "most_steps", lambda *_: MostSteps(most_steps))
    return tiny_engine(native(family, precision), None, PlainDecoding(), config=config, has_canary=True)


def outcomes(session: Session) -> dict[str, tuple[list[int], FinishReason | None]]:
    return {name: (one.ids, one.finish) for name, one in session.outcomes.items()}


def both(monkeypatch, most_steps: int, requests=REQUESTS, **given) -> tuple[Session, Session]:
    """Return the sessions of single steps and of runs."""
    return tuple(run(engine_of(most, monkeypatch, **given), requests) for most in (1, most_steps))  # type: ignore[return-value]


def longest(session: Session) -> int:
    return max(one.num_steps for one in session.stats)


@pytest.mark.parametrize("most_steps", [2, 3, 8])
@pytest.mark.parametrize(("family", "precision"), [("llama", "float32"), ("gemma3", "float32"), ("qwen3", "compact")])
def test_runs_give_texts_of_single_steps(family, precision, most_steps, monkeypatch):
    """Rows end inside runs, by stop tokens and at their limits."""
    single, runs = both(monkeypatch, most_steps, family=family, precision=precision)
    assert outcomes(runs) == outcomes(single)
    assert longest(single) == 1 < longest(runs) <= most_steps
    assert {one.finish for one in runs.outcomes.values()} == {FinishReason.STOP, FinishReason.LENGTH}


def broken(name, change):
    """Return a patch that changes one argument of Steps."""

    def patch(monkeypatch):
        def of(most, slots, seeds, stop_ids):
            given = {"most": most, "slots": slots, "seeds": seeds, "stop_ids": stop_ids}
            return Steps(**{**given, name: change(given[name])})

        monkeypatch.setattr(dispatch, "Steps", of)

    return patch


def test_noise_of_other_seeds_changes_texts(monkeypatch):
    expected = outcomes(run(engine_of(1, monkeypatch), REQUESTS))
    broken("seeds", lambda seeds: [seed + 1 for seed in seeds])(monkeypatch)
    assert outcomes(run(engine_of(4, monkeypatch), REQUESTS)) != expected


def test_wrong_slots_are_detected(monkeypatch):
    """The mutant: later steps overwrite one slot, so that the table has slots that were never written."""
    broken("slots", lambda of_rows: [of_row[:1] * len(of_row) for of_row in of_rows])(monkeypatch)
    with pytest.raises(IntegrityError):
        run(engine_of(4, monkeypatch), REQUESTS)


def test_cramped_slots_give_same_texts(monkeypatch):
    """Preempted rows begin anew. A run takes only free slots, so it preempts nothing that single steps do not."""
    single, runs = both(monkeypatch, 8, config=CRAMPED)
    assert outcomes(runs) == outcomes(single)
    assert sum(one.num_preemptions for one in single.stats) > 0
    assert longest(runs) > 1
    assert all(one.num_preemptions == 0 for one in runs.stats if one.num_steps > 1)


def test_runs_beyond_free_slots_are_detected(monkeypatch):
    """The mutant: the slots of later steps are not counted."""
    monkeypatch.setattr(Scheduler, "_num_steps", lambda self, sequences, trees, most: most.plain)
    with pytest.raises((AssertionError, ValueError, IndexError, RuntimeError)):
        test_cramped_slots_give_same_texts(monkeypatch)


def test_rows_join_and_leave_between_runs(monkeypatch):
    """Requests that arrive and are aborted at any time change no text of others."""
    expected = run(engine_of(1, monkeypatch), REQUESTS).texts()
    for seed in range(6):
        rng = random.Random(seed)
        aborted = rng.choice(REQUESTS[:4]).request_id
        session = run_arriving(engine_of(5, monkeypatch), REQUESTS, rng, aborted)
        texts = session.texts()
        assert longest(session) > 1
        assert {name: texts[name] for name in texts if name != aborted} == {
            name: text for name, text in expected.items() if name != aborted
        }
        assert texts[aborted] == expected[aborted][: len(texts[aborted])]


@pytest.mark.parametrize("num_seen", [1, 5, 9])
def test_requests_resume_after_part_of_run(num_seen, monkeypatch):
    """A worker that is killed has reported whole runs; the next one goes on with other runs."""
    for request in REQUESTS[:6]:
        expected = run(engine_of(1, monkeypatch), [request]).texts()[request.request_id]
        part = tuple(expected[:num_seen])
        resumed = replace(request, progress=Progress(part, 0))
        found = run(engine_of(4, monkeypatch), [resumed]).texts()[request.request_id]
        assert [*part, *found] == expected


def test_accounts_count_steps_not_drafts(monkeypatch):
    single, runs = both(monkeypatch, 6)
    totals = [
        {
            "tokens": sum(one.num_generated_tokens for one in session.stats),
            "row steps": sum(one.num_row_steps for one in session.stats if not one.num_prompt_tokens),
            "target's": sum(one.num_target_tokens for one in session.stats),
            "steps": sum(one.num_steps for one in session.stats),
        }
        for session in (single, runs)
    ]
    assert totals[0] == totals[1]
    assert len(runs.stats) < len(single.stats) / 2
    assert not any(one.num_drafts or one.num_draft_tokens or one.num_accepted_tokens for one in runs.stats)
    events = [event for one in runs.outcomes.values() for event in one.events]
    assert not any(event.num_draft_tokens or event.num_accepted_tokens for event in events)
    assert all(event.num_steps == len(event.token_ids) for event in events if event.token_ids)
    assert max(event.num_steps for event in events) == 6


def test_work_after_stop_is_detected(monkeypatch):
    """The mutant: the library knows no stop tokens. The texts are cut at them in any case."""
    broken("stop_ids", lambda of_rows: [()] * len(of_rows))(monkeypatch)
    with pytest.raises(AssertionError):
        test_accounts_count_steps_not_drafts(monkeypatch)


def test_drafts_of_runs_are_detected(monkeypatch):
    """The mutant: chains of chosen tokens count as drafts."""
    monkeypatch.setattr("engine.trace.stats.RowOutcome.num_drafted", property(lambda outcome: outcome.tree.num_nodes - 1))
    with pytest.raises(AssertionError):
        test_accounts_count_steps_not_drafts(monkeypatch)


@pytest.mark.parametrize(
    "needs_host",
    [
        Request("r", (5, 6), SamplingParams(seed=1, max_tokens=20, num_logprobs=1)),
        Request("r", (5, 6), SamplingParams(seed=1, max_tokens=20, frequency_penalty=0.5)),
        Request("r", (5, 6), SamplingParams(seed=1, max_tokens=20, typical_p=0.5)),
        Request("r", (5, 6), SamplingParams(seed=1, max_tokens=20, min_tokens=9)),
        Request("r", (5, 6), SamplingParams(seed=1, max_tokens=20), Speculation(is_traced=True)),
    ],
    ids=["logprobs", "penalty", "typical", "minimum", "traced"],
)
def test_rows_that_need_host_step_singly(needs_host, monkeypatch):
    """Others wait for them: while such a row runs, nothing runs in a row."""
    sampling = replace(needs_host.sampling, ignore_eos=True)
    session = run(engine_of(4, monkeypatch), [replace(needs_host, sampling=sampling), greedy("other", (7, 8), max_tokens=40)])
    steps = [one.num_steps for one in session.stats]
    assert max(steps[:20]) == 1 < max(steps[20:])
    assert len(session.outcomes["r"].ids) == 20


@pytest.mark.parametrize(("max_running", "may_run"), [(4, True), (8, False)])
def test_queue_ends_runs_where_it_may_enter(max_running, may_run, monkeypatch):
    """A full batch runs on beside a queue: a request enters only when another ends, as a run does."""
    engine = engine_of(4, monkeypatch, config=replace(ROOMY, max_running=max_running))
    for number in range(4):
        engine.add(sampled(f"r{number}", PROMPTS[0], seed=number, max_tokens=40))
    for _ in range(3):
        engine.step()
    engine._scheduler.add(Sequence(sampled("waits", PROMPTS[1], seed=9, max_tokens=9), 9, "coupled"))
    monkeypatch.setattr(engine._scheduler, "admit", lambda: None)
    assert (engine.step().stats.num_steps > 1) == may_run


def test_invalid_logits_end_their_row_alone(monkeypatch):
    """The row fails in the step in which a single step fails; others go on, and no token is lost."""
    model = native("mistral", "float32")
    assert model.native is not None
    embeddings_VD = model.native.parts.embeddings_VD
    expected = run(tiny_engine(model, None, PlainDecoding(), config=ROOMY), REQUESTS[:4]).texts()
    token_id = next(one for one in expected["coupled"][9:] if not any(one in prompt for prompt in PROMPTS))
    kept = embeddings_VD[token_id].clone()
    try:
        embeddings_VD[token_id] = float("nan")
        single, runs = both(monkeypatch, 8, requests=REQUESTS[:4], family="mistral")
    finally:
        embeddings_VD[token_id] = kept
    assert outcomes(runs) == outcomes(single)
    failed = [name for name, one in runs.outcomes.items() if one.events[-1].error_code is ErrorCode.LOGITS_NOT_FINITE]
    assert "coupled" in failed
    assert longest(runs) > 1


def test_prefixes_of_runs_are_cached(monkeypatch):
    """A later request finds the text of an earlier one."""
    found = []
    for most_steps in (1, 7):
        engine = engine_of(most_steps, monkeypatch, config=CACHING)
        first = greedy("first", PROMPTS[1], max_tokens=30)
        text = run(engine, [first]).texts()["first"]
        session = run(engine, [greedy("second", [*PROMPTS[1], *text, 5], max_tokens=9)])
        found.append((text, session.texts(), session.outcomes["second"].events[0].num_cached_tokens))
    assert found[0] == found[1]
    assert found[0][2] >= len(PROMPTS[1]) + 20


@pytest.mark.parametrize("num_prompt", [1, 2, 65, 66])
def test_scored_prompts_lose_no_token(num_prompt, monkeypatch):
    """The last token of a prompt has no score. Where it is fed alone, nothing of its step is scored."""
    sampling = SamplingParams(seed=1, max_tokens=20, ignore_eos=True, num_prompt_logprobs=0)
    requests = [greedy("other", PROMPTS[0], max_tokens=60), Request("r", (5,) * num_prompt, sampling)]
    single, runs = both(monkeypatch, 4, requests=requests)
    assert outcomes(runs) == outcomes(single)
    scores = [sum(len(event.prompt_logprobs) for event in one.outcomes["r"].events) for one in (single, runs)]
    assert scores == [num_prompt - 1] * 2
    assert longest(runs) > 1


async def answers(most_steps: int, monkeypatch, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what a server answers to completions, all sent at the same time."""
    tokenizer = byte_level()
    monkeypatch.setattr(RunPacing, "most_steps", lambda *_: MostSteps(most_steps))
    model = adopt(tiny_module("qwen2", vocab_size=len(tokenizer)), CPU, NATIVE, "float32")
    engine = InProcessEngine(lambda: tiny_engine(model, None, PlainDecoding(), config=ROOMY), ROOMY)
    async with in_process(engine, tokenizer=tokenizer) as client:
        sent = [client.post("/v1/completions", json={"model": MODEL, "prompt": "hello", **body}) for body in bodies]
        found = [answer.json() for answer in await asyncio.gather(*sent)]
        scraped = (await client.get("/metrics")).text
    assert "latebranch_step_tokens_count" in scraped
    per_step = {line.split("{")[0]: float(line.split()[-1]) for line in scraped.splitlines() if "latebranch_step_tokens_" in line}
    assert per_step["latebranch_step_tokens_sum"] == per_step["latebranch_step_tokens_count"], "a token a step"
    return [{"choices": one["choices"], "usage": one["usage"]} for one in found]


async def test_served_stop_strings_end_texts_alike(monkeypatch):
    """A stop string inside a run: text and usage end with it, in any place of the run. Neighbours: limits, several choices."""
    plain = await answers(1, monkeypatch, [{"max_tokens": 40, "seed": seed, "temperature": 0.9} for seed in range(3)])
    bodies: list[dict[str, Any]] = []
    for seed, one in enumerate(plain):
        text = one["choices"][0]["text"]
        ends = {text[place : place + 2] for place in range(3, len(text) - 2, 4)}
        bodies += [{"max_tokens": 40, "seed": seed, "temperature": 0.9, "stop": end} for end in sorted(ends)]
    bodies += [{"max_tokens": 13, "temperature": 0}, {"max_tokens": 9, "seed": 4, "n": 3}, {"max_tokens": 1, "seed": 4}]
    expected = await answers(1, monkeypatch, bodies)
    assert await answers(7, monkeypatch, bodies) == expected
    assert {one["choices"][0]["finish_reason"] for one in expected} == {"stop", "length"}
