"""Rounding, empty residuals, and inputs that no verifier can judge: errors with names, never a wrong token."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

from engine.core.rng_keys import StepKey
from engine.core.tree import Expansion, TokenTree
from engine.core.verifier_table import VERIFIER_NAMES
from engine.verify.directions import BottomUp
from engine.verify.errors import ImpossibleDraftError, InvalidDistributionError, NonFiniteDistributionError
from engine.verify.forest import Forest
from engine.verify.layout import TreeLevel
from engine.verify.node_plans import TargetDraw
from engine.verify.registry import create_verifier
from engine.verify.two_phase import PlannedForest
from tests.enumeration import Batch, DrawnTree, TinyModel, batch_of, delayed_trees, distinct_trees
from tests.model.verify.rules_under_test import READS_DRAFT, RULES, TRAVERSAL, outcomes_of


class UniformFallback(PlannedForest):
    """The mutant that answers an empty residual with a uniform distribution."""

    def extra_weights(self, level: TreeLevel, prefix_P: Tensor) -> Tensor:
        weights_MV = self.plan.residual(self.families(level, prefix_P))
        return torch.where(weights_MV.sum(-1, keepdim=True) > 0.0, weights_MV, 1.0)


def drawable_after_root(case: PlannedForest) -> list[int]:
    """Return the tokens that can be drawn once all children of the first root are refused."""
    weights_MV = case.extra_weights(case.layout.level([0]), case.masses(BottomUp()).prefix_P)
    return weights_MV[0].nonzero().flatten().tolist()


@pytest.mark.parametrize("name", READS_DRAFT)
def test_empty_residual_uses_target_never_uniform(name: str) -> None:
    """With p = q the first child is taken for certain, so S = 0; token 2 has probability 0 and must stay impossible."""
    distribution = np.array([0.25, 0.75, 0.0])
    model = TinyModel(3, seed=0)
    model.target = model.draft = lambda context: distribution
    batch = batch_of(model, [DrawnTree(TokenTree((-1, 0), (0, 1), ((1,), ())), ((), (1,)), 1.0)])
    plan = RULES[name].plan
    assert drawable_after_root(PlannedForest.of(batch.forest, batch.target_probs_NV, plan)) == [0, 1]
    assert drawable_after_root(UniformFallback.of(batch.forest, batch.target_probs_NV, plan)) == [0, 1, 2]


def test_float32_masses_equal_float64_after_certain_draft() -> None:
    """Renormalising by 1 - q(x) would divide by 0 here: q(x) rounds to 1 in float32."""
    draft, target = np.array([1.0 - 3e-9, 2e-9, 1e-9]), np.array([0.2, 0.5, 0.3])
    model = TinyModel(3, seed=0)
    model.draft, model.target = lambda context: draft, lambda context: target
    assert 1.0 - np.float32(draft[0]) == 0.0
    single, double = (
        outcomes_of(TRAVERSAL, batch_of(model, distinct_trees(model, (2,)), dtype)) for dtype in (torch.float32, torch.float64)
    )
    assert torch.allclose(single.stop_N.double(), double.stop_N, atol=1e-6)
    assert torch.allclose(single.extra_NV.double(), double.extra_NV, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_rules_agree_between_float32_and_float64(name: str) -> None:
    model = TinyModel(4, seed=1)
    trees = delayed_trees(model, Expansion(1, 2, 1))
    single, double = (outcomes_of(RULES[name], batch_of(model, trees, dtype)) for dtype in (torch.float32, torch.float64))
    assert torch.allclose(single.stop_N, double.stop_N, atol=1e-5)
    reached_N = double.stop_N > 1e-3
    assert torch.allclose(single.extra_NV.double()[reached_N], double.extra_NV[reached_N], atol=1e-4)
    half = outcomes_of(RULES[name], batch_of(model, trees, torch.bfloat16))  # the mutant
    assert not torch.allclose(half.stop_N, double.stop_N, atol=1e-5)


@pytest.mark.parametrize("name", ["tournament", "gbv", "khisti"])
def test_draw_with_zero_rounded_chance_is_refused(name: str) -> None:
    """s = 0 in float32 and p = 0: the ratio is NaN, which must not reach the masses."""
    draft, target = torch.tensor([[0.5, 0.5, 1e-30]]), torch.tensor([[0.25, 0.75, 0.0]])
    forest = Forest((TokenTree((-1, 0), (0, 2), ((1, 1), ())),), draft, ((0, None),))
    for seed in range(20):
        verdict = create_verifier(name).judge(forest, target.repeat(2, 1), [StepKey(seed, 0)])[0]
        assert (verdict.path, verdict.expected_tokens) == ((0,), 1.0)
        assert verdict.extra_id in (0, 1)


def test_a_ratio_left_undefined_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "nan_to_num", lambda self, nan=0.0: self)
    with pytest.raises(IndexError):  # no node could be drawn
        test_draw_with_zero_rounded_chance_is_refused("tournament")


def two_trees() -> Batch:
    model = TinyModel(3, seed=4)
    return batch_of(model, delayed_trees(model, Expansion(0, 2, 1))[1:3], torch.float32)


def judge(name: str, batch: Batch) -> None:
    create_verifier(name).judge(batch.forest, batch.target_probs_NV, [StepKey(0, 1), StepKey(1, 1)])


@pytest.mark.parametrize("name", VERIFIER_NAMES)
def test_sound_distributions_are_judged(name: str) -> None:
    judge(name, two_trees())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", VERIFIER_NAMES)
def test_infinite_target_distribution_names_its_tree(name: str, value: float) -> None:
    batch = two_trees()
    batch.target_probs_NV[batch.forest.offsets[1], 2] = value
    with pytest.raises(NonFiniteDistributionError, match="trees 1 of") as caught:
        judge(name, batch)
    assert caught.value.trees == (1,)


@pytest.mark.parametrize("name", READS_DRAFT)
def test_infinite_draft_distribution_names_its_tree(name: str) -> None:
    batch = two_trees()
    batch.forest.draft_probs_RV[0, 2] = float("nan")
    with pytest.raises(NonFiniteDistributionError) as caught:
        judge(name, batch)
    assert caught.value.trees == (0,)
    judge("nss", batch)
    judge("coupled", batch)


@pytest.mark.parametrize("name", READS_DRAFT)
def test_drafted_token_of_probability_zero_names_tree(name: str) -> None:
    batch = two_trees()
    tree = batch.forest.trees[1]
    row = batch.forest.probs_rows[1][0]
    assert row is not None
    batch.forest.draft_probs_RV[row, tree.token_ids[tree.draws[0][0]]] = 0.0
    with pytest.raises(ImpossibleDraftError) as caught:
        judge(name, batch)
    assert caught.value.trees == (1,)
    judge("nss", batch)


@pytest.mark.parametrize("name", READS_DRAFT)
def test_children_without_a_draft_distribution_are_refused(name: str) -> None:
    batch = two_trees()
    lawless = structs.replace(batch.forest, probs_rows=(batch.forest.probs_rows[0], (None,) * batch.forest.trees[1].num_nodes))
    with pytest.raises(ImpossibleDraftError):
        judge(name, replace(batch, forest=lawless))
    judge("nss", replace(batch, forest=lawless))


def test_distribution_errors_are_value_errors_with_trees() -> None:
    assert issubclass(InvalidDistributionError, ValueError)
    assert all(issubclass(error, InvalidDistributionError) for error in (NonFiniteDistributionError, ImpossibleDraftError))


def test_a_missing_target_distribution_is_an_error() -> None:
    batch = two_trees()
    with pytest.raises(ValueError, match="target distributions for"):
        PlannedForest.of(batch.forest, batch.target_probs_NV[:-1], TargetDraw())


@pytest.mark.parametrize("name", VERIFIER_NAMES)
def test_undrafted_forest_is_plain_decoding(name: str) -> None:
    distribution = torch.tensor([[0.0, 1.0, 0.0]])
    forest = Forest((TokenTree.single(7),), torch.empty((0, 3)), ((None,),))
    verdict = create_verifier(name).judge(forest, distribution, [StepKey(3, 5)])[0]
    assert (verdict.path, verdict.extra_id) == ((0,), 1)
    assert verdict.expected_tokens in (1.0, None)
