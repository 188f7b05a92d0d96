"""The two-phase engine that runs every rule of the form node plan x direction.

Phase 1 computes all masses, one level of all trees at a time: loops run over depth and sibling rank only. Phase 2 draws the
node at which each accepted path ends, then the extra token. Source: the theorem of docs/verification.md.

Shape key: N packed nodes, P = N + 1 (with the dummy), M nodes of one level, Y their tries (padded), R draft distributions,
V vocabulary.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.core.rng_keys import StepKey, Stream, stream_key, uniform
from engine.core.tree import ROOT, TokenTree
from engine.utils.host_transfer import floats, to_host
from engine.verify.directions import AcceptanceProbs, Direction
from engine.verify.forest import Forest
from engine.verify.input_checks import check_probs, check_trees, distribution_sums
from engine.verify.layout import Layout, TreeLevel, build_layout, chunks, rows_at_once
from engine.verify.node_plans import NodeFamilies, NodePlan
from engine.verify.verdict import Verdict


class Masses(NamedTuple):
    """The results of phase 1, float64, on the device. They do not depend on random numbers.

    `prefix_P`: a node's mass before its children are tried. Level by level, `tried_Y`: the probability that a try is accepted if
    the earlier tries were refused; `final_M`: the probability that a node is accepted if all its children were refused.
    """

    prefix_P: Float[Tensor, " P"]
    tried_Y: tuple[Float[Tensor, " Y"], ...]
    final_M: tuple[Float[Tensor, " M"], ...]

    @property
    def all(self) -> tuple[Tensor, ...]:
        """All tensors, in that order."""
        return (self.prefix_P, *self.tried_Y, *self.final_M)


@dataclass(frozen=True)
class PlannedForest:
    """One step's forest, with its layout for one plan and the target's distribution after each node.

    `tries[b][v]` are the children of node v of tree b in the order of the plan's tries.
    """

    forest: Forest
    target_probs_NV: Float[Tensor, "N V"]
    plan: NodePlan
    tries: Sequence[Sequence[Sequence[int]]]
    layout: Layout

    @classmethod
    def of(cls, forest: Forest, target_probs_NV: Float[Tensor, "N V"], plan: NodePlan) -> "PlannedForest":
        """Build the layout of the forest in the order of the plan's tries."""
        if target_probs_NV.shape[0] != forest.num_nodes:
            raise ValueError(f"{target_probs_NV.shape[0]} target distributions for {forest.num_nodes} nodes")
        check_trees(forest, reads_draft=plan.reads_draft)
        tries = [plan.tries(tree) for tree in forest.trees]
        layout = build_layout(forest, tries, _max_rows(target_probs_NV), target_probs_NV.device)
        return cls(forest, target_probs_NV, plan, tries, layout)

    def families(self, level: TreeLevel, prefix_P: Float[Tensor, " P"]) -> NodeFamilies:
        """Return the plan's input for the nodes of a level."""
        return NodeFamilies(
            target_probs_NV=self.target_probs_NV,
            draft_probs_RV=self.forest.draft_probs_RV,
            nodes_M=level.nodes_M,
            probs_rows_M=level.probs_rows_M,
            tokens_MC=level.tokens_MC,
            is_try_MC=level.is_try_MC,
            mass_M=prefix_P.index_select(0, level.nodes_M),
            num_tried=level.num_tried,
        )

    def masses(self, direction: Direction) -> Masses:
        """Phase 1: return the mass of every node, from the roots down, without random numbers or transfers to the host."""
        is_root_P = [0.0] * (self.layout.dummy + 1)
        for root in self.forest.offsets[:-1]:
            is_root_P[root] = 1.0
        prefix_P = floats(is_root_P, self.target_probs_NV.device)
        tried_Y, final_M = [], []
        for level in self.layout.levels:
            split = self.plan.split(self.families(level, prefix_P))
            tried_Y.append(split.tried_MC.view(-1))
            final_M.append(split.final_M)
            # One try of a child has its mass, the others 0.
            prefix_P.scatter_reduce_(0, level.children_Y, direction.inherited(tried_Y[-1]), "amax")
        return Masses(prefix_P, tuple(tried_Y), tuple(final_M))

    def acceptance_probs(self, masses: Masses) -> list[AcceptanceProbs]:
        """Return the results of phase 1 for each tree, on the host, in one transfer. Raises an InvalidDistributionError."""
        layout, num_levels = self.layout, len(self.layout.groups)
        sums = distribution_sums(self.forest, self.target_probs_NV, layout, reads_draft=self.plan.reads_draft)
        target_sums, draft_sums, draft_probs, prefix, *levels = to_host([*sums, *masses.all])
        check_probs(self.forest, layout, target_sums, draft_sums, draft_probs)
        tried = layout.by_node([*chain.from_iterable(levels[:num_levels])])
        final = prefix[: layout.dummy]  # a leaf's own mass
        for node, chance in zip(chain.from_iterable(layout.groups), chain.from_iterable(levels[num_levels:])):
            final[node] = chance
        spans = zip(self.forest.offsets, self.forest.offsets[1:])
        return [AcceptanceProbs(tries, tried[first:end], final[first:end]) for tries, (first, end) in zip(self.tries, spans)]

    def extra_weights(self, level: TreeLevel, prefix_P: Float[Tensor, " P"]) -> Float[Tensor, "M V"]:
        """Return unnormalised distributions of the extra token after each node of a level, if all its children were refused.

        An empty residual means that refusal has probability 0, so it occurs only by rounding. Then the result is the target's own
        distribution, never a uniform distribution.
        """
        families = self.families(level, prefix_P)
        weights_MV = self.plan.residual(families)
        is_empty_M1 = weights_MV.sum(-1, keepdim=True) <= 0.0
        return torch.where(is_empty_M1, families.target_MV(), weights_MV)


@dataclass(frozen=True)
class TwoPhase:
    """The verifier made of a plan and a direction."""

    name: str
    plan: NodePlan
    direction: Direction

    def judge(self, forest: Forest, target_probs_NV: Float[Tensor, "N V"], keys: Sequence[StepKey]) -> list[Verdict]:
        """Return one verdict a tree, independent of the other trees in the forest.

        Rows are computed in the dtype of the distributions, scalars in float64. Phase 1 stays on the device. Then two transfers
        follow: a few numbers a tree, and the extra tokens. Raises an InvalidDistributionError that lists the trees concerned.
        """
        # 1. The masses of all nodes, and the distribution of the node at which each accepted path ends.
        case = PlannedForest.of(forest, target_probs_NV, self.plan)
        masses = case.masses(self.direction)
        stop_probs = self._stop_probs(case, masses)

        # 2. The last accepted node, drawn for each tree.
        nodes = [draw_one(distribution, chance) for distribution, chance in zip(stop_probs, _uniforms(keys, Stream.ACCEPT))]

        # 3. The extra token, drawn from the residual after the node's children.
        extra_ids = _extra_ids(case, masses, nodes, keys)
        return [
            Verdict(tree.path(node), extra_id, expected_tokens(tree, distribution))
            for tree, node, extra_id, distribution in zip(forest.trees, nodes, extra_ids, stop_probs)
        ]

    def ends(
        self, forest: Forest, target_probs_NV: Float[Tensor, "N V"], keys: Sequence[StepKey]
    ) -> list[tuple[list[float], int]]:
        """Return for each tree the probability that the accepted path ends at each node, and the node at which it ends."""
        case = PlannedForest.of(forest, target_probs_NV, self.plan)
        stop_probs = self._stop_probs(case, case.masses(self.direction))
        return [(distribution, self.end(distribution, key)) for distribution, key in zip(stop_probs, keys)]

    def end(self, stop_distribution: Sequence[float], key: StepKey) -> int:
        """Draw the node at which the accepted path ends, as `judge` does."""
        return draw_one(stop_distribution, _uniforms([key], Stream.ACCEPT)[0])

    def tried(self, forest: Forest, target_probs_NV: Float[Tensor, "N V"]) -> list[Sequence[float]]:
        """Return for each root the probability that each of its tries is accepted if the earlier tries were refused."""
        case = PlannedForest.of(forest, target_probs_NV, self.plan)
        return [probs.tried[ROOT] for probs in case.acceptance_probs(case.masses(self.direction))]

    def _stop_probs(self, case: PlannedForest, masses: Masses) -> list[list[float]]:
        acceptance = case.acceptance_probs(masses)
        return [self.direction.stop_distribution(tree, probs) for tree, probs in zip(case.forest.trees, acceptance)]


def expected_tokens(tree: TokenTree, stop_distribution: Sequence[float]) -> float:
    """Return E[tau + 1 | tree]: the accepted nodes and the extra token."""
    return sum(chance * (depth + 1) for chance, depth in zip(stop_distribution, tree.depths))


def _extra_ids(case: PlannedForest, masses: Masses, nodes: Sequence[int], keys: Sequence[StepKey]) -> list[int]:
    """Draw the extra token after `nodes[b]` of each tree b, a few nodes at a time, most tries first."""
    ends = [offset + node for offset, node in zip(case.forest.offsets, nodes)]
    order = sorted(range(len(ends)), key=lambda b: -case.layout.num_tries(ends[b]))
    drawn: list[Tensor] = []
    for trees in chunks(order, _max_rows(case.target_probs_NV)):
        weights_MV = case.extra_weights(case.layout.level(ends[b] for b in trees), masses.prefix_P)
        drawn.append(draw(weights_MV, floats(_uniforms([keys[b] for b in trees], Stream.EXTRA), weights_MV.device)))
    extra_ids = dict(zip(order, torch.cat(drawn).tolist()))
    return [extra_ids[b] for b in range(len(ends))]


def _max_rows(probs_NV: Tensor) -> int:
    return rows_at_once(probs_NV.shape[-1], probs_NV.device)


_MAX_UNIFORM = 1.0 - 2.0**-53  # its product with a total is below the total, even after rounding


def draw(weights_MV: Float[Tensor, "M V"], uniforms_M: Float[Tensor, " M"]) -> Int[Tensor, " M"]:
    """Draw an index of each row by inverse CDF in float64; a row need not sum to 1.

    An index of weight 0 is never drawn, even with u = 0 or u = 1, if the cumulative sums never decrease.
    """
    cdf_MV = weights_MV.cumsum(-1, dtype=torch.float64)
    point_M1 = uniforms_M[:, None].clamp(max=_MAX_UNIFORM) * cdf_MV[:, -1:]
    return torch.searchsorted(cdf_MV, point_M1, right=True).view(-1)


def draw_one(weights: Sequence[float], uniform: float) -> int:
    """Draw an index of a few weights on the host, with the same result as `draw`."""
    cdf = [*accumulate(weights)]
    return bisect_right(cdf, min(uniform, _MAX_UNIFORM) * cdf[-1])


def _uniforms(keys: Sequence[StepKey], stream: Stream) -> list[float]:
    return [uniform(stream_key(key.seed, key.root_position, stream), 0) for key in keys]
