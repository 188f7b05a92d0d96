"""Mutants of growth: trees that are not what a rule takes them for. Each loses a hundredth of its published error at least."""

from dataclasses import replace

import pytest
import torch
from msgspec import structs

from engine.core.tree import Expansion
from tests.enumeration import (
    Batch,
    Context,
    DrawnTree,
    TinyModel,
    TreeBuilder,
    batch_of,
    beam_trees,
    delayed_trees,
    emitted_probs,
    loss,
    set_and_sample_trees,
)
from tests.model.verify.rules_under_test import (
    EXACT,
    NSS,
    TRAVERSAL,
    UNIVER,
    loss_of,
    outcomes_of,
    text_probs,
)


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
def test_value_ordered_or_pruned_siblings_are_detected(mutation) -> None:
    model = TinyModel(3, seed=0)
    trees = delayed_trees(model, Expansion(0, 2, 1))
    assert loss_of(TRAVERSAL, model, [rebuilt(model, drawn, lambda context, ids: ids) for drawn in trees]) < EXACT
    assert loss_of(TRAVERSAL, model, [rebuilt(model, drawn, mutation(model)) for drawn in trees]) > 1e-3


def sample_dropped(model: TinyModel, is_dropped) -> float:
    """Return the loss if a sample y is cut off the tree where `is_dropped(q(best), q(y))`; what remains is judged by NSS."""
    best = float(model.draft(()).max())
    kept, cut = [], []
    for drawn in set_and_sample_trees(model, (1,)):
        if is_dropped(best, model.draft(())[drawn.tree.token_ids[-1]]):
            cut.append(rebuilt(model, drawn, lambda context, ids: ids[:1]))
        else:
            kept.append(drawn)
    probs = [text_probs(rule, model, trees) for rule, trees in ((UNIVER, kept), (NSS, cut)) if trees]
    return loss(model, torch.stack(probs).sum(0).numpy())


def test_sample_ranked_by_own_probability_is_detected() -> None:
    """RheoSampling (arXiv 2609.21827) ranks it by min(q1, 1 - q1) of the fixed token: known before it is drawn."""
    model = TinyModel(4, seed=0)
    assert sample_dropped(model, lambda best, own: min(best, 1.0 - best) < 0.2) < EXACT
    assert sample_dropped(model, lambda best, own: min(best, 1.0 - best) < 0.5) < EXACT
    assert sample_dropped(model, lambda best, own: own < 0.2) > 1e-3


def test_draft_ratio_without_draws_is_detected() -> None:
    model = TinyModel(3, seed=0)
    assert loss_of(NSS, model, beam_trees(model, 2, 1)) < EXACT
    assert loss_of(TRAVERSAL, model, beam_trees(model, 2, 1)) > 0.1


def within_children(batch: Batch) -> Batch:
    """Restrict each draft distribution to the children that were drawn from it."""
    draft_RV = torch.zeros_like(batch.forest.draft_probs_RV)
    for tree, probs_rows in zip(batch.forest.trees, batch.forest.probs_rows):
        for kids, row in zip(tree.children, probs_rows):
            if row is not None:
                ids = [tree.token_ids[child] for child in kids]
                draft_RV[row, ids] = batch.forest.draft_probs_RV[row, ids]
                draft_RV[row] /= draft_RV[row].sum()
    return replace(batch, forest=structs.replace(batch.forest, draft_probs_RV=draft_RV))


def test_draft_distribution_over_children_is_detected() -> None:
    model = TinyModel(4, seed=0)
    batch = batch_of(model, delayed_trees(model, Expansion(0, 2, 1)))
    assert loss(model, emitted_probs(model, batch, *outcomes_of(TRAVERSAL, batch))) < EXACT
    mutant = within_children(batch)
    assert loss(model, emitted_probs(model, mutant, *outcomes_of(TRAVERSAL, mutant))) > 1e-2
