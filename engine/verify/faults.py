"""Checks of what a verifier is given: trees on the host before anything is computed, laws with one transfer at the end.

Shape key: B trees, N packed nodes, P = N + 1 (with the dummy), C tries, V vocabulary.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from engine.forest import Forest
from engine.verify.errors import ImpossibleDraftError, NotFiniteLawError
from engine.verify.layout import Layout


def check_trees(forest: Forest, *, reads_draft: bool) -> None:
    """Raise ImpossibleDraftError for children without a draft law, if the verifier reads it."""
    faulty = [
        b
        for b, (tree, law_rows) in enumerate(zip(forest.trees, forest.law_rows))
        if reads_draft and any(drawn and row is None for drawn, row in zip(tree.draws, law_rows))
    ]
    if faulty:
        raise ImpossibleDraftError(faulty)


def check_laws(forest: Forest, target_laws_NV: Float[Tensor, "N V"], layout: Layout, *, reads_draft: bool) -> None:
    """Raise NotFiniteLawError or ImpossibleDraftError (a drafted token of probability 0) with the trees concerned."""
    is_finite_P = torch.ones_like(layout.law_rows_P, dtype=torch.bool)
    is_finite_P[:-1] = target_laws_NV.sum(-1).isfinite()
    is_possible_P = torch.ones_like(is_finite_P)
    if reads_draft and layout.levels:
        is_try_PC = layout.is_try_PC
        is_finite_P &= forest.draft_laws_RV.sum(-1).isfinite()[layout.law_rows_P] | ~is_try_PC.any(-1)
        drawn_PC = forest.draft_laws_RV[layout.law_rows_P[:, None], layout.tokens_PC]
        is_possible_P = ((drawn_PC > 0.0) | ~is_try_PC).all(-1)
    by_tree_2BW = torch.stack([is_finite_P, is_possible_P])[:, layout.nodes_BW]
    is_finite, is_possible = by_tree_2BW.all(-1).tolist()
    _raise_unless(is_finite, is_possible)


def _raise_unless(is_finite: list[bool], is_possible: list[bool]) -> None:
    if not all(is_finite):
        raise NotFiniteLawError(b for b, good in enumerate(is_finite) if not good)
    if not all(is_possible):
        raise ImpossibleDraftError(b for b, good in enumerate(is_possible) if not good)
