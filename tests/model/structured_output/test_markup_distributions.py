"""Forced calls in each markup under speculation: their distribution is the target's, masked and renormalised by the grammar."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import jsonschema_rs
import numpy as np
import pytest
import torch

from engine.core.config import SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.step_plan import Row
from engine.core.tree import PLAIN, Expansion
from engine.core.types import Request, SamplingParams, Speculation
from engine.structured_output.grammars import CompiledGrammars
from engine.structured_output.masks import GrammarMasks
from engine.testing import tiny_engine, tiny_module, tiny_pair
from server.tool_calls.markup_reader import MarkupReader
from server.tool_calls.syntaxes import SYNTAXES
from tests.chi_square import FAILS_ABOVE, PASSES_BELOW, worst_z_of_beginnings
from tests.model.driving import Session, run
from tests.model.markups import EOS, FUNCTIONS, MarkupCase, V

PROMPT = (5, 9, 33, 4, 4)
TEMPERATURE = 4.0
NUM_REQUESTS = 500
WIDE = SchedulerConfig(max_running=128, max_step_tokens=2048, num_slots=4096, max_model_len=64)
CASES = [MarkupCase(*fields) for fields in product(SYNTAXES, (True, False), (True, False))]
# Of each verifier a tree with siblings. Cases take turns.
TREES = [("traversal", Expansion(1, 3, 1)), ("specinfer", Expansion(0, 2, 2)), ("coupled", Expansion(1, 2, 1))]
_MOST_TOKENS, _MOST_TEXTS = 12, 800


@cache
def _distribution(case: MarkupCase) -> dict[tuple[int, ...], float]:
    """Return the probability of each text, of at most so many tokens that the texts are few: by transformers' logits and a new
    matcher for each token.
    """
    ended: dict[tuple[int, ...], float] = {}
    going: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(_MOST_TOKENS):
        with torch.inference_mode():
            logits = tiny_module(vocab_size=V)(torch.tensor([[*PROMPT, *text] for text in going])).logits[:, -1].double()
        longer: dict[tuple[int, ...], float] = {}
        for (text, probability), row in zip(going.items(), logits, strict=True):
            allowed = case.allowed_after(text)
            shares = torch.softmax(row[allowed] / TEMPERATURE, -1).tolist()
            longer |= {(*text, token_id): probability * share for token_id, share in zip(allowed, shares, strict=True)}
        ended |= {text: probability for text, probability in longer.items() if text[-1] == EOS}
        going = {text: probability for text, probability in longer.items() if text[-1] != EOS}
        if not going or len(longer) > _MOST_TEXTS:
            break
    return ended | going


def _run(case: MarkupCase, verifier: str | None, expansion: Expansion, seeds: Sequence[int], noise: float = 0.1) -> Session:
    grammars = CompiledGrammars(lambda: case.vocabulary)
    engine = tiny_engine(*tiny_pair(noise=noise, vocab_size=V), FixedExpansion(expansion), config=WIDE, grammars=grammars)
    most = max(map(len, _distribution(case)))
    sampling = SamplingParams(temperature=TEMPERATURE, grammar=case.grammar, max_tokens=most)
    requests = [Request(str(seed), PROMPT, replace(sampling, seed=seed), Speculation(verifier=verifier)) for seed in seeds]
    return run(engine, requests)


def _worst_z(session: Session, case: MarkupCase) -> float:
    return worst_z_of_beginnings([tuple(ids) for ids in session.texts().values()], _distribution(case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_calls_have_the_targets_masked_distribution(case: MarkupCase):
    """With a drafter and a tree at every step."""
    assert abs(sum(_distribution(case).values()) - 1) < 1e-6
    assert sum(probability * NUM_REQUESTS >= 5 for probability in _distribution(case).values()) >= 3
    session = _run(case, *TREES[CASES.index(case) % len(TREES)], range(NUM_REQUESTS))
    assert sum(stats.num_accepted_tokens for stats in session.stats) > NUM_REQUESTS / 2
    num_rows = sum(stats.num_decoding_rows for stats in session.stats)
    assert sum(stats.num_drafts for stats in session.stats) > num_rows * 0.7, "all rows draft before their last token"
    assert _worst_z(session, case) < PASSES_BELOW


@pytest.mark.parametrize("case", CASES, ids=str)
def test_seeded_calls_are_plain_decodings(case: MarkupCase):
    plain = _run(case, None, PLAIN, range(8))
    assert _run(case, None, Expansion(2, 2, 2), range(8), noise=0.02).texts() == plain.texts()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_complete_sequences_are_calls(case: MarkupCase):
    """The reader finds calls that match their schemas in each text that a grammar can write, and nothing beside them."""
    whole = [text for text in _distribution(case) if text[-1] == EOS]
    for text in whole:
        reader = MarkupReader(SYNTAXES[case.markup].forced_forms, FUNCTIONS, 1 if case.is_one else None, is_forced=True)
        reads = [reader.feed(case.text_of(text)), reader.close()]
        calls = [call for read in reads for call in read.calls]
        assert "".join(read.content for read in reads) == ""
        names = [call.name for call in calls if call.name]
        assert len(names) == 1 if case.is_one else names
        for index, name in enumerate(names):
            jsonschema_rs.validate(FUNCTIONS[name], json.loads("".join(call.arguments for call in calls if call.index == index)))
    assert whole


def _every_node_is_masked_like_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Row.sampling_context
    monkeypatch.setattr(Row, "sampling_context", lambda row, path_ids: original(row, ()))


def _nodes_are_masked_like_their_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    original = GrammarMasks.allowed

    def allowed(self, grammar, history, num_prompt_tokens, paths):
        found = original(self, grammar, history, num_prompt_tokens, paths)
        of_sibling = {}
        for at, path in enumerate(paths):
            siblings = [other for other, one in enumerate(paths) if path and one and one[:-1] == path[:-1] and one != path]
            of_sibling[at] = siblings[0] if siblings else at
        return np.stack([found[of_sibling[at]] for at in range(len(paths))])

    monkeypatch.setattr(GrammarMasks, "allowed", allowed)


@pytest.mark.parametrize("mutate", [_every_node_is_masked_like_the_root, _nodes_are_masked_like_their_siblings])
@pytest.mark.parametrize("markup", SYNTAXES)
def test_masks_of_other_nodes_are_noticed(markup: str, mutate, monkeypatch: pytest.MonkeyPatch):
    case = MarkupCase(markup, has_tokens=False, is_one=False)
    mutate(monkeypatch)
    assert _worst_z(_run(case, "traversal", Expansion(0, 3, 2), range(NUM_REQUESTS)), case) > FAILS_ABOVE
