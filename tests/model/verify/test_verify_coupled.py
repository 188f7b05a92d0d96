"""Coupled and greedy verification: the text is plain decoding's own, whatever is drafted."""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.core.rng_keys import StepKey, Stream, stream_key
from engine.core.tree import TokenTree
from engine.core.types import SamplingParams
from engine.native import library
from engine.native.distributions import KeptTokens
from engine.sampling.distributions import warped_probs
from engine.sampling.noise import gumbels
from engine.verify import coupled
from engine.verify.coupled import Coupled, follow, judge_coupled_natively, judge_greedy
from engine.verify.errors import NonFiniteDistributionError
from engine.verify.forest import Forest
from engine.verify.verdict import Verdict
from tests.enumeration import Context, DrawnTree, TinyModel, TreeBuilder, batch_of
from tests.needs import needs_library

VOCAB = 4
NUM_TOKENS = 12


def any_tree(rng: random.Random) -> DrawnTree:
    """Return a random tree of up to ten nodes, grown without any distribution."""
    builder = TreeBuilder()
    contexts: list[Context] = [()]
    for _ in range(rng.randrange(10)):
        child = (*rng.choice(contexts), rng.randrange(VOCAB))
        if child not in contexts:
            builder.draw(child[:-1], child[-1])
            contexts.append(child)
    return builder.drawn(1.0)


class After:
    """A model as it continues a text."""

    def __init__(self, model: TinyModel, text: Context) -> None:
        self.vocab_size = model.vocab_size
        self.target = lambda context: model.target(text + context)
        self.draft = lambda context: model.draft(text + context)


def plain_text(model: TinyModel, seed: int) -> Context:
    """Decode token by token: arg max of log p plus the noise of the token's own position; the prompt's last position is 0."""
    text: Context = ()
    for position in range(1, NUM_TOKENS + 1):
        noise = gumbels([stream_key(seed, position, Stream.TOKEN)], VOCAB)[0]
        text += (int((torch.tensor(model.target(text)).log() + noise).argmax()),)
    return text


def emitted(drawn: DrawnTree, verdict: Verdict) -> Context:
    return (*drawn.contexts[verdict.path[-1]], verdict.extra_id)


Judging = Callable[[Forest, torch.Tensor, list[StepKey]], list[Verdict]]


def by_probs(forest: Forest, probs_NV: torch.Tensor, keys: list[StepKey]) -> list[Verdict]:
    return Coupled().judge(forest, probs_NV, keys)


def by_library(forest: Forest, probs_NV: torch.Tensor, keys: list[StepKey]) -> list[Verdict]:
    """Judge the logits of these distributions, at a temperature that they are made for. The rows are among others."""
    rows, temperatures = range(1, 2 * len(probs_NV), 2), [0.5 + b % 3 for b in range(len(forest.trees))]
    logits_NV = torch.full((2 * len(probs_NV), probs_NV.shape[1]), math.nan)
    of_tree = torch.tensor([t for t, tree in zip(temperatures, forest.trees) for _ in range(tree.num_nodes)])
    logits_NV[list(rows)] = probs_NV.float().log() * of_tree[:, None]
    return judge_coupled_natively(forest.trees, logits_NV, rows, temperatures, [KeptTokens()] * len(forest.trees), keys)


WAYS = [by_probs, pytest.param(by_library, marks=needs_library)]


def speculative_text(model: TinyModel, seed: int, rng: random.Random, judge: Judging = by_probs) -> Context:
    text: Context = ()
    while len(text) < NUM_TOKENS:
        drawn = any_tree(rng)
        batch = batch_of(After(model, text), [drawn])  # type: ignore[arg-type]
        text += emitted(drawn, judge(batch.forest, batch.target_probs_NV, [StepKey(seed, len(text))])[0])
    return text[:NUM_TOKENS]


@pytest.mark.parametrize("judge", WAYS)
@pytest.mark.parametrize("flavour", ["generic", "sparse", "peaked"])
def test_any_tree_gives_the_plain_decoding_tokens(flavour: str, judge: Judging) -> None:
    for seed in range(25):
        model = TinyModel(VOCAB, seed, flavour)
        assert speculative_text(model, seed, random.Random(seed), judge) == plain_text(model, seed)


@needs_library
@pytest.mark.parametrize("is_mutant", [False, True])
def test_truncated_trees_are_judged_as_by_distributions(is_mutant: bool) -> None:
    """Every tree has its own truncation. The mutant gives each tree its neighbour's."""
    rng, count = random.Random(5), 120
    model = TinyModel(VOCAB, 3)
    batch = batch_of(model, [any_tree(rng) for _ in range(count)])
    trees, keys = batch.forest.trees, [StepKey(seed, seed % 5) for seed in range(count)]
    kept = [KeptTokens(), KeptTokens(2), KeptTokens(0, 0.6), KeptTokens(0, 1.0, 0.5), KeptTokens(3, 0.7, 0.1)] * (count // 5)
    logits_NV = batch.target_probs_NV.float().log()
    sampling = [
        SamplingParams(top_k=one.top_k, top_p=one.top_p, min_p=one.min_p)
        for one, tree in zip(kept, trees, strict=True)
        for _ in range(tree.num_nodes)
    ]
    expected = by_probs(batch.forest, warped_probs(logits_NV, sampling), keys)
    given = kept[1:] + kept[:1] if is_mutant else kept
    judged = judge_coupled_natively(trees, logits_NV, range(len(logits_NV)), [1.0] * count, given, keys)
    assert (judged == expected) is not is_mutant


@needs_library
def test_batched_trees_are_judged_as_by_distributions() -> None:
    rng = random.Random(3)
    model = TinyModel(VOCAB, 3)
    batch = batch_of(model, [any_tree(rng) for _ in range(40)])
    keys = [StepKey(seed, seed % 5) for seed in range(40)]
    judged = by_library(batch.forest, batch.target_probs_NV, keys)
    assert judged == by_probs(batch.forest, batch.target_probs_NV, keys)
    assert len({len(verdict.path) for verdict in judged}) > 2


@pytest.mark.parametrize("judge", WAYS)
def test_invalid_distribution_on_path_names_its_tree(judge: Judging) -> None:
    rng = random.Random(4)
    batch = batch_of(TinyModel(VOCAB, 4), [any_tree(rng) for _ in range(12)])
    keys = [StepKey(seed, 1) for seed in range(12)]
    offsets, paths = batch.forest.offsets, [one.path for one in by_probs(batch.forest, batch.target_probs_NV, keys)]
    deep = next(i for i, path in enumerate(paths) if len(path) > 1)
    probs_NV = batch.target_probs_NV.clone()
    probs_NV[offsets[2]] = math.nan
    probs_NV[offsets[deep] + paths[deep][1], 1] = math.nan
    with pytest.raises(NonFiniteDistributionError) as raised:
        judge(batch.forest, probs_NV, keys)
    assert judge is by_probs or set(raised.value.trees) == {2, deep}
    assert set(raised.value.trees) <= {2, deep}


@pytest.mark.parametrize("shift", [-1, 1, "root"], ids=["early", "late", "one-noise-for-all-depths"])
def test_noise_of_another_position_is_noticed(shift, monkeypatch: pytest.MonkeyPatch) -> None:
    right = coupled._noise_key
    monkeypatch.setattr(coupled, "_noise_key", lambda key, depth: right(key, 0 if shift == "root" else depth + shift))
    for judge in (by_probs, by_library) if library.is_available() else (by_probs,):
        with pytest.raises(AssertionError):
            test_any_tree_gives_the_plain_decoding_tokens("generic", judge)


def surprise_of_pairs(model: TinyModel, num_seeds: int) -> float:
    """Return how far the counts of a two-node path's first two tokens are from their distribution, in standard deviations."""
    likeliest = int(np.argmax(model.target(())))
    drawn = DrawnTree(TokenTree((-1, 0), (0, likeliest), ((1,), ())), ((), (likeliest,)), 1.0)
    batch = batch_of(model, [drawn])
    keys = [StepKey(seed, 0) for seed in range(num_seeds)]
    forest = Forest(batch.forest.trees * num_seeds, batch.forest.draft_probs_RV, batch.forest.probs_rows * num_seeds)
    counts = np.zeros(VOCAB)
    for verdict in Coupled().judge(forest, batch.target_probs_NV.repeat(num_seeds, 1), keys):
        if len(verdict.path) == 2:
            counts[verdict.extra_id] += 1
    expected = num_seeds * model.target(())[likeliest] * model.target((likeliest,))
    return float((((counts - expected) ** 2 / expected).sum() - VOCAB) / (2 * VOCAB) ** 0.5)


def test_tokens_at_two_depths_are_independent_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal sequences cannot reveal noise that is reused at the next position. The joint distribution can."""
    model = TinyModel(VOCAB, seed=2)
    assert surprise_of_pairs(model, 3000) < 5.0
    right = coupled._noise_key
    monkeypatch.setattr(coupled, "_noise_key", lambda key, depth: right(key, 0))
    assert surprise_of_pairs(model, 3000) > 20.0


def greedy_text(model: TinyModel, rng: random.Random) -> Context:
    text: Context = ()
    while len(text) < NUM_TOKENS:
        drawn = any_tree(rng)
        choices = [int(np.argmax(model.target(text + context))) for context in drawn.contexts]
        text += emitted(drawn, judge_greedy([drawn.tree], choices)[0])
    return text[:NUM_TOKENS]


def plain_greedy_text(model: TinyModel) -> Context:
    text: Context = ()
    while len(text) < NUM_TOKENS:
        text += (int(np.argmax(model.target(text))),)
    return text


@given(st.integers(0, 10_000))
def test_greedy_tokens_equal_plain_argmax(seed: int) -> None:
    model = TinyModel(VOCAB, seed % 50)
    assert greedy_text(model, random.Random(seed)) == plain_greedy_text(model)


def test_bonus_token_from_root_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def follow_with_root_bonus(tree: TokenTree, choices: list[int]) -> Verdict:
        return Verdict(follow(tree, choices).path, choices[0])

    monkeypatch.setattr(coupled, "follow", follow_with_root_bonus)
    models = [TinyModel(VOCAB, seed) for seed in range(20)]
    assert any(greedy_text(model, random.Random(0)) != plain_greedy_text(model) for model in models)


def test_greedy_reads_trees_by_their_own_choices() -> None:
    chain = TokenTree((-1, 0, 1), (9, 5, 6), ((1,), (2,), ()))
    verdicts = judge_greedy([TokenTree.single(1), chain, chain], [7, 5, 6, 8, 5, 4, 3])
    assert verdicts == [Verdict((0,), 7, 1.0), Verdict((0, 1, 2), 8, 3.0), Verdict((0, 1), 4, 2.0)]
