"""Mutants of plans: each with one thing wrong, as public code had it. Each must lose a hundredth of its published error."""

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.core.tree import Expansion, TokenTree
from engine.verify.directions import BottomUp, Direction, TopDown
from engine.verify.first_path import FirstPath
from engine.verify.k_seq import KSeq
from engine.verify.khisti import Duels
from engine.verify.node_plans import (
    AcceptanceSplit,
    NodeFamilies,
    WithoutReplacement,
    _keep,
    residual_in_order,
    split_by_shares,
    split_in_order,
)
from engine.verify.one_token import AcceptChosen, OneToken, SelectedDraw, Selection
from engine.verify.selections import BestRanked, FirstDraw
from engine.verify.two_phase import TwoPhase
from tests.enumeration import (
    TinyModel,
    batch_of,
    delayed_trees,
    distinct_trees,
    emitted_probs,
    loss,
    set_and_sample_trees,
)
from tests.model.verify.rules_under_test import (
    BLOCK,
    EXACT,
    ON_DELAYED,
    UNIVER,
    loss_of,
    outcomes_of,
    rule_of,
)


class KeepsRefusedInDraft(WithoutReplacement):
    """Duplicates merged but q not zeroed; top-down it is SpecInfer without multiplicity."""

    def split(self, families: NodeFamilies) -> AcceptanceSplit:
        return split_in_order(families, _keep)

    def residual(self, families: NodeFamilies) -> Tensor:
        return residual_in_order(families, _keep)


@pytest.mark.parametrize("direction", [BottomUp(), TopDown()], ids=["q-not-zeroed", "no-multiplicity"])
def test_merged_duplicates_with_unchanged_draft_are_detected(direction) -> None:
    model = TinyModel(3, seed=1)
    assert loss_of(rule_of(KeepsRefusedInDraft(), direction), model, delayed_trees(model, Expansion(0, 3, 1))) > 1e-4


class UnscaledResidual(WithoutReplacement):
    """Block Verification with the residual of token-wise verification, (p - q)+ instead of (a p - q)+."""

    def residual(self, families: NodeFamilies) -> Tensor:
        whole_M = torch.ones_like(families.mass_M)
        return super().residual(NodeFamilies(**{**vars(families), "mass_M": whole_M}))


def test_an_unscaled_block_residual_is_noticed() -> None:
    model = TinyModel(4, seed=0)
    trees = delayed_trees(model, Expansion(2, 1, 0))
    assert loss_of(BLOCK, model, trees) < EXACT
    assert loss_of(rule_of(UnscaledResidual(), BottomUp()), model, trees) > 1e-3


class SortsNothingButTriesLast(WithoutReplacement):
    """Tries siblings in the reverse of their sampling order."""

    def tries(self, tree: TokenTree) -> Sequence[Sequence[int]]:
        return [tuple(reversed(kids)) for kids in tree.children]


def test_siblings_tried_against_sampling_order_are_noticed() -> None:
    model = TinyModel(3, seed=1)
    assert loss_of(rule_of(SortsNothingButTriesLast(), BottomUp()), model, distinct_trees(model, (2,))) > 1e-3


def running_caps(ratios: list[float]) -> list[float]:
    """Block Verification's prefix masses: w <- min(1, w p / q)."""
    return list(accumulate(ratios, lambda mass, ratio: min(1.0, mass * ratio), initial=1.0))


def joint_caps(ratios: list[float]) -> list[float]:
    """The masses of a public hierarchical rule (arXiv 2601.05724): the joint ratio, capped at each prefix."""
    return [min(1.0, joint) for joint in accumulate(ratios, operator.mul, initial=1.0)]


def path_loss(model: TinyModel, length: int, caps: Callable[[list[float]], list[float]]) -> float:
    """Return the loss of h_i = S_i / (S_i + 1 - w_i), h_n = w_n, S_i = sum (w_i p - q)+, on single paths with masses w."""
    batch = batch_of(model, delayed_trees(model, Expansion(length, 1, 0)))
    stops, extras = [], []
    for drawn in batch.trees:
        probs = [(model.target(context), model.draft(context)) for context in drawn.contexts]
        ratios = [float(target[x] / draft[x]) for (target, draft), x in zip(probs, drawn.contexts[-1])]
        masses = caps(ratios)
        rests = [np.maximum(mass * target - draft, 0.0) for mass, (target, draft) in zip(masses, probs)]
        keeps = [rest.sum() / (rest.sum() + 1.0 - mass) for rest, mass in zip(rests[:-1], masses)] + [masses[-1]]
        stops += [keep * np.prod([1.0 - later for later in keeps[i + 1 :]]) for i, keep in enumerate(keeps)]
        extras += [rest / max(rest.sum(), 1e-300) for rest in rests[:-1]] + [probs[-1][0]]
    return loss(model, emitted_probs(model, batch, torch.tensor(stops), torch.tensor(np.stack(extras))))


def test_joint_ratio_instead_of_mass_is_detected() -> None:
    model = TinyModel(3, seed=1)
    assert path_loss(model, 3, running_caps) < EXACT
    assert path_loss(model, 3, joint_caps) > 1e-3


class LikeliestPath(FirstPath):
    """Follows the likeliest child instead of the first."""

    def __init__(self, model: TinyModel) -> None:
        self._probs = model.draft(())

    def tries(self, tree: TokenTree) -> Sequence[Sequence[int]]:
        return [tuple(sorted(kids, key=lambda child: -self._probs[tree.token_ids[child]])[:1]) for kids in tree.children]


@pytest.mark.parametrize("direction", [BottomUp(), TopDown()], ids=["block", "naive"])
def test_a_path_chosen_by_value_is_noticed(direction: Direction) -> None:
    model = TinyModel(3, seed=0)
    trees = delayed_trees(model, Expansion(0, 2, 1))
    assert loss_of(rule_of(FirstPath(), direction), model, trees) < EXACT
    assert loss_of(rule_of(LikeliestPath(model), direction), model, trees) > 1e-2


class DivisorTooSmall(KSeq):
    """K-SEQ with r below the solution: gamma > r, and the residual would have to be negative."""

    def _divisor(self, *probs_and_draws: Tensor) -> Tensor:
        return 1.0 + 0.5 * (super()._divisor(*probs_and_draws) - 1.0)


class DivisorTooLarge(KSeq):
    """K-SEQ with r above the solution: accepts less and loses nothing."""

    def _divisor(self, *probs_and_draws: Tensor) -> Tensor:
        return 1.0 + 1.5 * (super()._divisor(*probs_and_draws) - 1.0)


def test_small_divisor_is_lossy_large_is_not() -> None:
    model = TinyModel(3, seed=0)
    trees = delayed_trees(model, Expansion(0, 3, 1))
    assert loss_of(rule_of(OneToken(KSeq()), TopDown()), model, trees) < EXACT
    assert loss_of(rule_of(OneToken(DivisorTooLarge()), TopDown()), model, trees) < EXACT
    assert loss_of(rule_of(OneToken(DivisorTooSmall()), TopDown()), model, trees) > 1e-3


class ReportsDraftProbs:
    """Chooses as another selection does and reports the draft distribution for the chosen token."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection

    def choose(self, trying: NodeFamilies) -> SelectedDraw:
        return SelectedDraw(self._selection.choose(trying).chance_AC, trying.draft_AV())


@pytest.mark.parametrize("selection", [BestRanked(), Duels()], ids=["tournament", "khisti"])
def test_unreported_choice_distribution_is_detected(selection: Selection) -> None:
    model = TinyModel(4, seed=0)
    trees = delayed_trees(model, Expansion(0, 3, 1))
    assert loss_of(rule_of(OneToken(AcceptChosen(selection)), TopDown()), model, trees) < EXACT
    assert loss_of(rule_of(OneToken(AcceptChosen(ReportsDraftProbs(selection))), TopDown()), model, trees) > 1e-2


class SharesEveryDraw(OneToken):
    """Gives a token its share once for every time that it was drawn."""

    def split(self, families: NodeFamilies) -> AcceptanceSplit:
        named_MC = self.decision.decide(families).tokens_AV.gather(1, families.tokens_MC) * families.is_try_MC
        return split_by_shares(named_MC, 1.0 - families.mass_M)


def test_token_shared_per_draw_is_detected() -> None:
    model = TinyModel(3, seed=0)
    trees = delayed_trees(model, Expansion(0, 2, 1))
    assert loss_of(rule_of(SharesEveryDraw(AcceptChosen(FirstDraw())), TopDown()), model, trees) > 1e-2


def test_draft_distribution_with_fixed_set_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TinyModel(3, seed=0)
    trees = set_and_sample_trees(model, (1, 1))
    assert loss_of(UNIVER, model, trees) < EXACT
    monkeypatch.setattr("engine.verify.set_plus_sample._off_set", lambda trying, sample_A1: trying.draft_AV())
    assert loss_of(UNIVER, model, trees) > 1e-2


@pytest.mark.parametrize("rule", ON_DELAYED.values(), ids=ON_DELAYED)
def test_bonus_token_from_root_is_detected(rule: TwoPhase) -> None:
    model = TinyModel(3, seed=3)
    batch = batch_of(model, delayed_trees(model, Expansion(1, 2, 1)))
    outcomes = outcomes_of(rule, batch)
    assert loss(model, emitted_probs(model, batch, *outcomes)) < EXACT
    from_root_NV = outcomes.extra_NV.clone()
    for begin, end in zip(batch.forest.offsets, batch.forest.offsets[1:]):
        from_root_NV[begin:end] = outcomes.extra_NV[begin]
    assert loss(model, emitted_probs(model, batch, outcomes.stop_N, from_root_NV)) > 1e-3
