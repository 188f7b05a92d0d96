"""Phase 2: draws follow the masses, each draw has its own randomness, and no tree depends on another."""

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.core.rng_keys import StepKey, Stream, stream_key
from engine.core.tree import Expansion, TokenTree
from engine.core.verifier_table import VERIFIER_NAMES
from engine.sampling.noise import uniforms
from engine.verify import two_phase
from engine.verify.forest import Forest
from engine.verify.registry import create_verifier
from engine.verify.two_phase import TwoPhase, draw, draw_one
from engine.verify.verdict import Verdict
from tests.enumeration import Batch, TinyModel, batch_of, delayed_trees
from tests.model.verify.rules_under_test import RULES, TRAVERSAL, outcomes_of

NUM_SEEDS = 4000
UNSURPRISING, NOTICED = 4.0, 10.0  # standard deviations of a chi-square


def copies(batch: Batch, count: int) -> Forest:
    """Return a forest of `count` copies of the batch's first tree."""
    forest = batch.forest
    return Forest(forest.trees[:1] * count, forest.draft_probs_RV, forest.probs_rows[:1] * count)


def one_tree(seed: int = 6) -> Batch:
    """Return a tree whose branches differ, so that verdicts end in several places."""
    model = TinyModel(3, seed)
    return batch_of(model, [max(delayed_trees(model, Expansion(1, 2, 1)), key=lambda drawn: drawn.tree.num_nodes)])


def verdicts_of(rule: TwoPhase, batch: Batch, keys: Sequence[StepKey]) -> list[Verdict]:
    probs_NV = batch.target_probs_NV[: batch.forest.trees[0].num_nodes].repeat(len(keys), 1)
    return rule.judge(copies(batch, len(keys)), probs_NV, keys)


def chi_square(counts: Tensor, distribution: Tensor) -> float:
    """Return Pearson's statistic in standard deviations above its mean; impossible outcomes must not occur."""
    expected = distribution * counts.sum()
    possible = distribution > 1e-12
    assert counts[~possible].sum() == 0
    statistic = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    freedom = int(possible.sum()) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def joint_surprise(rule: TwoPhase, batch: Batch, keys: Sequence[StepKey]) -> float:
    """Return how far the joint counts of (last node, extra token) are from the exact joint distribution."""
    outcomes = outcomes_of(rule, batch)
    counts = torch.zeros_like(outcomes.extra_NV)
    for verdict in verdicts_of(rule, batch, keys):
        counts[verdict.path[-1], verdict.extra_id] += 1
    return chi_square(counts, outcomes.stop_N[:, None] * outcomes.extra_NV)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_nodes_and_extra_tokens_follow_the_masses(rule: TwoPhase) -> None:
    assert joint_surprise(rule, one_tree(), [StepKey(seed, 10) for seed in range(NUM_SEEDS)]) < UNSURPRISING


def test_shared_acceptance_uniform_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_phase, "stream_key", lambda seed, position, stream: stream_key(seed, position, Stream.ACCEPT))
    assert joint_surprise(TRAVERSAL, one_tree(), [StepKey(seed, 10) for seed in range(NUM_SEEDS)]) > NOTICED


def dependence_of_positions(rule: TwoPhase, batch: Batch) -> float:
    """Return the surprise of the joint counts of where the path ends at two positions, were they independent."""
    stop_N = outcomes_of(rule, batch).stop_N
    counts = torch.zeros(len(stop_N), len(stop_N), dtype=torch.float64)
    first, second = ([StepKey(seed, position) for seed in range(NUM_SEEDS)] for position in (10, 11))
    for here, there in zip(verdicts_of(rule, batch, first), verdicts_of(rule, batch, second)):
        counts[here.path[-1], there.path[-1]] += 1
    return chi_square(counts, torch.outer(stop_N, stop_N))


def test_draws_at_two_positions_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = one_tree()
    assert dependence_of_positions(TRAVERSAL, batch) < UNSURPRISING
    monkeypatch.setattr(two_phase, "stream_key", lambda seed, position, stream: stream_key(seed, 0, stream))
    assert dependence_of_positions(TRAVERSAL, batch) > NOTICED


def first_token_surprise() -> float:
    """Draft one token by the DRAFT stream as a drafter does, verify it, and compare the first token's distribution with p."""
    model = TinyModel(3, seed=8)
    target, draft = torch.tensor(model.target(())), torch.tensor(model.draft(()))
    keys = [StepKey(seed, 3) for seed in range(NUM_SEEDS)]
    drafted = draw(
        draft.expand(NUM_SEEDS, -1), uniforms([stream_key(key.seed, key.root_position, Stream.DRAFT) for key in keys], 1)[:, 0]
    ).tolist()
    trees = tuple(TokenTree((-1, 0), (0, token_id), ((1,), ())) for token_id in drafted)
    forest = Forest(trees, draft[None], ((0, None),) * NUM_SEEDS)
    counts = torch.zeros(3, dtype=torch.float64)
    for tree, verdict in zip(trees, TRAVERSAL.judge(forest, target.expand(2 * NUM_SEEDS, -1), keys)):
        counts[tree.token_ids[1] if len(verdict.path) > 1 else verdict.extra_id] += 1
    return chi_square(counts, target)


@pytest.mark.parametrize("reused", [Stream.ACCEPT, Stream.EXTRA])
def test_draft_noise_reused_by_verifier_is_detected(reused: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """A public server drew its residual with the noise that had drawn the draft and was off by 3 points."""
    assert first_token_surprise() < UNSURPRISING

    def with_reuse(seed: int, position: int, stream: Stream) -> int:
        return stream_key(seed, position, Stream.DRAFT if stream == reused else stream)

    monkeypatch.setattr(two_phase, "stream_key", with_reuse)
    assert first_token_surprise() > NOTICED


def several_trees() -> Batch:
    """Return trees of several shapes in one float32 forest."""
    model = TinyModel(4, seed=3)
    shapes = [Expansion(0, 3, 1), Expansion(2, 2, 1), Expansion(1, 1, 0), Expansion(0, 1, 0), Expansion(0, 2, 2)]
    return batch_of(model, [delayed_trees(model, shape)[-1 if i % 2 else 0] for i, shape in enumerate(shapes)], torch.float32)


def alone(name: str, batch: Batch, keys: Sequence[StepKey], b: int) -> Verdict:
    rows = slice(batch.forest.offsets[b], batch.forest.offsets[b + 1])
    return create_verifier(name).judge(batch.forest.subset([b]), batch.target_probs_NV[rows], [keys[b]])[0]


@pytest.mark.parametrize("name", VERIFIER_NAMES)
def test_verdict_is_independent_of_batch_mates(name: str) -> None:
    batch = several_trees()
    for seed in range(12):
        keys = [StepKey(seed, 7 * b) for b in range(len(batch.trees))]
        together = create_verifier(name).judge(batch.forest, batch.target_probs_NV, keys)
        assert together == [alone(name, batch, keys, b) for b in range(len(batch.trees))]


def test_randomness_by_batch_index_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_place(keys: Sequence[StepKey], stream: Stream) -> list[float]:
        return uniforms([stream_key(keys[0].seed, 0, stream)], len(keys))[0].tolist()

    monkeypatch.setattr(two_phase, "_uniforms", by_place)
    with pytest.raises(AssertionError):
        test_verdict_is_independent_of_batch_mates("traversal")


def test_large_levels_are_split_without_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = several_trees()
    keys = [StepKey(1, 7 * b) for b in range(len(batch.trees))]
    whole = TRAVERSAL.judge(batch.forest, batch.target_probs_NV, keys)
    monkeypatch.setattr("engine.verify.layout._CPU_ENTRIES", 1)
    assert TRAVERSAL.judge(batch.forest, batch.target_probs_NV, keys) == whole


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_expected_tokens_follow_the_end_distribution(rule: TwoPhase) -> None:
    batch = one_tree()
    verdicts = verdicts_of(rule, batch, [StepKey(seed, 0) for seed in range(NUM_SEEDS)])
    expected = verdicts[0].expected_tokens
    depths = torch.tensor(batch.forest.trees[0].depths)
    assert expected == pytest.approx(float((outcomes_of(rule, batch).stop_N * (depths + 1)).sum()), abs=1e-12)
    lengths = np.array([len(verdict.path) for verdict in verdicts])
    assert abs(lengths.mean() - expected) < 5 * lengths.std() / NUM_SEEDS**0.5
    assert abs((lengths - 1).mean() - expected) > 5 * lengths.std() / NUM_SEEDS**0.5  # the mutant: depth for depth + 1


def naive_draw(weights_MV: Tensor, uniforms_M: Tensor) -> Tensor:
    """The mutant: the first index whose cumulative weight is at least u."""
    return torch.searchsorted(weights_MV.cumsum(-1), uniforms_M[:, None] * weights_MV.sum(-1, keepdim=True)).squeeze(-1)


@given(
    st.lists(st.sampled_from([0.0, 1e-30, 1e-8, 0.3, 1.0]), min_size=1, max_size=8).filter(lambda weights: sum(weights) > 0.0),
    st.sampled_from([0.0, 2.0**-60, 0.25, 0.5, 1.0 - 2.0**-53, 1.0]),
)
def test_index_of_weight_zero_is_never_drawn(weights: list[float], u: float) -> None:
    index = int(draw(torch.tensor([weights]), torch.tensor([u], dtype=torch.float64)))
    assert weights[index] > 0.0


weight_lists = st.lists(st.sampled_from([0.0, 1e-30, 1e-8, 0.1, 0.3, 1.0]), min_size=1, max_size=8).filter(any)


@given(weight_lists, st.one_of(st.floats(0.0, 1.0), st.sampled_from([0.0, 0.25, 0.5, 1.0 - 2.0**-53, 1.0])))
def test_host_draw_equals_device_draw(weights: list[float], u: float) -> None:
    one = torch.tensor([u], dtype=torch.float64)
    assert draw_one(weights, u) == int(draw(torch.tensor([weights], dtype=torch.float64), one))


def test_leftmost_host_draw_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_phase, "bisect_right", bisect_left)
    with pytest.raises(AssertionError):
        test_host_draw_equals_device_draw()


def test_the_naive_inverse_does_draw_weight_zero() -> None:
    assert int(naive_draw(torch.tensor([[0.0, 1.0]], dtype=torch.float64), torch.tensor([0.0], dtype=torch.float64))) == 0
