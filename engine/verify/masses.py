"""The two-phase engine that runs every rule of the form local plan x direction.

Phase 1 computes all masses, a level of all trees at a time: loops run over depth and sibling rank only. Phase 2 draws the
node at which each accepted path ends, then the extra token. Knows neither which trees a rule is exact on (rules.py) nor how
trees were grown. Source: the theorem of docs/verification.md.

Shape key: B trees, N packed nodes, P = N + 1 (with the dummy), M nodes of one level, R draft laws, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.forest import Forest
from engine.keys import StepKey, Stream, stream_key
from engine.noise import uniforms
from engine.verify.directions import Direction, Masses
from engine.verify.faults import check_laws, check_trees
from engine.verify.layout import Layout, Level, chunks, lay_out, rows_at_once
from engine.verify.plans import Families, LocalPlan
from engine.verify.verdict import Verdict


@dataclass(frozen=True)
class Case:
    """One step's forest, laid out for one plan, with the target's laws after each node."""

    forest: Forest
    target_laws_NV: Float[Tensor, "N V"]
    layout: Layout
    plan: LocalPlan

    @classmethod
    def of(cls, forest: Forest, target_laws_NV: Float[Tensor, "N V"], plan: LocalPlan) -> "Case":
        """Lay the forest out in the order of the plan's tries."""
        if target_laws_NV.shape[0] != forest.num_nodes:
            raise ValueError(f"{target_laws_NV.shape[0]} target laws for {forest.num_nodes} nodes")
        check_trees(forest, reads_draft=plan.reads_draft)
        tries = [plan.tries(tree) for tree in forest.trees]
        layout = lay_out(forest, tries, _max_rows(target_laws_NV), target_laws_NV.device)
        return cls(forest, target_laws_NV, layout, plan)

    def families(self, level: Level, prefix_P: Float[Tensor, " P"]) -> Families:
        """Return what the plan may see of the nodes of a level."""
        return Families(
            target_laws_NV=self.target_laws_NV,
            draft_laws_RV=self.forest.draft_laws_RV,
            nodes_M=level.nodes_M,
            law_rows_M=self.layout.law_rows_P[level.nodes_M],
            tokens_MC=self.layout.tokens_PC[level.nodes_M],
            is_try_MC=self.layout.is_try_PC[level.nodes_M],
            mass_M=prefix_P[level.nodes_M],
            num_tried=level.num_tried,
        )

    def masses(self, direction: Direction) -> Masses:
        """Phase 1: the mass of every node, from the roots down; no uniform and no host round trip is involved."""
        layout = self.layout
        tried_PC = torch.zeros_like(layout.tokens_PC, dtype=torch.float64)
        prefix_P, kept_P = tried_PC.new_zeros(layout.dummy + 1), tried_PC.new_zeros(layout.dummy + 1)
        prefix_P[layout.nodes_BW[:, 0]] = 1.0
        for level in layout.levels:
            split = self.plan.split(self.families(level, prefix_P))
            tried_PC[level.nodes_M], kept_P[level.nodes_M] = split.tried_MC, split.final_M
            children_X, inherited_X = layout.children_PC[level.nodes_M].flatten(), direction.inherited(split.tried_MC).flatten()
            prefix_P.scatter_reduce_(0, children_X, inherited_X, "amax")  # one try of a child carries its mass, the others 0
        prefix_P[layout.dummy] = 0.0
        is_leaf_P = ~layout.is_try_PC.any(-1)
        return Masses(prefix_P, tried_PC, torch.where(is_leaf_P, prefix_P, kept_P))

    def extra_weights(self, level: Level, prefix_P: Float[Tensor, " P"]) -> Float[Tensor, "M V"]:
        """Return unnormalised laws of the extra token after each node of a level, all its children refused.

        An empty residual means that refusal has probability 0; only rounding leads there, and the target's own law is
        the answer, never a uniform one.
        """
        families = self.families(level, prefix_P)
        weights_MV = self.plan.residual(families)
        is_empty_M = weights_MV.sum(-1) <= 0.0
        return torch.where(is_empty_M[:, None], families.target_MV(), weights_MV)


@dataclass(frozen=True)
class TwoPhase:
    """The verifier made of a plan and a direction."""

    name: str
    plan: LocalPlan
    direction: Direction

    def judge(self, forest: Forest, target_laws_NV: Float[Tensor, "N V"], keys: Sequence[StepKey]) -> list[Verdict]:
        """Return one verdict a tree, whatever other trees are in the forest.

        Rows are computed in the dtype of the laws, scalars in float64. Phase 1 stays on the device; then a few numbers a
        tree cross to the host, the nodes where the paths end, and at last the extra tokens. Raises a LawError that names
        the trees whose laws cannot be judged.
        """
        # 1. The masses of all nodes, and from them the law of where each accepted path ends.
        case = Case.of(forest, target_laws_NV, self.plan)
        layout = case.layout
        masses = case.masses(self.direction)
        stop_BW = self.direction.stop_law(layout, masses)[layout.nodes_BW]
        expected_B = (stop_BW * (layout.depths_P[layout.nodes_BW] + 1)).sum(-1)

        # 2. That node, drawn for each tree; nothing is returned of laws that make no sense.
        check_laws(forest, target_laws_NV, layout, reads_draft=self.plan.reads_draft)
        nodes = draw(stop_BW, _uniforms(keys, Stream.ACCEPT, stop_BW.device)).tolist()

        # 3. The extra token, drawn from what is left after the node's children.
        extra_ids = _extra_ids(case, masses, nodes, keys)
        return [
            Verdict(tree.path(node), extra_id, tokens)
            for tree, node, extra_id, tokens in zip(forest.trees, nodes, extra_ids, expected_B.tolist())
        ]


def _extra_ids(case: Case, masses: Masses, nodes: Sequence[int], keys: Sequence[StepKey]) -> list[int]:
    """Draw the extra token after `nodes[b]` of each tree b; nodes with most tries are worked on first, a few at a time."""
    ends = [offset + node for offset, node in zip(case.forest.offsets, nodes)]
    order = sorted(range(len(ends)), key=lambda b: -case.layout.num_tries(ends[b]))
    drawn: list[Tensor] = []
    for trees in chunks(order, _max_rows(case.target_laws_NV)):
        weights_MV = case.extra_weights(case.layout.level(ends[b] for b in trees), masses.prefix_P)
        drawn.append(draw(weights_MV, _uniforms([keys[b] for b in trees], Stream.EXTRA, weights_MV.device)))
    extra_ids = dict(zip(order, torch.cat(drawn).tolist()))
    return [extra_ids[b] for b in range(len(ends))]


def _max_rows(laws_NV: Tensor) -> int:
    return rows_at_once(laws_NV.shape[-1], laws_NV.device)


def draw(weights_MV: Float[Tensor, "M V"], uniforms_M: Float[Tensor, " M"]) -> Int[Tensor, " M"]:
    """Draw an index of each row by inverse CDF in float64; a row need not sum to 1.

    An index of weight 0 is never drawn, u = 0 and u = 1 included, as long as the cumulative sums never fall.
    """
    cdf_MV = weights_MV.cumsum(-1, dtype=torch.float64)
    total_M1 = cdf_MV[:, -1:]
    below_total_M1 = torch.nextafter(total_M1, torch.zeros_like(total_M1))
    point_M1 = torch.minimum(uniforms_M[:, None] * total_M1, below_total_M1)
    return torch.searchsorted(cdf_MV, point_M1, right=True).squeeze(-1)


def _uniforms(keys: Sequence[StepKey], stream: Stream, device: torch.device) -> Float[Tensor, " B"]:
    return uniforms([stream_key(key.seed, key.root_position, stream) for key in keys], 1, device).squeeze(-1)
