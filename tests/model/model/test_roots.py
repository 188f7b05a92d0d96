"""A policy's view of roots: the model's states and distributions at the token before each.

Nothing is kept before it is needed.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from engine.core.config import SchedulerConfig
from engine.core.policy import ROOT_SCALARS, FixedExpansion, RootFacts
from engine.core.tree import Expansion
from engine.core.types import Request, SamplingParams
from engine.engine import Engine
from engine.testing import tiny_engine
from engine.trace.stats import RowOutcome
from tests.model.driving import greedy, run, sampled
from tests.model.heads import head_engine, head_logits, learnt_head, true_features
from tests.model.tiny import model, own_logits, own_module, pair

PROMPTS = {"first": (5, 9, 23), "second": (7, 8, 31, 12)}
TEMPERATURE = 1.3


def requests() -> list[Request]:
    sampling = SamplingParams(TEMPERATURE, max_tokens=60, ignore_eos=True)  # no seed: so long that chance cannot leave too few
    return [Request(name, prompt, sampling) for name, prompt in PROMPTS.items()]


def column(facts: RootFacts, row: int, name: str) -> float:
    return float(facts.scalars_BS[row, ROOT_SCALARS.index(name)])


def check_root(facts: RootFacts, row: int, text: Sequence[int]) -> bool:
    """Compare the facts about a root, the last token, with transformers. Return whether the draft distribution was known."""
    module, head = own_module("llama"), learnt_head()
    ids_BT = torch.tensor([text[:-1]])
    with torch.inference_mode():
        state_D = module(input_ids=ids_BT, output_hidden_states=True, use_cache=False).hidden_states[-1][0, -1]
        reads_W = torch.cat([true_features(head, module, ids_BT)[0, -1], module.get_input_embeddings().weight[text[-1]]])
    assert torch.tensor(facts.target_BD[row]).allclose(state_D, atol=1e-3)
    assert torch.tensor(facts.draft_BW[row]).allclose(reads_W, atol=1e-3)
    probs_V = (own_logits("llama", [text[:-1]])[0, -1] / TEMPERATURE).softmax(-1)
    assert column(facts, row, "entropy") == pytest.approx(float(-(probs_V * probs_V.clamp(min=1e-6).log()).sum()), abs=1e-3)
    assert column(facts, row, "top") == pytest.approx(float(probs_V.max()), abs=1e-4)
    assert column(facts, row, "root_log") == pytest.approx(float(probs_V[text[-1]].log().clamp(min=-14.0)), abs=1e-2)
    return column(facts, row, "has_draft") == 1.0


def check_draft(facts: RootFacts, row: int, text: Sequence[int], path: Sequence[int]) -> None:
    """Compare the facts about the drafter's distribution with the net. `path` are the drafted tokens before the root."""
    history = text[: len(text) - 1 - len(path)]
    draft_V = (head_logits(learnt_head(), own_module("llama"), history, path) / TEMPERATURE).softmax(-1)
    probs_V = (own_logits("llama", [text[:-1]])[0, -1] / TEMPERATURE).softmax(-1)
    assert column(facts, row, "draft_top") == pytest.approx(float(draft_V.max()), abs=1e-3)
    assert column(facts, row, "distance") == pytest.approx(float((probs_V - draft_V).abs().sum()), abs=1e-2)
    assert column(facts, row, "draft_root_log") == pytest.approx(float(draft_V[text[-1]].log().clamp(min=-14.0)), abs=2e-2)


def check_run() -> None:
    """Check every root of two texts that are decoded together."""
    engine = head_engine(learnt_head(), policy=FixedExpansion(Expansion(2, 2, 1, "delayed_distinct")))
    engine.roots.watch()
    texts = {name: list(prompt) for name, prompt in PROMPTS.items()}
    for request in requests():
        engine.add(request)
    known = accepted = 0
    while engine.has_work:
        events = {event.request_id: event for event in engine.step().events}
        going = [name for name, event in events.items() if event.finish is None]
        for name, event in events.items():
            texts[name] += event.token_ids
        facts = engine.roots.facts([*going, "unknown"])
        assert facts.is_known_B.tolist() == [True] * len(going) + [False]
        assert not facts.target_BD[-1].any()
        for row, name in enumerate(going):
            count = events[name].num_accepted_tokens
            accepted += count
            if check_root(facts, row, texts[name]):
                known += 1
                check_draft(facts, row, texts[name], texts[name][len(texts[name]) - 1 - count : -1])
    assert known > 5
    assert accepted > 3


def test_roots_are_seen_as_they_are():
    check_run()


@pytest.mark.parametrize("field", ["node", "slot", "root_id"])
def test_reader_of_wrong_states_is_detected(field, monkeypatch):
    ends = RowOutcome.ending

    def beside(outcome, probs_rows):
        ending = ends(outcome, probs_rows)
        return ending and replace(ending, **{field: max(0, getattr(ending, field) - 1)})

    monkeypatch.setattr(RowOutcome, "ending", beside)
    with pytest.raises(AssertionError):
        check_run()


def test_features_are_kept_only_on_request():
    def texts(watches: bool) -> dict[str, list[int]]:
        engine = tiny_engine(model("llama"), model("llama", 1))
        if watches:
            engine.roots.watch()

        def look(stepped: Engine) -> None:
            facts = stepped.roots.facts(["greedy", "seeded"])
            assert watches or not facts.is_known_B.any()
            assert facts.draft_BW.shape == (2, 32)  # no features: the root's embedding alone

        requests = [greedy("greedy", PROMPTS["first"]), sampled("seeded", PROMPTS["second"], seed=3)]
        return run(engine, requests, look).texts()

    assert texts(watches=True) == texts(watches=False)


@pytest.mark.parametrize("max_step_tokens", [64, 12], ids=["whole", "chunks"])
def test_roots_are_read_beside_scored_prompts(max_step_tokens):
    """The output head is given the scored places of prompts too, after the nodes; the worker once ended there."""
    engine = tiny_engine(*pair("llama"), config=SchedulerConfig(max_step_tokens=max_step_tokens, max_running=4))
    engine.roots.watch()
    texts = {"first": [*PROMPTS["first"]], "scored": [*range(3, 25)]}
    engine.add(greedy("first", texts["first"], 14))
    scored = greedy("scored", texts["scored"], 14)
    engine.add(replace(scored, sampling=replace(scored.sampling, num_prompt_logprobs=2)))
    seen = dict.fromkeys(texts, 0)
    while engine.has_work:
        for event in engine.step().events:
            texts[event.request_id] += event.token_ids
        facts = engine.roots.facts([*texts])
        for row, (name, text) in enumerate(texts.items()):
            if facts.is_known_B[row]:
                seen[name] += 1
                ids_BT = torch.tensor([text[:-1]])
                with torch.inference_mode():
                    output = own_module("llama")(input_ids=ids_BT, output_hidden_states=True, use_cache=False)
                assert torch.tensor(facts.target_BD[row]).allclose(output.hidden_states[-1][0, -1], atol=1e-3)
    assert all(count > 0 for count in seen.values())
