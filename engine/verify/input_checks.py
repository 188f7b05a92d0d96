"""Checks of a verifier's input: trees before anything is computed, distributions by their sums, which reach the host later.

Shape key: N packed nodes, R draft distributions, V vocabulary, Y tries of all levels.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from engine.verify.errors import ImpossibleDraftError, InvalidDistributionError, NonFiniteDistributionError
from engine.verify.forest import Forest
from engine.verify.layout import Layout


def check_trees(forest: Forest, *, reads_draft: bool) -> None:
    """Raise ImpossibleDraftError for children without a draft distribution, if the verifier reads it."""
    faulty = [
        b
        for b, (tree, probs_rows) in enumerate(zip(forest.trees, forest.probs_rows))
        if reads_draft and any(drawn and row is None for drawn, row in zip(tree.draws, probs_rows))
    ]
    if faulty:
        raise ImpossibleDraftError(faulty)


class DistributionSums(NamedTuple):
    """Sums of the distributions that are read, and the draft probability of every try."""

    target_sums_N: Float[Tensor, " N"]
    draft_sums_R: Float[Tensor, " R"]
    draft_probs_Y: Float[Tensor, " Y"]


def distribution_sums(
    forest: Forest, target_probs_NV: Float[Tensor, "N V"], layout: Layout, *, reads_draft: bool
) -> DistributionSums:
    """Return the sums, on the device; the draft's are empty if it is not read."""
    target_sums_N = target_probs_NV.sum(-1)
    if not (reads_draft and layout.levels):
        return DistributionSums(target_sums_N, target_sums_N[:0], target_sums_N[:0])
    probs_MC = forest.draft_probs_RV[layout.all_levels.probs_rows_M[:, None], layout.all_levels.tokens_MC]
    return DistributionSums(target_sums_N, forest.draft_probs_RV.sum(-1), probs_MC.view(-1))


def check_probs(
    forest: Forest, layout: Layout, target_sums: Sequence[float], draft_sums: Sequence[float], draft_probs: Sequence[float]
) -> None:
    """Raise NonFiniteDistributionError or ImpossibleDraftError (a drafted token of probability 0) with the trees concerned.

    The numbers are those of `distribution_sums`.
    """
    is_finite = [math.isfinite(total) for total in target_sums]
    is_possible = [True] * len(is_finite)
    for node, probs in enumerate(layout.by_node(draft_probs)):
        if probs:
            is_finite[node] = is_finite[node] and math.isfinite(draft_sums[layout.probs_rows[node]])
            is_possible[node] = all(prob > 0.0 for prob in probs)
    _raise_unless(NonFiniteDistributionError, forest, is_finite)
    _raise_unless(ImpossibleDraftError, forest, is_possible)


def _raise_unless(error: type[InvalidDistributionError], forest: Forest, is_valid: Sequence[bool]) -> None:
    faulty = [b for b, (first, end) in enumerate(zip(forest.offsets, forest.offsets[1:])) if not all(is_valid[first:end])]
    if faulty:
        raise error(faulty)
