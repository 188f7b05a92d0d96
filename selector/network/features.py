"""Features of a root before drafting: states and distributions of earlier passes, the request, and counted acceptance.

Shape key: B sequences, D target width, W width of the drafter's input, S scalars, M entries of a menu.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.core.policy import ROOT_SCALARS, RootFacts, SequenceView
from selector.menu import Menu

Array = NDArray[np.float32]

_LENGTHS = (1, 2, 4, 8)  # of chains whose counted tokens are features
SCALARS = (
    *ROOT_SCALARS,
    *("temperature", "is_greedy", "top_p", "log_context", "log_generated"),
    *(f"counted_{length}" for length in _LENGTHS),
)
# The scalars of the drafter's last distribution, all zero without one. The first is whether there is one.
DRAFT_SCALARS = slice(ROOT_SCALARS.index("has_draft"), ROOT_SCALARS.index("draft_root_log") + 1)


@dataclass(frozen=True)
class SelectorFeatures:
    """A row for each of B sequences, float32. `counted_BM` are the tokens that counting expects of each entry of the menu."""

    target_BD: Array
    draft_BW: Array
    scalars_BS: Array
    counted_BM: Array

    def __len__(self) -> int:
        return len(self.scalars_BS)

    def at(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> "SelectorFeatures":
        """Return some of the rows."""
        return SelectorFeatures(self.target_BD[rows], self.draft_BW[rows], self.scalars_BS[rows], self.counted_BM[rows])


def rule_of(view: SequenceView) -> str:
    """Return the rule that verifies the sequence's trees: greedy, or its verifier."""
    return "greedy" if view.sampling.is_greedy else view.verifier


def features_of(views: Sequence[SequenceView], facts: RootFacts, counted_BM: NDArray[np.float64], menu: Menu) -> SelectorFeatures:
    """Return the features of sequences from the facts about their roots."""
    of_request_BC = np.array(
        [
            (
                one.sampling.temperature,
                float(one.sampling.is_greedy),
                one.sampling.top_p,
                np.log1p(one.num_committed),
                np.log1p(one.num_generated),
            )
            for one in views
        ],
        dtype=np.float32,
    )
    counted = counted_BM.astype(np.float32)
    scalars_BS = np.concatenate([facts.scalars_BS, of_request_BC, counted[:, _chains(menu)]], axis=1)
    return SelectorFeatures(facts.target_BD, facts.draft_BW, scalars_BS, counted)


def _chains(menu: Menu) -> list[int]:
    """Return the places of the chains of those lengths, or of the longest chain."""
    places = {entry.trunk: place for place, entry in enumerate(menu.entries) if entry.branches == 1}
    longest = max(places)
    return [places[min(length, longest)] for length in _LENGTHS]
