"""The observers of an engine's steps. Free of torch."""

from collections.abc import Sequence

from engine.core.row_trace import TracedRow
from engine.core.step_plan import StepPlan
from engine.core.tree import TokenTree
from engine.core.types import StepStats


class StepObserver:
    """Receives each step of an engine. Subclasses override the methods that they need.

    `wants_rows`: all rows are traced, not only those of requests that enable it.
    """

    wants_rows = False

    def before_step(self, plan: StepPlan) -> None:
        """Receive the plan of a step before it runs. An exception fails the step."""

    def after_forward(self, plan: StepPlan, trees: Sequence[TokenTree]) -> None:
        """Receive the trees of the decoding rows after the target's pass, before any slot is freed."""

    def after_step(self, stats: StepStats, rows: Sequence[TracedRow]) -> None:
        """Receive the statistics and the traced rows of a finished step. Must not raise."""
