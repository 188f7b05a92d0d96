"""Edits under speculation: each node's distribution is edited for its own path, so sequences are plain decoding's."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from engine.core.config import SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.rng_keys import Stream, stream_key
from engine.core.step_plan import Row
from engine.core.tree import PLAIN, Expansion
from engine.core.types import FinishReason, Request, SamplingParams, Speculation
from engine.draft.text.text_cache import TextCache
from engine.draft.text.text_drafter import TextDrafter
from engine.engine import Engine
from engine.sampling.noise import gumbels
from engine.testing import tiny_engine
from engine.verify import dispatch as judge
from tests.chi_square import FAILS_ABOVE, PASSES_BELOW, z_of_counts
from tests.model.driving import run
from tests.model.edits import processors_of
from tests.model.passes import CPU
from tests.model.tiny import model, own_logits, own_module, pair

PROMPT = tuple(3 + (11 * i) % 7 for i in range(19))
EXPANSIONS = [PLAIN, Expansion(4, 1, 0), Expansion(0, 3, 2), Expansion(2, 2, 2)]
LONG = 24
# Tokens of which the plain texts have many, so that each edit changes something.
EDITS: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "negative frequency": {"frequency_penalty": -0.4},
    "repetition": {"repetition_penalty": 1.7},
    "bias": {"logit_bias": ((9, 2.0), (30, 1.5), (5, -100.0))},
    "allowed": {"allowed_token_ids": tuple(range(0, 61, 8)), "frequency_penalty": 1.5},
    "bad words": {"bad_words": ((28,), (57, 7), (48, 57, 38))},
    "minimum": {"min_tokens": 15, "stop_token_ids": tuple(range(0, 61, 3))},
}
EDITS["all"] = {name: value for fields in EDITS.values() for name, value in fields.items()}
EDITS["all"] |= {"allowed_token_ids": tuple(range(1, 61, 2)), "repetition_penalty": 1.3}


def request_of(edits: str, **fields) -> Request:
    sampling = SamplingParams(max_tokens=LONG, **EDITS[edits])
    return Request("r", PROMPT, replace(sampling, ignore_eos=True, **fields))


def engine_of(expansion: Expansion) -> Engine:
    """Return an engine that drafts; a plain expansion drafts nothing."""
    return tiny_engine(*pair("llama", noise=0.05), FixedExpansion(expansion))


def check_texts(request: Request, expected: Sequence[int], expansions: Sequence[Expansion] = EXPANSIONS) -> None:
    for expansion in expansions:
        session = run(engine_of(expansion), [request])
        assert session.outcomes["r"].ids == list(expected), expansion
        if not expansion.is_plain:
            assert len(session.stats) < len(expected), "something was accepted"


@cache
@torch.inference_mode()
def generated(edits: str) -> list[int]:
    """Return what `generate` adds to the prompt with the request's processors; it ends at the first stop token."""
    sampling = request_of(edits, temperature=0.0).sampling
    ids = torch.tensor([PROMPT])
    out = own_module("llama").generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=sampling.max_tokens,
        eos_token_id=list(sampling.stop_token_ids) or None,
        pad_token_id=0,
        logits_processor=processors_of(sampling, len(PROMPT)),
    )
    return out[0, len(PROMPT) :].tolist()  # type: ignore[no-any-return]


@cache
def seeded_text(edits: str) -> list[int]:
    """Return plain decoding's tokens by transformers' processors: each the arg max of log probability plus noise."""
    request = request_of(edits, seed=11, temperature=0.8)
    sampling, text = request.sampling, list(PROMPT)
    while len(text) < len(PROMPT) + LONG and (len(text) == len(PROMPT) or text[-1] not in sampling.stop_token_ids):
        distribution = probs_after(sampling, [text])[0]
        noise = gumbels([stream_key(11, len(text), Stream.TOKEN)], len(distribution))[0]
        text.append(int((distribution.log() + noise).argmax()))
    return text[len(PROMPT) :]


def probs_after(sampling: SamplingParams, texts: Sequence[Sequence[int]], num_prompt: int = len(PROMPT)) -> torch.Tensor:
    """Return the float64 distributions after sequences of one length: transformers' logits and processors, then temperature."""
    scores = processors_of(sampling, num_prompt)(torch.tensor(texts), own_logits("llama", texts)[:, -1])
    return torch.softmax(scores.double() / sampling.temperature, -1)


@pytest.mark.parametrize("edits", EDITS)
def test_greedy_tokens_equal_generate(edits):
    check_texts(request_of(edits, temperature=0.0), generated(edits))


@pytest.mark.parametrize("edits", EDITS)
def test_seeded_tokens_equal_plain_decoding(edits):
    check_texts(request_of(edits, seed=11, temperature=0.8), seeded_text(edits))


def test_each_edit_changes_the_tokens():
    """An edit that changed nothing would prove nothing."""
    plain = SamplingParams(temperature=0.0, max_tokens=LONG, ignore_eos=True)
    unedited = run(engine_of(PLAIN), [Request("r", PROMPT, plain)]).outcomes["r"].ids
    for edits in EDITS:
        stops = EDITS[edits].get("stop_token_ids", ())
        cut = next((at for at, token_id in enumerate(unedited, 1) if token_id in stops), LONG)
        assert generated(edits) != unedited[:cut], edits


def test_edited_batch_equals_requests_run_alone():
    requests = [
        replace(request_of(edits, **fields), request_id=f"{edits} {kind}")
        for edits in EDITS
        for kind, fields in (("greedy", {"temperature": 0.0}), ("seeded", {"seed": 11, "temperature": 0.8}))
    ]
    texts = run(engine_of(Expansion(1, 2, 2)), requests).texts()
    for edits in EDITS:
        assert texts[f"{edits} greedy"] == generated(edits)
        assert texts[f"{edits} seeded"] == seeded_text(edits)


@pytest.mark.parametrize("expansion", EXPANSIONS, ids=str)
def test_stop_tokens_wait_for_the_minimum(expansion):
    end = model("llama").eos_token_ids[0]
    sampling = SamplingParams(temperature=0.0, max_tokens=LONG, min_tokens=7, logit_bias=((end, 100.0),))
    outcome = run(engine_of(expansion), [Request("r", PROMPT, sampling)]).outcomes["r"]
    assert (len(outcome.ids), outcome.ids[-1], outcome.finish) == (8, end, FinishReason.STOP)
    assert end not in outcome.ids[:-1]


def test_logprobs_are_the_raw_models():
    request = request_of("all", seed=3, temperature=0.5, num_logprobs=2, min_tokens=0, stop_token_ids=())
    outcome = run(engine_of(Expansion(2, 2, 2)), [request]).outcomes["r"]
    raw = torch.log_softmax(own_logits("llama", [[*PROMPT, *outcome.ids]])[0, len(PROMPT) - 1 : -1], -1)
    for at, (token_id, one) in enumerate(zip(outcome.ids, outcome.logprobs, strict=True)):
        assert one.logprob == pytest.approx(float(raw[at, token_id]), abs=1e-4)
        assert one.top_logprobs == pytest.approx(raw[at].topk(2).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", ["greedy", "seeded", "traversal"])
def test_fully_masked_ngram_proposals_draft_nothing(kind):
    """The bug: all tokens that an n-gram drafter has seen were masked.

    The distribution became NaN, and no token could be drawn.
    """
    text = (7, 8) * 8
    fields: dict[str, Any] = {"temperature": 0.0} if kind == "greedy" else {"seed": 1}
    sampling = SamplingParams(max_tokens=6, ignore_eos=True, allowed_token_ids=(20, 21, 22), **fields)
    request = Request("r", text, sampling, Speculation(verifier="traversal" if kind == "traversal" else None))
    engine = tiny_engine(model("llama"), TextDrafter(61, CPU, TextCache(min_tokens=1)), FixedExpansion(Expansion(2, 2, 2)))
    outcome = run(engine, [request]).outcomes["r"]
    assert (len(outcome.ids), outcome.finish) == (6, FinishReason.LENGTH)
    assert set(outcome.ids) <= {20, 21, 22}


# The counted distribution. Three tokens are possible, so triples can be counted and each soon occurs again.
COUNTED = SamplingParams(
    temperature=3.0,
    frequency_penalty=2.0,
    presence_penalty=1.0,
    repetition_penalty=1.2,
    logit_bias=((9, 1.0), (4, 2.0)),
    allowed_token_ids=(4, 9, 33),
    max_tokens=4,
    ignore_eos=True,
)
SHORT = (5, 9, 33, 4, 4)
NUM_REQUESTS = 1000
WIDE = SchedulerConfig(max_running=128, max_step_tokens=2048, num_slots=4096, max_model_len=32)


@cache
def target_distribution() -> dict[tuple[int, ...], float]:
    """Return the distribution of the first three tokens, by transformers' logits and processors."""
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        nexts = probs_after(COUNTED, [[*SHORT, *text] for text in distribution], len(SHORT))
        distribution = {
            (*text, token_id): p * float(row[token_id])
            for (text, p), row in zip(distribution.items(), nexts, strict=True)
            for token_id in row.nonzero()[:, 0].tolist()
        }
    return distribution


def triples(verifier: str, expansion: Expansion) -> Counter[tuple[int, ...]]:
    requests = [
        Request(str(seed), SHORT, replace(COUNTED, seed=seed), Speculation(verifier=verifier)) for seed in range(NUM_REQUESTS)
    ]
    session = run(tiny_engine(*pair("llama", noise=0.1), FixedExpansion(expansion), config=WIDE), requests)
    assert sum(stats.num_accepted_tokens for stats in session.stats) > NUM_REQUESTS / 2
    return Counter(tuple(outcome.ids[:3]) for outcome in session.outcomes.values())


@pytest.mark.parametrize(
    ("verifier", "expansion"),
    [
        ("traversal", Expansion(1, 3, 1)),
        ("specinfer", Expansion(0, 2, 2)),
        ("nss", Expansion(1, 2, 1)),
        ("block", Expansion(3, 1, 0)),
    ],
)
def test_the_engines_distribution_is_the_edited_distribution(verifier, expansion):
    assert z_of_counts(triples(verifier, expansion), target_distribution()) < PASSES_BELOW


def context_without(**fields):
    return lambda row, path_ids: replace(_CONTEXT(row, path_ids), **fields)


def root_forgotten(row, path_ids):
    context = _CONTEXT(row, path_ids)
    return replace(context, history=context.history[:-1])


_CONTEXT = Row.sampling_context


@pytest.mark.parametrize(
    "mutant",
    [context_without(path_ids=()), context_without(num_prompt_tokens=0), root_forgotten],
    ids=["path forgotten", "prompt counted", "root forgotten"],
)
def test_distribution_and_sequences_detect_mutants(mutant, monkeypatch):
    monkeypatch.setattr(Row, "sampling_context", mutant)
    assert z_of_counts(triples("traversal", Expansion(1, 3, 1)), target_distribution()) > FAILS_ABOVE
    for request, text in (
        (request_of("all", temperature=0.0), generated("all")),
        (request_of("all", seed=11, temperature=0.8), seeded_text("all")),
    ):
        with pytest.raises(AssertionError):
            check_texts(request, text, [Expansion(2, 2, 2)])


def test_distribution_detects_unedited_verification(monkeypatch):
    monkeypatch.setattr(judge, "edited_logits", lambda logits_NV, contexts, grammars: logits_NV)
    with pytest.raises(AssertionError):
        check_texts(request_of("repetition", temperature=0.0), generated("repetition"))
