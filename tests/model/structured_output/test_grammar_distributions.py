"""Sequences constrained by grammars under speculation: they match, and equal plain decoding with the same masks."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from engine.audit.auditor import Auditor
from engine.audit.background import AuditedEngine
from engine.audit.outcomes import tie_tolerance
from engine.core.config import SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.rng_keys import Stream, stream_key
from engine.core.step_plan import Row
from engine.core.tree import PLAIN, Expansion
from engine.core.types import FinishReason, FreeBlock, Grammar, GrammarKind, Progress, Request, SamplingParams, Speculation
from engine.engine import Engine
from engine.sampling.noise import gumbels
from engine.structured_output.grammars import CompiledGrammars
from engine.testing import tiny_engine
from engine.verify import dispatch as judge
from tests.chi_square import FAILS_ABOVE, PASSES_BELOW, worst_z_of_beginnings, z_of_counts
from tests.model.driving import run
from tests.model.grammars import ALL, EOS, LARK, REGEX, GrammarProcessor, V, ids_of, text_of, tokenizer, vocabulary
from tests.model.tiny import own_logits, own_module, pair

PROMPT = tuple(3 + (11 * i) % 7 for i in range(19))
EXPANSIONS = [PLAIN, Expansion(4, 1, 0), Expansion(2, 2, 2)]
LONG = 24


def request_of(grammar: Grammar, name: str = "r", **fields) -> Request:
    return Request(name, PROMPT, SamplingParams(**{"max_tokens": LONG, "grammar": grammar, **fields}))


def engine_of(expansion: Expansion, noise: float = 0.02, config: SchedulerConfig | None = None) -> Engine:
    """Return an engine that drafts; a plain expansion drafts nothing."""
    policy = FixedExpansion(expansion)
    return tiny_engine(*pair("llama", noise=noise), policy, config=config, grammars=CompiledGrammars(vocabulary))


def is_whole(grammar: Grammar, text: str) -> bool:
    """Whether a text matches, by another hand than llguidance's."""
    if grammar.block is not None:
        text = re.sub(r"\A<think>((?!</think>).)*</think>\n\n", "", text, flags=re.DOTALL)
    if grammar.kind is GrammarKind.REGEX:
        return re.fullmatch(grammar.text, text) is not None
    if grammar.kind is GrammarKind.CHOICE:
        return text in json.loads(grammar.text)
    if grammar.kind is GrammarKind.LARK:
        innermost = re.compile(r"\{([abc]+|true|false|X)(,([abc]+|true|false|X))*\}")
        while innermost.search(text):
            text = innermost.sub("X", text)
        return text == "X"
    value = json.loads(text)
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        known = {"a": ("ab", "abc", "b"), "b": None, "c": None}
        assert {"a", "b"} <= value.keys() <= known.keys()
        assert value["a"] in ("ab", "abc", "b")
        assert type(value["b"]) is int
        assert isinstance(value.get("c", ""), str)
    return isinstance(value, dict)


@cache
@torch.inference_mode()
def generated(grammar: Grammar) -> list[int]:
    """Return what `generate` adds to the prompt with a processor that uses a new matcher at each token."""
    ids = torch.tensor([PROMPT])
    out = own_module("llama").generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=LONG,
        eos_token_id=EOS,
        pad_token_id=0,
        logits_processor=[GrammarProcessor(grammar, len(PROMPT))],
    )
    return out[0, len(PROMPT) :].tolist()  # type: ignore[no-any-return]


def probs_after(grammar: Grammar, text: Sequence[int], temperature: float, num_prompt: int = len(PROMPT)) -> torch.Tensor:
    """Return the float64 distribution after a sequence, by transformers' logits and that processor."""
    scores = GrammarProcessor(grammar, num_prompt)(torch.tensor([text]), own_logits("llama", [text])[:, -1])
    return torch.softmax(scores[0].double() / temperature, -1)


@cache
def seeded_text(grammar: Grammar, seed: int) -> list[int]:
    """Return plain decoding's tokens: each the arg max of log probability plus noise."""
    text = list(PROMPT)
    while len(text) < len(PROMPT) + LONG and text[-1] != EOS:
        distribution = probs_after(grammar, text, 1.5)
        noise = gumbels([stream_key(seed, len(text), Stream.TOKEN)], len(distribution))[0]
        text.append(int((distribution.log() + noise).argmax()))
    return text[len(PROMPT) :]


@pytest.mark.parametrize("name", ALL)
def test_sequences_match_and_equal_plain_decoding(name):
    grammar = ALL[name]
    seeds = range(4)
    for expansion in EXPANSIONS:
        requests = [request_of(grammar, "greedy", temperature=0.0)]
        requests += [request_of(grammar, str(seed), seed=seed, temperature=1.5) for seed in seeds]
        session = run(engine_of(expansion), requests)
        assert session.outcomes["greedy"].ids == generated(grammar)
        for seed in seeds:
            assert session.outcomes[str(seed)].ids == seeded_text(grammar, seed)
        for outcome in session.outcomes.values():
            if outcome.finish is FinishReason.STOP:
                assert outcome.ids[-1] == EOS
                assert is_whole(grammar, text_of(outcome.ids))
            else:
                assert (outcome.finish, len(outcome.ids)) == (FinishReason.LENGTH, LONG)
        if not expansion.is_plain:
            assert sum(stats.num_accepted_tokens for stats in session.stats) > len(requests), "something was accepted"


def test_grammar_changes_the_sequences():
    plain = SamplingParams(temperature=0.0, max_tokens=LONG)
    bare = run(engine_of(PLAIN), [Request("r", PROMPT, plain)]).outcomes["r"].ids
    assert all(generated(grammar)[: len(bare)] != bare for grammar in ALL.values())


def test_preempted_sequence_continues_unchanged():
    """The state of a matcher is a function of the generated tokens."""
    config = SchedulerConfig(max_running=4, num_slots=56, max_model_len=64)
    requests = [request_of(grammar, name, seed=3, temperature=1.5) for name, grammar in ALL.items()]
    session = run(engine_of(Expansion(2, 2, 2), config=config), requests)
    assert sum(stats.num_preemptions for stats in session.stats) > 0
    assert session.texts() == {name: seeded_text(grammar, 3) for name, grammar in ALL.items()}


def test_logprobs_are_the_raw_models():
    outcome = run(engine_of(Expansion(2, 2, 2)), [request_of(REGEX, seed=3, temperature=1.5, num_logprobs=2)]).outcomes["r"]
    raw = torch.log_softmax(own_logits("llama", [[*PROMPT, *outcome.ids]])[0, len(PROMPT) - 1 : -1], -1)
    for at, (token_id, one) in enumerate(zip(outcome.ids, outcome.logprobs, strict=True)):
        assert one.logprob == pytest.approx(float(raw[at, token_id]), abs=1e-4)
        assert one.top_logprobs == pytest.approx(raw[at].topk(2).values.tolist(), abs=1e-4)


# The distribution, enumerated: every text of a small language, cut after a few tokens. A block may be missing, or the prompt has
# opened it; a text may end behind it, at a limit or at a stop token inside.
SMALL = Grammar(GrammarKind.REGEX, "(a|b)(c|,[ab]|12)*")
COUNTED = SamplingParams(temperature=6.0, grammar=SMALL, max_tokens=3)
FEW = tuple(tokenizer().convert_tokens_to_ids(["a", "c", "Ċ", "<think>", "</think>", "<eos>"]))
WITH_BLOCK = replace(COUNTED, grammar=replace(SMALL, block=FreeBlock("<think>", "</think>")), max_tokens=6, allowed_token_ids=FEW)
BEGUN = replace(WITH_BLOCK, grammar=replace(SMALL, block=FreeBlock(None, "</think>")))
STOPPED = replace(WITH_BLOCK, stop_token_ids=(FEW[1],))
SHORT = (5, 9, 33, 4, 4)
NUM_REQUESTS = 500
WIDE = SchedulerConfig(max_running=128, max_step_tokens=2048, num_slots=4096, max_model_len=32)


@cache
def target_distribution(sampling: SamplingParams = COUNTED) -> dict[tuple[int, ...], float]:
    assert sampling.grammar is not None
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    processor, possible = GrammarProcessor(sampling.grammar, len(SHORT)), torch.zeros(V)
    possible[list(sampling.allowed_token_ids or range(V))] = 1.0
    for _ in range(sampling.max_tokens):
        ended = {text: p for text, p in distribution.items() if text and text[-1] in (EOS, *sampling.stop_token_ids)}
        going = {text: p for text, p in distribution.items() if text not in ended}
        texts = torch.tensor([[*SHORT, *text] for text in going])
        probs_NV = torch.softmax(processor(texts, own_logits("llama", texts.tolist())[:, -1]).double() / 6.0, -1) * possible
        nexts = dict(zip(going, probs_NV / probs_NV.sum(-1, keepdim=True), strict=True))
        distribution = ended | {
            (*text, token_id): p * float(nexts[text][token_id])
            for text, p in going.items()
            for token_id in nexts[text].nonzero()[:, 0].tolist()
        }
    return distribution


def counts(verifier: str, expansion: Expansion, sampling: SamplingParams = COUNTED) -> Counter[tuple[int, ...]]:
    requests = [
        Request(str(seed), SHORT, replace(sampling, seed=seed), Speculation(verifier=verifier)) for seed in range(NUM_REQUESTS)
    ]
    session = run(engine_of(expansion, noise=0.1, config=WIDE), requests)
    assert sum(stats.num_accepted_tokens for stats in session.stats) > NUM_REQUESTS / 2
    return Counter(tuple(outcome.ids) for outcome in session.outcomes.values())


@pytest.mark.parametrize(
    ("verifier", "expansion"),
    [
        ("traversal", Expansion(1, 3, 1)),
        ("specinfer", Expansion(0, 2, 2)),
        ("coupled", Expansion(1, 2, 1)),
    ],
)
def test_the_engines_distribution_is_the_masked_distribution(verifier, expansion):
    assert z_of_counts(counts(verifier, expansion), target_distribution()) < PASSES_BELOW


BLOCKS = {"with": WITH_BLOCK, "begun": BEGUN, "stopped": STOPPED}
MARKERS = tuple(FEW[3:5])


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(("verifier", "expansion"), [("traversal", Expansion(0, 3, 2)), ("coupled", Expansion(1, 2, 1))])
def test_sequences_after_blocks_follow_masked_distribution(name, verifier, expansion):
    """Texts that end behind a block, without one, inside one at a limit, and at a stop token, whichever side it is on."""
    sampling, distribution = BLOCKS[name], target_distribution(BLOCKS[name])
    found = counts(verifier, expansion, sampling)
    assert worst_z_of_beginnings([*found.elements()], distribution) < PASSES_BELOW
    opening, closing = MARKERS
    ends = Counter(
        (closing in text, opening in text[:1], text[-1] in (EOS, *sampling.stop_token_ids)) for text in found.elements()
    )
    assert (True, name != "begun", True) in ends, "behind a block"
    assert (False, name != "begun", False) in ends, "cut inside a block"
    assert name == "begun" or (False, False, True) in ends, "without a block"
    assert name != "stopped" or (False, True, True) in ends, "stopped inside a block"


def test_blocks_masked_like_roots_are_noticed(monkeypatch):
    monkeypatch.setattr(Row, "sampling_context", every_node_is_masked_like_the_root)
    found = counts("traversal", Expansion(0, 3, 2), WITH_BLOCK)
    assert worst_z_of_beginnings([*found.elements()], target_distribution(WITH_BLOCK)) > FAILS_ABOVE


def only_the_root_is_masked(row, path_ids):
    context = _CONTEXT(row, path_ids)
    return replace(context, sampling=replace(context.sampling, grammar=None)) if path_ids else context


def every_node_is_masked_like_the_root(row, path_ids):
    return _CONTEXT(row, ())


_CONTEXT = Row.sampling_context


@pytest.mark.parametrize("mutant", [only_the_root_is_masked, every_node_is_masked_like_the_root])
def test_distribution_and_sequences_detect_mutants(mutant, monkeypatch):
    monkeypatch.setattr(Row, "sampling_context", mutant)
    requests = [request_of(LARK, str(seed), seed=seed, temperature=1.5) for seed in range(4)]
    texts = run(engine_of(Expansion(2, 2, 2)), requests).texts()
    assert texts != {str(seed): seeded_text(LARK, seed) for seed in range(4)}
    found = counts("traversal", Expansion(1, 3, 1))
    assert found.keys() - target_distribution().keys() or z_of_counts(found, target_distribution()) > FAILS_ABOVE


# What cannot go on.
def test_sequence_fails_only_where_nothing_is_allowed():
    """The bug: a drafted node without a distribution ended its request, although the path did not reach it."""
    grammar = Grammar(GrammarKind.REGEX, "a(b|c)1")
    dead_end = ((*ids_of("c"), *ids_of("1")),)  # after c nothing is left
    requests = [request_of(grammar, str(seed), seed=seed, temperature=6.0, bad_words=dead_end) for seed in range(24)]
    for expansion in EXPANSIONS:
        outcomes = run(engine_of(expansion, noise=0.1), requests).outcomes
        ends = {name: (outcome.finish, text_of(outcome.ids)) for name, outcome in outcomes.items()}
        failed = {name for name, (finish, _) in ends.items() if finish is FinishReason.ERROR}
        assert {text for name, (_, text) in ends.items() if name not in failed} == {"ab1"}
        if expansion.is_plain:
            plain_failed = failed
            assert 0 < len(failed) < len(requests)
            assert "grammar" in (outcomes[min(failed)].events[-1].error or "")
        assert failed == plain_failed


def test_failed_compilation_ends_only_its_request():
    bad, lost = Grammar(GrammarKind.REGEX, "("), Grammar(GrammarKind.REGEX, "[ab]+")
    engine = engine_of(Expansion(2, 2, 2))
    engine.add(request_of(lost, "lost", temperature=0.0))
    engine.abort("lost")
    requests = [request_of(bad, "bad"), request_of(REGEX, "good", temperature=0.0)]
    outcomes = run(engine, requests).outcomes
    assert outcomes["lost"].finish is FinishReason.ABORT
    assert outcomes["bad"].finish is FinishReason.ERROR
    assert "unclosed group" in (outcomes["bad"].events[-1].error or "")
    assert outcomes["good"].ids == generated(REGEX)


def test_id_is_refused_while_its_grammar_compiles():
    engine = engine_of(PLAIN)
    engine.add(request_of(REGEX))
    with pytest.raises(ValueError, match="in use"):
        engine.add(request_of(REGEX))
    run(engine, [])


def test_an_engine_without_a_tokenizer_refuses_grammars():
    engine = tiny_engine(*pair("llama"))
    outcome = run(engine, [request_of(REGEX)]).outcomes["r"]
    assert outcome.finish is FinishReason.ERROR


def test_stop_token_may_end_sequence_early():
    stop = ids_of(",")[0]
    for expansion in EXPANSIONS:
        outcome = run(engine_of(expansion), [request_of(REGEX, seed=1, temperature=1.5, stop_token_ids=(stop,))]).outcomes["r"]
        text = seeded_text(REGEX, 1)
        assert outcome.ids == text[: text.index(stop) + 1 if stop in text else len(text)]


def test_sequences_detect_unmasked_verification(monkeypatch):
    """The mutant: without edits in verification the comparison above fails, whatever the drafter masks."""
    monkeypatch.setattr(judge, "edited_logits", lambda logits_NV, contexts, grammars: logits_NV)
    outcome = run(engine_of(Expansion(2, 2, 2)), [request_of(REGEX, temperature=0.0)]).outcomes["r"]
    assert outcome.ids != generated(REGEX)


@pytest.mark.parametrize("name", ["schema", "lark"])
def test_resumed_sequence_continues_unchanged(name):
    request = request_of(ALL[name], seed=3, temperature=1.5)
    text = seeded_text(ALL[name], 3)
    for cut in (1, 4, len(text) - 1):
        resumed = replace(request, progress=Progress(tuple(text[:cut])))
        assert run(engine_of(Expansion(2, 2, 2)), [resumed]).outcomes["r"].ids == text[cut:]


def test_traced_steps_report_the_masked_distributions():
    request = replace(request_of(REGEX, seed=3, temperature=1.5), speculation=Speculation(is_traced=True))
    outcome = run(engine_of(Expansion(2, 2, 2)), [request]).outcomes["r"]
    assert outcome.ids == seeded_text(REGEX, 3)
    text = list(PROMPT)
    for event in outcome.events:
        assert event.trace is not None
        row = event.trace.row
        distribution = probs_after(REGEX, text, 1.5)
        first = [(row.tree.token_ids[v], p) for v, p in enumerate(row.probs.target, 1) if row.tree.parents[v] == 0]
        assert all(p == pytest.approx(float(distribution[token_id]), abs=1e-4) for token_id, p in first)
        text += event.token_ids


AUDITED = [{"temperature": 0.0}, {"seed": 3, "temperature": 1.5}, {"temperature": 1.5}]


def mismatches(expansion: Expansion) -> dict[str, int]:
    engine = engine_of(expansion)
    audited = AuditedEngine(engine, Auditor(1.0, 16, tie_tolerance("float32"), 1, engine.grammars))
    for index, fields in enumerate(AUDITED):
        audited.add(request_of(REGEX, str(index), **fields))
    found: Counter[str] = Counter()
    while audited.has_work:
        for check, counts in (audit.outcomes if (audit := audited.step().stats.audit) else {}).items():
            assert counts["match"] + counts["mismatch"] > 0  # a text without a seed may be short
            found[check] += counts["mismatch"]
    return dict(found)


def test_the_audit_judges_by_the_masked_distribution(monkeypatch):
    assert mismatches(Expansion(2, 2, 2)) == {"greedy": 0, "coupled": 0, "sampled": 0}
    monkeypatch.setattr(judge, "edited_logits", lambda logits_NV, contexts, grammars: logits_NV)
    assert all(mismatches(Expansion(2, 2, 2)).values())
