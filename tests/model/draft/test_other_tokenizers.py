"""A draft model with another tokenizer changes no text: greedy, seeded and sampled, on trees of every kind."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from engine.attention.paged.buffer import TableBuffer
from engine.attention.paged.graph_recorder import Unrecorded
from engine.attention.paged.graphs import GraphResources
from engine.attention.paged.padding_shapes import PaddingShapes
from engine.attention.paged.reference import attend
from engine.build import build_engine
from engine.core.config import EngineConfig, SchedulerConfig
from engine.core.step_plan import Row
from engine.core.tree import ROOT, Expansion
from engine.core.types import Request, SamplingParams, Speculation
from engine.draft.drafter import FrontierNode, GrowingTree
from engine.draft.models import token_map, translating_drafter
from engine.draft.models.token_map import TokenMap, TranslatedText
from engine.draft.models.translating_drafter import TranslatingDrafter
from engine.draft.text.text_cache import TextCache
from engine.draft.text_and_model import CombinedDrafter
from engine.draft.trees import sampling as children
from engine.draft.trees.grow import DeviceGrower
from engine.model.causal_lm import CausalModel
from engine.testing import tiny_module
from tests.chi_square import FAILS_ABOVE, PASSES_BELOW, z_of_counts
from tests.model.distributions import text_distribution
from tests.model.draft.other_tokenizers import (
    PAIRS,
    TEXTS,
    drafter_of,
    engine_of,
    greedy_text,
    model_folder_of,
    modules,
    prompt_of,
    tokens_of,
    vocabulary,
)
from tests.model.driving import Session, greedy, run, sampled
from tests.model.passes import CPU

CHAIN, DELAYED, HEAP = Expansion(4, 1, 0), Expansion(1, 3, 2), Expansion(0, 3, 4, "heap", 8)
NOISE_AWARE = Expansion(0, 3, 4, "noise_aware", 6)
TREES = [CHAIN, DELAYED, HEAP, NOISE_AWARE]
OTHER = PAIRS[0]


def num_accepted(session: Session) -> int:
    return sum(stats.num_accepted_tokens for stats in session.stats)


def checked(drafter: TranslatingDrafter):
    """Return what checks the drafter's slots after a step."""
    return lambda _: drafter.check_integrity()


# Texts


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_greedy_texts_are_those_of_transformers(pair, tree):
    drafter = drafter_of(*pair)
    engine = engine_of(pair[0], pair[1], tree, drafter=drafter)
    prompts = {name: prompt_of(pair[0], name) for name in TEXTS}
    session = run(engine, [greedy(name, prompt, 24) for name, prompt in prompts.items()], checked(drafter))
    target = modules(*pair)[0]
    assert session.texts() == {name: greedy_text(target, prompt, 24) for name, prompt in prompts.items()}
    assert num_accepted(session) > (10 if pair == OTHER else 0)


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_seeded_texts_are_those_without_drafts(tree):
    engine = engine_of(*OTHER, tree)
    requests = [sampled(name, prompt_of(OTHER[0], name), seed, 24) for seed, name in enumerate(TEXTS)]
    plain = [replace(request, speculation=Speculation(is_enabled=False)) for request in requests]
    drafted = run(engine, requests)
    assert drafted.texts() == run(engine, plain).texts()
    assert num_accepted(drafted) > 10


def test_cached_text_beside_it_changes_no_text():
    """A token of cached text that the drafter lacks has no keys in its cache, and no drafts below it."""
    drafter = drafter_of(*OTHER)
    combined = CombinedDrafter(drafter, TextCache(), len(vocabulary_tokens(OTHER[0])), torch.device("cpu"))
    engine = engine_of(*OTHER, Expansion(6, 1, 0), drafter=combined)
    prompt = prompt_of(OTHER[0], "cjk") * 4
    for _ in range(2):
        session = run(engine, [greedy("r", prompt, 24)], checked(drafter))
        assert session.texts()["r"] == greedy_text(modules(*OTHER)[0], prompt, 24)


def vocabulary_tokens(name: str) -> range:
    return range(vocabulary(name).vocab_size)


# The distribution

PROMPT = prompt_of(OTHER[0], "code")
SAMPLING = SamplingParams(temperature=1.2, top_k=3, max_tokens=3, ignore_eos=True)
WIDE = SchedulerConfig(max_running=128, max_step_tokens=2048, num_slots=8192, max_model_len=64)
NUM_REQUESTS = 1000


@cache
def target_distribution() -> dict[tuple[int, ...], float]:
    """Return the distribution of the first two tokens, by transformers' logits."""

    def logits_after(texts: list[tuple[int, ...]]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = modules(*OTHER, True)[0](input_ids=torch.tensor([[*PROMPT, *text] for text in texts])).logits
        return logits[:, -1].float()

    return text_distribution(logits_after, 2, SAMPLING)


def score(verifier: str, tree: Expansion) -> float:
    """Return the z score of the first two tokens of many seeds."""
    engine = engine_of(*OTHER, tree, True, WIDE, drafter_of(*OTHER, True, num_slots=16384))
    speculation = Speculation(verifier=verifier)
    seeds = range(NUM_REQUESTS)
    session = run(engine, [Request(str(seed), PROMPT, replace(SAMPLING, seed=seed), speculation) for seed in seeds])
    assert 0.15 < num_accepted(session) / sum(stats.num_drafts for stats in session.stats) < 1.9
    return z_of_counts(Counter(tuple(outcome.ids[:2]) for outcome in session.outcomes.values()), target_distribution())


@pytest.mark.parametrize(
    ("verifier", "tree"),
    [("traversal", DELAYED), ("rrsw", HEAP), ("hu", Expansion(0, 3, 3, "greedy_sample", 5)), ("coupled", NOISE_AWARE)],
)
def test_verifiers_keep_the_targets_distribution(verifier, tree):
    assert score(verifier, tree) < PASSES_BELOW


def test_mutant_unnormalised_draft_probabilities_are_seen(monkeypatch):
    """The mutant samples from the shared tokens and reports the model's own probabilities of them."""
    original = children._recorded_probs

    def unnormalised(nodes, logits_PM, probs, vocab):
        probs_PM = original(nodes, logits_PM, probs, vocab)
        probs[-1] = probs[-1] * 0.4
        return probs_PM

    monkeypatch.setattr(children, "_recorded_probs", unnormalised)
    assert score("traversal", DELAYED) > FAILS_ABOVE


# The drafter's own text


def grown(tokens: TokenMap, token_ids, part: int) -> TranslatedText:
    """Return a text that grew by `part` tokens at a time."""
    text = TranslatedText(tokens)
    for end in [*range(part, len(token_ids), part), len(token_ids)]:
        text.follow(token_ids[:end])
    return text


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("part", [1, 2, 5])
def test_text_in_parts_is_encoded_as_whole(pair, part):
    """Each token of the target ends somewhere inside a word or a character of the drafter."""
    for text in TEXTS.values():
        token_ids = [vocabulary(pair[0]).tokenize_bytes(bytes([byte]))[0] for byte in text]
        found = grown(tokens_of(*pair), token_ids, part).draft_ids
        assert found == vocabulary(pair[1]).tokenize_bytes(text)


def test_mutant_without_encoding_again_is_seen(monkeypatch):
    monkeypatch.setattr(token_map, "_MOST_REENCODED", 0)
    monkeypatch.setattr(token_map, "_LONGEST_CHARACTER", 0)
    with pytest.raises(AssertionError):
        test_text_in_parts_is_encoded_as_whole(OTHER, 1)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_bytes_without_characters_keep_their_order(pair):
    noise = [index * 37 % vocabulary(pair[0]).vocab_size for index in range(200)]
    noise = [token_id for token_id in noise if not vocabulary(pair[0]).is_special_token(token_id)]
    found = grown(tokens_of(*pair), noise, 3)
    assert vocabulary(pair[1]).decode_bytes(found.draft_ids) == vocabulary(pair[0]).decode_bytes(noise)


def test_special_tokens_are_translated_or_left_out():
    tokens, target, draft = tokens_of(*OTHER), *map(vocabulary, OTHER)
    special = {name: target.tokenize_bytes(name)[0] for name in (b"<|start|>", b"<|end|>", b"<unk>")}
    text = grown(tokens, [special[b"<|start|>"], *target.tokenize_bytes(b"he"), special[b"<unk>"], special[b"<|end|>"]], 1)
    (start,), (end,) = (draft.tokenize_bytes(name) for name in (b"<|start|>", b"<|end|>"))
    assert text.draft_ids == [start, *draft.tokenize_bytes(b"he"), end]


def test_padding_of_output_heads_is_no_text(tmp_path):
    """A padded head has more rows than the tokenizer has tokens; a prompt of ids can have them. They were read as `<[336]>`."""
    folders = []
    for name in OTHER:
        module = tiny_module(vocab_size=vocabulary(name).vocab_size + 3)
        folders.append(model_folder_of(tmp_path / name, module, name))
    tokens, size = token_map.token_map(*folders), vocabulary(OTHER[0]).vocab_size
    assert tokens.draft_id_of == tokens_of(*OTHER).draft_id_of
    for padding in (size, size + 2):
        assert grown(tokens, [padding, *PROMPT, padding], 1).draft_ids == grown(tokens, PROMPT, 1).draft_ids


@pytest.mark.parametrize("is_spelled", [False, True])
def test_prefix_of_the_drafter_comes_once(is_spelled):
    """Some tokenizers put a token before a text. The target's text may begin with the same token."""
    pair = OTHER[::-1]
    target, draft = map(vocabulary, pair)
    (prefix,) = draft.tokenize_bytes(b"<|start|>")
    tokens = TokenMap(target, draft, (prefix,))
    spelled = target.tokenize_bytes(b"<|start|>") if is_spelled else []
    for part in (1, 9):
        assert grown(tokens, [*spelled, *target.tokenize_bytes(b"hello")], part).draft_ids == [
            prefix,
            *draft.tokenize_bytes(b"hello"),
        ]


# The drafter's cache


def row_of(name: str, history, max_depth: int = 3) -> Row:
    """Return a row whose root is the last token."""
    return Row(
        *(name, len(history) - 1, (history[-1],), 0, True, 0, (history[-1],), Expansion(max_depth, 1, 0), range(999)),
        *(SamplingParams(temperature=0.0), "nss", 0, history, len(history)),
    )


def root_logits(drafter: TranslatingDrafter, history) -> torch.Tensor:
    """Return the draft logits after a text."""
    row = row_of("r", history)
    return drafter.feed([row], [FrontierNode(GrowingTree(row), ROOT, 1)]).logits_PV


def test_kept_keys_are_those_of_one_pass():
    """Keys of drafted tokens are kept where the next text has the same tokens, and computed again elsewhere."""
    drafter, target = drafter_of(*OTHER), vocabulary(OTHER[0])
    drafter.begin(Request("r", PROMPT), PROMPT)
    history = [*PROMPT]
    for word in (b" hello", b" the", b" q", b"uick", "日本".encode(), b" there", b"\n"):
        mine, own = (root_logits(one, tuple(history)) for one in (drafter, drafter_of(*OTHER)))
        assert torch.allclose(mine.softmax(-1), own.softmax(-1), atol=1e-5)
        drafter.check_integrity()
        longest = max(drafter._texts["r"].nodes, key=len)
        history += [*longest[:1], *target.tokenize_bytes(word)]


def test_mutant_keys_of_refused_drafts_are_seen(monkeypatch):
    monkeypatch.setattr(translating_drafter, "_common_length", lambda one, other: min(len(one), len(other)))
    with pytest.raises(AssertionError):
        test_kept_keys_are_those_of_one_pass()


def num_fed(salts: tuple[str | None, str | None]) -> list[float]:
    """Return the committed tokens that two requests with the same prompt feed, the second after the end of the first."""
    drafter, counts = drafter_of(*OTHER), []
    for name, salt in zip("ab", salts, strict=True):
        drafter.begin(Request(name, PROMPT, cache_salt=salt), PROMPT)
        row = row_of(name, PROMPT)
        counts.append(drafter.feed([row], [FrontierNode(GrowingTree(row), ROOT, 1)]).passes.num_fed)
        drafter.end(name)
        drafter.check_integrity()
    return counts


def test_prefix_is_reused_within_a_salt():
    first, second = num_fed(("a", "a"))
    assert (first > 10, second) == (True, 3)  # the root, and two drafted tokens
    for salts in (("a", "b"), (None, None), (None, ""), ("", None)):
        assert num_fed(salts) == [first, first]


def test_stored_text_outlives_short_prefixes():
    """The rest of a text is freed when its prefix is taken: two texts with one special token in common must not take it."""
    drafter = drafter_of(*OTHER)
    history = (*PROMPT, *PROMPT)
    for name, text in (("a", history), ("b", PROMPT[:1] + prompt_of(OTHER[0], "cjk")[1:]), ("c", history)):
        drafter.begin(Request(name, text), text)
        row = row_of(name, text)
        num_fed = drafter.feed([row], [FrontierNode(GrowingTree(row), ROOT, 1)]).passes.num_fed
        drafter.end(name)
        drafter.check_integrity()
    assert num_fed == 3


def test_slots_are_freed_after_abort_and_preemption():
    drafter = drafter_of(*OTHER)
    small = SchedulerConfig(num_slots=96, max_model_len=90, max_running=8)
    engine = engine_of(*OTHER, DELAYED, config=small, drafter=drafter)
    for index in range(4):
        engine.add(replace(greedy(f"r{index}", PROMPT, 60), cache_salt=None))
    num_preemptions = 0
    while engine.has_work:
        waiting = {f"r{index}" for index in range(4)} - {*engine._scheduler.running_ids}
        num_preemptions += engine.step().stats.num_preemptions
        drafter.check_integrity()
        assert not drafter._texts.keys() & (waiting - {*engine._scheduler.running_ids})
        if num_preemptions:
            engine.abort("r0")
            assert "r0" not in drafter._texts
    assert num_preemptions
    assert drafter.pool.num_used == 0


def test_full_cache_leaves_requests_without_drafts():
    drafter = drafter_of(*OTHER, num_slots=24)
    engine = engine_of(*OTHER, CHAIN, drafter=drafter)
    session = run(engine, [greedy(str(index), PROMPT, 12) for index in range(4)], checked(drafter))
    assert {*map(tuple, session.texts().values())} == {tuple(greedy_text(modules(*OTHER)[0], PROMPT, 12))}
    events = [event for outcome in session.outcomes.values() for event in outcome.events]
    assert {event.num_draft_tokens > 0 for event in events if event.expansion == CHAIN} == {False, True}


def test_long_prompt_is_fed_in_several_steps(monkeypatch):
    monkeypatch.setattr("engine.draft.models.translating_drafter._MAX_FED", 8)
    drafter = drafter_of(*OTHER)
    session = run(engine_of(*OTHER, CHAIN, drafter=drafter), [greedy("r", PROMPT, 24)], checked(drafter))
    assert session.texts()["r"] == greedy_text(modules(*OTHER)[0], PROMPT, 24)
    assert num_accepted(session) > 0


# Serving


def test_configured_pair_of_other_tokenizer_is_served(tmp_path, caplog):
    target, draft = modules(*OTHER)
    folders = [model_folder_of(tmp_path / name, module, name) for name, module in zip(OTHER, (target, draft), strict=True)]
    limits = SchedulerConfig(num_slots=512, max_model_len=256)
    config = EngineConfig(str(folders[0]), drafter="model", draft_model=str(folders[1]), policy="fixed", scheduler=limits)
    with caplog.at_level("WARNING"):
        session = run(build_engine(config), [greedy("r", PROMPT, 16)])
    assert "the tokenizers differ" in caplog.text
    assert session.texts()["r"] == greedy_text(target, PROMPT, 16)
    assert num_accepted(session) > 0


def test_recorded_passes_grow_in_rounds():
    """A node is a token of the target, and may be a part of one of the drafter's, which a device cannot feed."""
    drafter = drafter_of(*OTHER)
    assert isinstance(drafter._model, CausalModel)
    drafter._model.attend = attend
    drafter.record(GraphResources(TableBuffer(4096, CPU), PaddingShapes(8), Unrecorded()))
    assert drafter.level_passes is None
    assert not DeviceGrower.of(drafter, 61, CPU).can_grow([])
