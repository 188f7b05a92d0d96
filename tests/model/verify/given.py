"""The share of each token at the root under a node plan, averaged over the trees: one node at a time, exact."""

from typing import NamedTuple

import torch

from engine.verify.directions import first_accept_probs
from engine.verify.node_plans import NodePlan
from engine.verify.two_phase import PlannedForest
from tests.enumeration import Distribution, DrawnTree, TinyModel, batch_of


class Given(NamedTuple):
    """`to_tokens`: sum_X Q(X) pi(y|X) for every token y; `to_children`: the part of it that goes to drafted children."""

    to_tokens: Distribution
    to_children: float


def given_by(plan: NodePlan, model: TinyModel, trees: list[DrawnTree], mass: float) -> Given:
    """Return what the plan gives at a root of prefix mass `mass`."""
    batch = batch_of(model, trees)
    case = PlannedForest.of(batch.forest, batch.target_probs_NV, plan)
    roots = case.layout.level(batch.forest.offsets[:-1])
    masses_P = torch.full((case.layout.dummy + 1,), mass, dtype=torch.float64)
    families = case.families(roots, masses_P)
    split = plan.split(families)
    shares_MC, extra_MV = first_accept_probs(split.tried_MC), case.extra_weights(roots, masses_P)
    refused_M = (1.0 - split.tried_MC).prod(-1) * split.final_M
    given_MV = refused_M[:, None] * extra_MV / extra_MV.sum(-1, keepdim=True)
    given_MV.scatter_add_(1, families.tokens_MC, shares_MC)
    first = {batch.forest.offsets[b]: drawn.probability for b, drawn in enumerate(trees)}
    probability_M = torch.tensor([first[node] for node in roots.nodes_M.tolist()], dtype=torch.float64)
    return Given((probability_M @ given_MV).numpy(), float(probability_M @ shares_MC.sum(-1)))
