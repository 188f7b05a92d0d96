"""Losslessness by enumeration: every tree, every outcome, float64; and the mutants that each must break it."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.tree import Expansion, TokenTree
from engine.verify.directions import BottomUp, TopDown
from engine.verify.masses import TwoPhase
from engine.verify.plans import Families, Split, WithoutReplacement, _keep, _try_in_order
from engine.verify.rules import _EXACT, TreeKind
from tests.enumeration import (
    Context,
    DrawnTree,
    TinyModel,
    TreeBuilder,
    batch_of,
    beam_trees,
    delayed_trees,
    distinct_trees,
    emitted_law,
    heap_trees,
    loss,
    set_and_sample_trees,
)
from tests.model.verify.rules_under_test import EXACT, NSS, SPECINFER, TRAVERSAL, loss_of, named, outcomes_of, rule_of

EXPANSIONS = ["0.1.0", "1.1.0", "3.1.0", "0.2.1", "0.3.1", "0.4.1", "0.2.2", "0.2.3", "0.3.2", "1.2.1", "1.2.2", "1.3.1", "2.2.1"]
FLAVOURS = ["generic", "sparse", "equal", "peaked"]
RULES = {rule.name: rule for rule in (TRAVERSAL, SPECINFER, NSS)}


def expansion(text: str) -> Expansion:
    return Expansion(*map(int, text.split(".")))


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("shape", EXPANSIONS)
def test_every_rule_keeps_the_law_on_delayed_trees(shape: str, flavour: str) -> None:
    model = TinyModel(3, seed=len(shape) + 17, flavour=flavour)
    trees = delayed_trees(model, expansion(shape))
    assert sum(drawn.probability for drawn in trees) == pytest.approx(1.0, abs=EXACT)
    for rule in RULES.values():
        assert loss_of(rule, model, trees) < EXACT, rule.name


@pytest.mark.parametrize("shape", ["0.3.1", "0.2.2", "1.3.1"])
def test_every_rule_keeps_the_law_over_four_tokens(shape: str) -> None:
    model = TinyModel(4, seed=5)
    for rule in RULES.values():
        assert loss_of(rule, model, delayed_trees(model, expansion(shape))) < EXACT, rule.name


def trees_of(kind: TreeKind, model: TinyModel) -> list[list[DrawnTree]]:
    """Return a few ways to grow trees of a kind."""
    return {
        TreeKind.PATH: [delayed_trees(model, Expansion(3, 1, 0))],
        TreeKind.IID: [delayed_trees(model, Expansion(0, 3, 1)), delayed_trees(model, Expansion(1, 2, 2))],
        TreeKind.WITHOUT_REPLACEMENT: [distinct_trees(model, (2, 2)), distinct_trees(model, (3, 1)), heap_trees(model, 3)],
        TreeKind.SET_PLUS_SAMPLE: [set_and_sample_trees(model)],
        TreeKind.DETERMINISTIC: [beam_trees(model, 2, 2)],
    }[kind]


@pytest.mark.parametrize("kind", TreeKind)
@pytest.mark.parametrize("name", RULES)
def test_the_table_of_exact_pairs_is_what_enumeration_finds(name: str, kind: TreeKind) -> None:
    """Both ways: an admitted pair loses nothing, a refused one is lossy (each refused pair is its own mutant)."""
    losses = [loss_of(named(name), model, trees) for model in map(_generic, range(3)) for trees in trees_of(kind, model)]
    if kind in _EXACT[name]:
        assert max(losses) < EXACT
    else:
        assert max(losses) > 1e-3


def _generic(seed: int) -> TinyModel:
    return TinyModel(3, seed)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_traversal_keeps_the_law_on_trees_without_replacement(flavour: str) -> None:
    model = TinyModel(3, seed=2, flavour=flavour)
    for trees in trees_of(TreeKind.WITHOUT_REPLACEMENT, model):
        for rule in (TRAVERSAL, rule_of(WithoutReplacement(), TopDown())):
            assert loss_of(rule, model, trees) < EXACT


# Mutants: what public code got wrong. Each must lose at least a hundredth of what its published error is.


def rebuilt(model: TinyModel, drawn: DrawnTree, order: object) -> DrawnTree:
    """Return the tree with the draws of each node rearranged or thinned by `order(context, token ids)`."""
    assert callable(order)
    builder = TreeBuilder()
    kept: list[Context] = [()]
    for context in kept:
        node = drawn.contexts.index(context)
        token_ids = order(context, [drawn.tree.token_ids[child] for child in drawn.tree.draws[node]])
        for token_id in token_ids:
            builder.draw(context, token_id)
            if (*context, token_id) not in kept:
                kept.append((*context, token_id))
    return builder.drawn(drawn.probability)


def by_token_id(model: TinyModel) -> object:
    return lambda context, ids: sorted(ids)


def by_draft_probability(model: TinyModel) -> object:
    return lambda context, ids: sorted(ids, key=lambda token_id: -model.draft(context)[token_id])


def worse_path_pruned(model: TinyModel) -> object:
    return lambda context, ids: [max(ids, key=lambda token_id: model.draft(context)[token_id])] if ids else []


@pytest.mark.parametrize("mutation", [by_token_id, by_draft_probability, worse_path_pruned])
def test_siblings_rearranged_or_pruned_by_value_are_noticed(mutation) -> None:
    model = TinyModel(3, seed=0)
    trees = delayed_trees(model, Expansion(0, 2, 1))
    assert loss_of(TRAVERSAL, model, [rebuilt(model, drawn, lambda context, ids: ids) for drawn in trees]) < EXACT
    assert loss_of(TRAVERSAL, model, [rebuilt(model, drawn, mutation(model)) for drawn in trees]) > 1e-3


class KeepsRefusedInDraftLaw(WithoutReplacement):
    """Duplicates merged but q not zeroed; top-down it is SpecInfer without multiplicity."""

    def split(self, families: Families) -> Split:
        return _try_in_order(families, _keep).split

    def residual(self, families: Families) -> Tensor:
        return _try_in_order(families, _keep).weights_MV


@pytest.mark.parametrize("direction", [BottomUp(), TopDown()], ids=["q-not-zeroed", "no-multiplicity"])
def test_merged_duplicates_against_an_unchanged_draft_law_are_noticed(direction) -> None:
    model = TinyModel(3, seed=1)
    assert loss_of(rule_of(KeepsRefusedInDraftLaw(), direction), model, delayed_trees(model, Expansion(0, 3, 1))) > 1e-4


class UnscaledResidual(WithoutReplacement):
    """Block Verification with the residual of token-wise verification, (p - q)+ instead of (a p - q)+."""

    def residual(self, families: Families) -> Tensor:
        whole_M = torch.ones_like(families.mass_M)
        return super().residual(Families(**{**vars(families), "mass_M": whole_M}))


def test_an_unscaled_block_residual_is_noticed() -> None:
    model = TinyModel(4, seed=0)
    trees = delayed_trees(model, Expansion(2, 1, 0))
    assert loss_of(TRAVERSAL, model, trees) < EXACT
    assert loss_of(rule_of(UnscaledResidual(), BottomUp()), model, trees) > 1e-3


class SortsNothingButTriesLast(WithoutReplacement):
    """Tries siblings in the reverse of their sampling order."""

    def tries(self, tree: TokenTree) -> Sequence[Sequence[int]]:
        return [tuple(reversed(kids)) for kids in tree.children]


def test_siblings_tried_against_sampling_order_are_noticed() -> None:
    model = TinyModel(3, seed=1)
    assert loss_of(rule_of(SortsNothingButTriesLast(), BottomUp()), model, distinct_trees(model, (2,))) > 1e-3


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_bonus_token_taken_from_the_root_is_noticed(rule: TwoPhase) -> None:
    model = TinyModel(3, seed=3)
    batch = batch_of(model, delayed_trees(model, Expansion(1, 2, 1)))
    outcomes = outcomes_of(rule, batch)
    assert loss(model, emitted_law(model, batch, *outcomes)) < EXACT
    from_root_NV = outcomes.extra_NV.clone()
    for begin, end in zip(batch.forest.offsets, batch.forest.offsets[1:]):
        from_root_NV[begin:end] = outcomes.extra_NV[begin]
    assert loss(model, emitted_law(model, batch, outcomes.stop_N, from_root_NV)) > 1e-3
