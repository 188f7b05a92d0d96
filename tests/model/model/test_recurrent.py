"""Recurrent layers under trees: the state of each node continues from its parent's, and the kept one from the accepted path."""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional

from engine.attention import tree_attention
from engine.attention.packing import pack
from engine.attention.paths import PathStep, path_steps
from engine.attention.segments import chain_segment, tree_segment
from engine.core.config import SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.tree import Expansion, TokenTree
from engine.core.types import Progress
from engine.engine import Engine
from engine.kv_cache.kv_cache import KVCache
from engine.kv_cache.slot_states import MissingState, PathStates
from engine.model.recurrent import _Projections
from engine.teacher_forcing import KnownText
from engine.testing import tiny_engine, tiny_model
from engine.weights import UnsupportedModel
from engine.weights.pretrained import load_tokenizer
from engine.worker.inprocess import InProcessEngine
from tests.conformance.served import MODEL, app_of, served
from tests.model.attention.test_attention import EXACT, WRONG, ragged_scene, scenes
from tests.model.driving import greedy, run, sampled
from tests.model.folders import model_folder
from tests.model.passes import CPU, error_of, node_logits
from tests.model.rows import TableDrafter
from tests.model.tiny import model, own_greedy_text, own_module

RECURRENT = ("qwen3_next", "lfm2", "falcon_h1", "mamba2")
BUSHY = Expansion(1, 2, 2)
LIMITS = SchedulerConfig(num_slots=512, max_model_len=64)
PROMPT = [5, 9, 33, 4, 17, 9, 33, 8, 21, 40, 3, 12, 5]


@pytest.mark.parametrize("family", RECURRENT)
@settings(max_examples=8)
@given(rows=scenes())
def test_tree_pass_is_the_sequential_pass(family, rows):
    """With chunks of any length before it, and trees of any shape."""
    assert error_of(node_logits(model(family), rows), family, rows) < EXACT * 5


@pytest.mark.parametrize("family", RECURRENT)
def test_ragged_scene_is_exact(family):
    assert error_of(node_logits(model(family), ragged_scene()), family, ragged_scene()) < EXACT * 5


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "mamba2"])
def test_projections_run_once_a_pass(family, monkeypatch):
    """Bug: each level of a tree read the weights of the first and last products again."""
    counts: list[int] = []
    own = functional.linear

    def counted(*given):
        counts.append(1)
        return own(*given)

    monkeypatch.setattr(functional, "linear", counted)
    found = []
    for num_nodes in (1, 6):
        cache = KVCache(16, CPU)
        model(family).forward(pack([chain_segment(PROMPT[:4], 0, [*range(4)])], CPU), cache, torch.tensor([0]))
        counts.clear()
        tree = TokenTree.chain(PROMPT[:num_nodes])
        model(family).forward(pack([tree_segment([5], tree, 4, [*range(4 + num_nodes)])], CPU), cache, torch.tensor([0]))
        found.append(len(counts))
    assert found[0] == found[1] > 0


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "mamba2"])
@pytest.mark.parametrize("method", ["_project_first", "_project_last"])
def test_the_check_kills_swapped_projections(family, method, monkeypatch):
    """The mutant gives each node of a level the products of its neighbour."""
    own = getattr(_Projections, method)

    def swapped(projections, *given):
        right = projections._tokens_BN
        projections._tokens_BN = right.roll(1, 0)
        try:
            return own(projections, *given)
        finally:
            projections._tokens_BN = right

    monkeypatch.setattr(_Projections, method, swapped)
    with pytest.raises(UnsupportedModel, match="differs from the model's own"):
        tiny_model(family)


def state_of_a_sibling(steps: Sequence[PathStep]) -> list[PathStep]:
    """Each node of a level continues from the parent of its neighbour."""
    return [step if step.parents is None else replace(step, parents=step.parents[1:] + step.parents[:1]) for step in steps]


def state_of_a_grandparent(steps: Sequence[PathStep]) -> list[PathStep]:
    """A node continues from the state before its parent, if that is a node too."""
    levels = [(step.ends, step.parents) for step in steps if step.token_index_BN.shape[1] == 1 and step.parents]
    before = {own: parent for ends, parents in levels for own, parent in zip(ends, parents, strict=True)}
    return [
        step if step.parents is None else replace(step, parents=tuple(before.get(p, p) for p in step.parents)) for step in steps
    ]


def states_swapped(steps: Sequence[PathStep]) -> list[PathStep]:
    """The states after a level's nodes are stored for their neighbours: the sibling's state is kept."""
    return [replace(step, ends=step.ends[1:] + step.ends[:1]) for step in steps]


@pytest.mark.parametrize("family", RECURRENT)
@pytest.mark.parametrize("mutant", [state_of_a_sibling, state_of_a_grandparent, states_swapped])
def test_tree_pass_kills_states(family, mutant, monkeypatch):
    driven = model(family)
    monkeypatch.setattr(tree_attention, "path_steps", lambda batch: mutant(path_steps(batch)))
    assert error_of(node_logits(driven, ragged_scene()), family, ragged_scene()) > WRONG


@pytest.mark.parametrize("family", RECURRENT)
def test_the_check_kills_wrong_states(family, monkeypatch):
    """What is compared at load has a sibling, and a chunk that continues from another."""
    monkeypatch.setattr(tree_attention, "path_steps", lambda batch: states_swapped(path_steps(batch)))
    with pytest.raises(UnsupportedModel, match="differs from the model's own"):
        tiny_model(family)
    monkeypatch.setattr(PathStates, "read", lambda states, layer, slots: [])
    monkeypatch.setattr(tree_attention, "path_steps", path_steps)
    with pytest.raises(UnsupportedModel):
        tiny_model(family)


def test_steps_follow_the_tree():
    """A chunk is one call, and so is each level of all trees together."""
    tree = TokenTree((-1, 0, 0, 1, 2), (7, 1, 2, 3, 4), ((1, 2), (3,), (4,), (), ()))
    segments = [tree_segment([5, 6, 7], tree, 2, [*range(10, 19)]), chain_segment([8], 1, [30, 31]), chain_segment([9], 0, [40])]
    steps = path_steps(pack(segments, CPU))
    found = [(step.token_index_BN.tolist(), step.parents, step.ends) for step in steps]
    assert found == [
        ([[0, 1, 2]], (11,), (14,)),
        ([[8]], None, (40,)),
        ([[3], [4], [7]], (14, 14, 30), (15, 16, 31)),
        ([[5], [6]], (15, 16), (17, 18)),
    ]


def test_missing_state_is_detected():
    """A pass must never continue from zeros in the middle of a sequence."""
    cache = KVCache(8, CPU)
    driven = model("lfm2")
    driven.forward(pack([chain_segment([5, 6, 7], 0, [0, 1, 2])], CPU), cache, torch.tensor([0]))
    driven.forward(pack([chain_segment([8], 3, [0, 1, 2, 3])], CPU), cache, torch.tensor([0]))
    with pytest.raises(MissingState, match="slot 1"):
        driven.forward(pack([chain_segment([8], 2, [0, 1, 4])], CPU), cache, torch.tensor([0]))


def test_slots_keep_their_states_as_pools_grow():
    states = PathStates(CPU)
    for slot in range(50):
        states.write(0, [slot], [torch.full((1, 2), float(slot)), torch.full((1, 3), -float(slot))])
    states.drop(range(0, 50, 2))
    states.write(0, [100, 102], [torch.full((2, 2), 7.0), torch.full((2, 3), 8.0)])
    first, second = states.read(0, [49, 100, 1])
    assert first[:, 0].tolist() == [49.0, 7.0, 1.0]
    assert second[:, 0].tolist() == [-49.0, 8.0, -1.0]
    assert len(states) == 27


def drafter(*texts: Sequence[int]) -> TableDrafter:
    """Return a drafter of pairs of the texts' tokens, and of others."""
    logits_VV = torch.randn(61, 61, generator=torch.Generator().manual_seed(3))
    for text in texts:
        for one, other in pairwise(text):
            logits_VV[one, other] += 4.0
    return TableDrafter(logits_VV)


def engine_of(family: str, *texts: Sequence[int], **limits: Any) -> Engine:
    return tiny_engine(model(family), drafter(*texts), FixedExpansion(BUSHY), config=replace(LIMITS, **limits))


def states_left(engine: Engine) -> int:
    return len(engine.target.cache.states)


def prompts() -> Iterator[list[int]]:
    for length in (1, 2, 5, 13, 30):
        yield [random.Random(length).randrange(3, 61) for _ in range(length)]


@pytest.mark.parametrize(
    "limits", [{}, {"max_step_tokens": 16, "max_running": 8}, {"num_slots": 90}], ids=["wide", "chunked", "preempted"]
)
@pytest.mark.parametrize("family", RECURRENT)
def test_greedy_texts_are_generates(family, limits):
    """In one batch, with prompts in chunks, and with sequences that lose their slots and are fed again from their prompts."""
    expected = [own_greedy_text(family, prompt, 20) for prompt in prompts()]
    engine = engine_of(family, *([*prompt, *text] for prompt, text in zip(prompts(), expected, strict=True)), **limits)
    session = run(engine, [greedy(str(index), prompt, 20) for index, prompt in enumerate(prompts())])
    assert [session.texts()[str(index)] for index in range(len(expected))] == expected
    assert 0 < sum(stats.num_accepted_tokens for stats in session.stats) < sum(stats.num_draft_tokens for stats in session.stats)
    assert ("num_slots" in limits) == any(stats.num_preemptions for stats in session.stats)
    assert states_left(engine) == 0


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_served_texts_are_generates(family, tmp_path):
    """Over HTTP, two at a time, under trees that are accepted in part."""
    texts = {tuple(prompt): own_greedy_text(family, prompt, 20) for prompt in (PROMPT, PROMPT[:4])}
    engine = InProcessEngine(lambda: engine_of(family, *([*prompt, *text] for prompt, text in texts.items())), LIMITS)
    tokenizer = load_tokenizer(model_folder(tmp_path, own_module("llama")))
    options = {"model": MODEL, "temperature": 0.0, "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
    with served(app_of(engine, tokenizer=tokenizer)) as url, ThreadPoolExecutor(2) as pool:
        bodies = [{**options, "prompt": list(prompt)} for prompt in texts]
        answers = [
            one.json() for one in pool.map(lambda body: httpx.post(url + "/v1/completions", json=body, timeout=60), bodies)
        ]
    assert [answer["choices"][0]["token_ids"] for answer in answers] == list(texts.values())
    assert all(answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0 for answer in answers)


@pytest.mark.parametrize("family", RECURRENT)
def test_one_state_is_kept_of_a_sequence(family):
    """Between steps: that of its last token in the cache. A request that is aborted leaves none."""
    engine = engine_of(family, [*PROMPT, *own_greedy_text(family, PROMPT, 12)])

    def check(engine: Engine) -> None:
        assert states_left(engine) == len(engine._scheduler._running)

    run(engine, [greedy("a", PROMPT), greedy("b", PROMPT[:4])], check)
    engine.add(greedy("c", PROMPT))
    engine.step()
    assert states_left(engine) == 1
    engine.abort("c")
    assert states_left(engine) == 0


def test_a_state_of_another_path_is_seen(monkeypatch):
    """The mutant keeps the state of the path's neighbour."""
    expected = own_greedy_text("qwen3_next", PROMPT, 20)
    engine = engine_of("qwen3_next", [*PROMPT, *expected])
    monkeypatch.setattr(tree_attention, "path_steps", lambda batch: states_swapped(path_steps(batch)))
    session = run(engine, [greedy("a", PROMPT, 20)])
    assert session.texts()["a"] != expected


@pytest.mark.parametrize("family", RECURRENT)
def test_prefixes_are_not_shared(family):
    """The bug to come: a block of the prefix cache has keys, but no state to continue from."""
    expected = own_greedy_text(family, [*PROMPT, *PROMPT], 8)
    engine = engine_of(family)
    for name in ("a", "b"):
        session = run(engine, [greedy(name, [*PROMPT, *PROMPT], 8)])
        assert session.texts()[name] == expected
        assert not any(stats.num_prefix_hits for stats in session.stats)


@pytest.mark.parametrize("family", RECURRENT)
def test_a_resumed_text_goes_on(family):
    """As after a crash of the worker: what was emitted before is fed again."""
    expected = own_greedy_text(family, PROMPT, 16)
    request = replace(greedy("a", PROMPT, 16), progress=Progress(token_ids=tuple(expected[:7])))
    assert run(engine_of(family), [request]).texts()["a"] == expected[7:]


@pytest.mark.parametrize("family", RECURRENT)
def test_seeded_text_is_equal_without_drafts(family):
    text = own_greedy_text(family, PROMPT, 16)
    seeded = [sampled(str(seed), PROMPT, seed) for seed in range(4)]
    plain = [replace(one, speculation=replace(one.speculation, is_enabled=False)) for one in seeded]
    assert run(engine_of(family, [*PROMPT, *text]), seeded).texts() == run(engine_of(family), plain).texts()


def test_teacher_forcing_keeps_states():
    engine = engine_of("qwen3_next")
    text = own_greedy_text("qwen3_next", PROMPT, 20)
    forcing, logits = engine.forcing(), []
    forcing.start(KnownText(tuple(PROMPT), tuple(text)))
    while forcing.is_running:
        step = forcing.step()
        logits += [] if step.logits_NV is None else [*step.logits_NV.argmax(-1).tolist()]
    assert logits == text
    assert states_left(engine) == 0
