"""Replays examples: the seconds of a step with each tree, and the tokens a second of choices.

Shape key: R examples, M entries.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.core.policy import StepWork
from selector.cost import CostModel
from selector.network.examples import Examples

Array = NDArray[np.float64]
Places = NDArray[np.int64]


def seconds_of(examples: Examples, costs: CostModel) -> Array:
    """Return the predicted seconds of a step of one sequence with each tree, [R, M]. Only the root is new to the drafter."""
    depths_M, fed_share_M = np.array(examples.menu.depths, dtype=np.float64), np.array(examples.menu.fed_share)
    rows = zip(
        examples.context_R.tolist(), (examples.temperature_R > 0.0).tolist(), examples.nodes_RM.astype(np.float64), strict=True
    )
    return np.stack([step_s(costs, *row, depths_M, row[-1] * fed_share_M) for row in rows])


def step_s(costs: CostModel, context: int, is_drawn: bool, nodes_M: Array, passes_M: Array, fed_M: Array) -> Array:
    """Return the predicted seconds of a step of one sequence for trees with these nodes, draft passes and fed nodes, [M]."""
    trees = zip(nodes_M.tolist(), passes_M.tolist(), fed_M.tolist(), strict=True)
    works = (
        StepWork(
            1, 1 + num_nodes, (1 + num_nodes) * is_drawn, context, (1 + num_nodes) * context, passes, fed + (passes > 0), passes
        )
        for num_nodes, passes, fed in trees
    )
    return np.array([costs.step_s(work) for work in works])


def best_places(tokens_RM: Array, seconds_RM: Array) -> Places:
    """Return the entry with the most expected tokens a second for each example."""
    return np.asarray((tokens_RM / seconds_RM).argmax(1))


def static_place(tokens_RM: Array, seconds_RM: Array) -> int:
    """Return the entry that is best for all examples together."""
    return int((tokens_RM.sum(0) / seconds_RM.sum(0)).argmax())


def rows_by(labels: tuple[str, ...]) -> dict[str, Places]:
    """Return the rows of each label, labels in order of first appearance."""
    rows: dict[str, list[int]] = defaultdict(list)
    for row, label in enumerate(labels):
        rows[label].append(row)
    return {label: np.array(of_label) for label, of_label in rows.items()}


@dataclass(frozen=True)
class Totals:
    """Tokens and seconds of choices, summed over examples."""

    tokens: float
    seconds: float

    @classmethod
    def of(cls, places_R: Places, tokens_RM: Array, seconds_RM: Array) -> "Totals":
        """Return the totals of these choices."""
        rows = np.arange(len(places_R))
        return cls(float(tokens_RM[rows, places_R].sum()), float(seconds_RM[rows, places_R].sum()))

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds
