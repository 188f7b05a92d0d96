"""Checks of what a verifier is given: trees before anything is computed, laws by a few numbers that reach the host late.

Shape key: N packed nodes, R draft laws, V vocabulary, Y tries of all levels.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from engine.verify.errors import ImpossibleDraftError, LawError, NotFiniteLawError
from engine.verify.forest import Forest
from engine.verify.layout import Layout


def check_trees(forest: Forest, *, reads_draft: bool) -> None:
    """Raise ImpossibleDraftError for children without a draft law, if the verifier reads it."""
    faulty = [
        b
        for b, (tree, probs_rows) in enumerate(zip(forest.trees, forest.probs_rows))
        if reads_draft and any(drawn and row is None for drawn, row in zip(tree.draws, probs_rows))
    ]
    if faulty:
        raise ImpossibleDraftError(faulty)


class Evidence(NamedTuple):
    """What tells laws that make sense: the sums of the laws that are read, and the draft probability of every try."""

    target_sums_N: Float[Tensor, " N"]
    draft_sums_R: Float[Tensor, " R"]
    tried_Y: Float[Tensor, " Y"]


def evidence_of(forest: Forest, target_probs_NV: Float[Tensor, "N V"], layout: Layout, *, reads_draft: bool) -> Evidence:
    """Return the evidence, on the device; of the draft nothing where it is not read."""
    target_sums_N = target_probs_NV.sum(-1)
    if not (reads_draft and layout.levels):
        return Evidence(target_sums_N, target_sums_N[:0], target_sums_N[:0])
    tried_XC = forest.draft_probs_RV[layout.all_levels.probs_rows_M[:, None], layout.all_levels.tokens_MC]
    return Evidence(target_sums_N, forest.draft_probs_RV.sum(-1), tried_XC.view(-1))


def check_probs(
    forest: Forest, layout: Layout, target_sums: Sequence[float], draft_sums: Sequence[float], tried: Sequence[float]
) -> None:
    """Raise NotFiniteLawError or ImpossibleDraftError (a drafted token of probability 0) with the trees concerned.

    The numbers are those of the evidence.
    """
    is_finite = [math.isfinite(total) for total in target_sums]
    is_possible = [True] * len(is_finite)
    for node, chances in enumerate(layout.by_node(tried)):
        if chances:
            is_finite[node] = is_finite[node] and math.isfinite(draft_sums[layout.probs_rows[node]])
            is_possible[node] = all(chance > 0.0 for chance in chances)
    _raise_unless(NotFiniteLawError, forest, is_finite)
    _raise_unless(ImpossibleDraftError, forest, is_possible)


def _raise_unless(error: type[LawError], forest: Forest, is_sound: Sequence[bool]) -> None:
    faulty = [b for b, (first, end) in enumerate(zip(forest.offsets, forest.offsets[1:])) if not all(is_sound[first:end])]
    if faulty:
        raise error(faulty)
