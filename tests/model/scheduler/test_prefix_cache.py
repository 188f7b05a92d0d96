"""Cached prefixes change no text, warm or cold, under preemption and eviction, for every kind of drafter; and they spare work."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from engine.core.config import SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.tree import Expansion
from engine.core.types import ErrorCode, FinishReason
from engine.engine import Engine
from engine.model.causal_lm import CausalModel, adopt
from engine.model.linear_backends import NATIVE
from engine.scheduler.prefix_cache import PrefixCache
from engine.scheduler.slot_allocator import Block
from engine.testing import tiny_engine, tiny_module
from tests.model.driving import Session, greedy, run, sampled
from tests.model.heads import head_engine, random_head
from tests.model.native_models import PRECISIONS, native
from tests.model.tiny import model, own_greedy_text, own_logits, pair
from tests.needs import needs_library

CPU = torch.device("cpu")
ROOMY = SchedulerConfig(num_slots=2048, max_model_len=256)
CRAMPED = SchedulerConfig(max_running=4, max_step_tokens=24, num_slots=90, max_model_len=80)
BRANCHED = FixedExpansion(Expansion(1, 2, 2))
PREFIX = [3 + (7 * place) % 50 for place in range(50)]


def prompts() -> list[list[int]]:
    """Return prompts that share 50, 40 and 16 tokens, one that is another's text in another place, and a short one."""
    tails = [[9, 8, 7], [9, 8, 11, 12]]
    return [*(PREFIX + tail for tail in tails), [*PREFIX[:40], 5, 6], [*PREFIX[:16], *[4] * 20], PREFIX[16:48], PREFIX[:5]]


def engines(config: SchedulerConfig) -> dict[str, Callable[[], Engine]]:
    return {
        "none": lambda: tiny_engine(model("llama"), config=config),
        "model": lambda: tiny_engine(*pair("llama"), BRANCHED, config=config),
        "head": lambda: head_engine(random_head(), policy=BRANCHED, config=config),
    }


def num_found(session: Session) -> int:
    return sum(stats.num_prefix_hits for stats in session.stats)


@pytest.mark.parametrize("drafter", ["none", "model", "head"])
@pytest.mark.parametrize("config", [ROOMY, CRAMPED], ids=["roomy", "cramped"])
def test_greedy_tokens_equal_generate_warm_and_cold(drafter, config):
    engine = engines(config)[drafter]()
    for turn in range(2):
        requests = [greedy(f"{turn} {number}", prompt) for number, prompt in enumerate(prompts())]
        session = run(engine, requests)
        assert num_found(session) >= 16 * 3
        for request in requests:
            assert session.outcomes[request.request_id].ids == own_greedy_text("llama", request.prompt_ids, 12)


def test_cache_without_prefix_hash_is_detected(monkeypatch):
    next_key = PrefixCache._next_key
    monkeypatch.setattr(PrefixCache, "_next_key", lambda cache, sequence: ("", next_key(cache, sequence)[1]))
    with pytest.raises(AssertionError):
        test_greedy_tokens_equal_generate_warm_and_cold("none", ROOMY)


@needs_library
@pytest.mark.parametrize("precision", PRECISIONS)
def test_seeded_bits_are_equal_warm_and_cold(precision):
    """Including log-probabilities: cached states have the bits of computed ones."""
    target = adopt(tiny_module("llama"), CPU, NATIVE, precision)
    draft = pair("llama")[1]

    def reported(engine: Engine, name: str, number: int) -> tuple[list[int], list[float]]:
        request = sampled(name, prompts()[number], seed=number, num_logprobs=0)
        outcome = run(engine, [request]).outcomes[name]
        return outcome.ids, [one.logprob for one in outcome.logprobs]

    warm = tiny_engine(target, draft, BRANCHED, config=ROOMY)
    for turn in range(2):
        for number in (0, 1, 3):
            cold = tiny_engine(target, draft, BRANCHED, config=replace(ROOMY, prefix_block_tokens=0))
            assert reported(warm, f"{turn} {number}", number) == reported(cold, "r", number)


def test_choices_share_one_prompt_computation():
    """Simultaneous choices wait for the first. Each computes the rest of the prompt, less than a block, for itself."""
    prompt, num_choices = [*PREFIX, 9, 8, 7], 4
    config = replace(ROOMY, max_step_tokens=32)
    requests = [sampled(str(index), prompt, seed=index, max_tokens=6) for index in range(num_choices)]
    session = run(tiny_engine(*pair("llama"), BRANCHED, config=config), requests)
    fed = sum(stats.num_prompt_tokens for stats in session.stats)
    assert fed == len(prompt) + (num_choices - 1) * (len(prompt) - 48)
    assert num_found(session) == (num_choices - 1) * 48
    first_events = [next(event for event in session.outcomes[one.request_id].events if event.token_ids) for one in requests]
    assert [event.num_cached_tokens for event in first_events] == [0, 48, 48, 48]
    alone = [run(tiny_engine(*pair("llama"), BRANCHED, config=config), [one]) for one in requests]
    for one, session_alone in zip(requests, alone, strict=True):
        assert session.outcomes[one.request_id].ids == session_alone.outcomes[one.request_id].ids


def test_next_chat_turn_reuses_the_answer():
    engine = tiny_engine(*pair("llama"), BRANCHED, config=ROOMY)
    answer = run(engine, [greedy("1", PREFIX, 30)]).outcomes["1"].ids
    session = run(engine, [greedy("2", [*PREFIX, *answer, 9, 8])])
    assert num_found(session) == (len(PREFIX) + 30 - 1) // 16 * 16
    assert session.outcomes["2"].ids == own_greedy_text("llama", [*PREFIX, *answer, 9, 8], 12)


def test_other_salt_finds_no_cached_block():
    engine = tiny_engine(model("llama"), config=ROOMY)
    found = {}
    for name, salt in (("a", "a"), ("a again", "a"), ("b", "b"), ("alone", None), ("alone again", None)):
        found[name] = num_found(run(engine, [replace(greedy(name, PREFIX), cache_salt=salt)]))
    assert found == {"a": 0, "a again": 48, "b": 0, "alone": 0, "alone again": 0}


def test_a_prompt_that_is_scored_is_computed():
    engine = tiny_engine(*pair("llama"), BRANCHED, config=ROOMY)
    run(engine, [greedy("1", PREFIX)])
    scored = greedy("2", PREFIX)
    scored = replace(scored, sampling=replace(scored.sampling, num_prompt_logprobs=0))
    session = run(engine, [scored])
    reported = [one.logprob for event in session.outcomes["2"].events for one in event.prompt_logprobs]
    probs = torch.log_softmax(own_logits("llama", [PREFIX])[0, :-1].double(), -1)
    assert reported == pytest.approx(
        [float(distribution[token_id]) for distribution, token_id in zip(probs, PREFIX[1:], strict=True)], abs=1e-4
    )
    assert sum(stats.num_prefix_queries for stats in session.stats) == 0


@torch.inference_mode()
def poison(engine: Engine) -> None:
    """Do to the cache what a pass does that goes wrong."""
    for pool in engine.target.cache._keys.values():
        pool.fill_(float("nan"))


FEEDING = replace(ROOMY, max_running=4, max_step_tokens=16)  # the prefix takes four steps


def test_bad_pass_caches_no_prompt_blocks(monkeypatch):
    """The bug: chunks of a prompt were shared before their distributions were checked.

    They broke the requests that reused them.
    """

    def after_a_bad_pass() -> list[int]:
        engine = tiny_engine(model("llama"), config=FEEDING)
        engine.add(greedy("left", PREFIX))
        engine.step()
        poison(engine)
        engine.abort("left")
        session = run(engine, [greedy("next", PREFIX)])
        engine.check_integrity()
        return session.outcomes["next"].ids

    assert after_a_bad_pass() == own_greedy_text("llama", PREFIX, 12)
    monkeypatch.setattr("engine.scheduler.prefix_cache.Block", partial(Block, is_finite=True))
    assert after_a_bad_pass() == []


def fates_with_a_bad_first_block(target: CausalModel) -> list[list[int] | ErrorCode | None]:
    """Return how three requests end, their texts or why not: the first block of all goes bad once the first has read it.

    From then on it is before the window of the bad layer, for the first request; the others read it.
    """
    engine, num_seen = tiny_engine(target, config=ROOMY), 20
    engine.add(greedy("1", PREFIX))
    reported = [token_id for event in engine.step().events for token_id in event.token_ids]
    (sequence,) = engine._scheduler._running
    cache, slots_T = engine.target.cache, torch.tensor(sequence.slots[:16])
    with torch.inference_mode():
        keys_THK, values_THK = (read[0] for read in cache.gather(2, slots_T[None]))
        cache.write(2, slots_T, torch.full_like(keys_THK, math.nan), values_THK)
    outcomes = [run(engine, []).outcomes["1"], *(run(engine, [greedy(name, PREFIX[:num_seen])]).outcomes[name] for name in "23")]
    outcomes[0].ids[:0] = reported
    return [one.ids if one.finish is FinishReason.LENGTH else one.events[-1].error_code for one in outcomes]


@pytest.mark.parametrize("is_native", [False, pytest.param(True, marks=needs_library)])
def test_bad_states_before_window_change_no_token(is_native, monkeypatch):
    """Transformers' layers read them with weight zero, and NaN stays NaN, so their requests end.

    The library's layers do not read them.
    """
    target = native("gemma3") if is_native else model("gemma3")
    texts = [own_greedy_text("gemma3", prompt, 12) for prompt in (PREFIX, PREFIX[:20], PREFIX[:20])]
    expected = [ErrorCode.LOGITS_NOT_FINITE if number == is_native else text for number, text in enumerate(texts)]
    assert fates_with_a_bad_first_block(target) == expected
    monkeypatch.setattr(PrefixCache, "invalidate", lambda cache, sequence: None)
    assert fates_with_a_bad_first_block(target)[-1] is ErrorCode.LOGITS_NOT_FINITE


def test_sharing_request_continues_without_the_feeder():
    engine = tiny_engine(model("llama"), config=FEEDING)
    for name in ("first", "second"):
        engine.add(greedy(name, PREFIX))
    engine.step()
    session = run(engine, [], after_step=lambda engine: engine.abort("first"))
    assert num_found(session) == 16
    assert session.outcomes["second"].ids == own_greedy_text("llama", PREFIX, 12)
    assert num_found(run(engine, [greedy("third", PREFIX)])) == 48


def test_blocks_of_broken_request_are_not_reused():
    """Logits that are not finite end a request. Its blocks may be broken too, and would break later requests."""
    engine = tiny_engine(model("llama"), config=ROOMY)
    session = run(engine, [greedy("1", PREFIX)], after_step=poison)
    assert session.outcomes["1"].finish is FinishReason.ERROR
    healed = run(engine, [greedy("2", PREFIX)])
    assert num_found(healed) == 0
    assert healed.outcomes["2"].ids == own_greedy_text("llama", PREFIX, 12)


def test_own_empty_mask_evicts_no_shared_blocks():
    """Any request can combine edits that mask all tokens. The model and the cache are sound."""
    engine = tiny_engine(model("llama"), config=ROOMY)
    run(engine, [greedy("1", PREFIX)])
    hopeless = greedy("2", PREFIX)
    hopeless = replace(
        hopeless,
        sampling=replace(hopeless.sampling, allowed_token_ids=(7, 8), bad_words=((7, 7), (7, 8)), logit_bias=((7, 50.0),)),
    )
    outcome = run(engine, [hopeless]).outcomes["2"]
    assert outcome.events[-1].error_code is ErrorCode.NO_POSSIBLE_TOKEN
    assert num_found(run(engine, [greedy("3", PREFIX)])) == 48
