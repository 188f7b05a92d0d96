"""The exact distribution of a plan x direction rule over a batch of trees: its masses, not samples."""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.core.tree import TreeKind
from engine.core.verifier_table import VERIFIER_NAMES, is_exact
from engine.verify.directions import Direction
from engine.verify.node_plans import NodePlan
from engine.verify.registry import create_verifier
from engine.verify.two_phase import Masses, PlannedForest, TwoPhase
from tests.enumeration import Batch, DrawnTree, TinyModel, batch_of, emitted_probs, loss

EXACT = 1e-12


class Outcomes(NamedTuple):
    """Where paths end, by packed node, and the distribution of the extra token there."""

    stop_N: Tensor
    extra_NV: Tensor


def outcomes_of(rule: TwoPhase, batch: Batch) -> Outcomes:
    """Return the exact outcome distributions of phase 1 and of phase 2's draws."""
    case = PlannedForest.of(batch.forest, batch.target_probs_NV, rule.plan)
    masses = case.masses(rule.direction)
    stop_N = stop_probs(case, rule.direction, masses)
    extra_NV = torch.zeros_like(batch.target_probs_NV)
    level = case.layout.level(range(batch.forest.num_nodes))
    weights_NV = case.extra_weights(level, masses.prefix_P)
    extra_NV[level.nodes_M] = weights_NV / weights_NV.sum(-1, keepdim=True)
    return Outcomes(stop_N, extra_NV)


def stop_probs(case: PlannedForest, direction: Direction, masses: Masses) -> Tensor:
    """Return the probability that the path of its tree ends at each packed node."""
    probs = [direction.stop_distribution(tree, odds) for tree, odds in zip(case.forest.trees, case.acceptance_probs(masses))]
    return torch.tensor([chance for distribution in probs for chance in distribution], dtype=torch.float64)


def text_probs(rule: TwoPhase, model: TinyModel, trees: list[DrawnTree]) -> Tensor:
    """Return the distribution of the emitted sequence, each tree weighted by its probability."""
    batch = batch_of(model, trees)
    return torch.from_numpy(emitted_probs(model, batch, *outcomes_of(rule, batch)))


def loss_of(rule: TwoPhase, model: TinyModel, trees: list[DrawnTree]) -> float:
    """Return how far the distribution of the emitted sequence is from the target's."""
    return loss(model, text_probs(rule, model, trees).numpy())


def named(name: str) -> TwoPhase:
    """Return a registered rule, which must be of the form plan x direction."""
    rule = create_verifier(name)
    assert isinstance(rule, TwoPhase)
    return rule


def rule_of(plan: NodePlan, direction: Direction) -> TwoPhase:
    """Return an unregistered rule."""
    return TwoPhase("under test", plan, direction)


RULES = {name: named(name) for name in VERIFIER_NAMES if name != "coupled"}
ON_DELAYED = {name: rule for name, rule in RULES.items() if is_exact(TreeKind.IID, name)}
READS_DRAFT = [name for name, rule in RULES.items() if rule.plan.reads_draft]
TRAVERSAL, SPECINFER, NSS, BLOCK, UNIVER = (RULES[name] for name in ("traversal", "specinfer", "nss", "block", "univer"))
