"""Pauses of long prompts, so that decoding sequences keep a share of their pace."""

from collections.abc import Sequence

from engine.core.row_trace import TracedRow
from engine.core.step_observer import StepObserver
from engine.core.step_plan import StepPlan
from engine.core.types import StepStats


class PromptPacing(StepObserver):
    """Measures how long unfinished prompts must pause after a step that fed a part of one beside decoding rows.

    Such a step of `s` seconds requires a pause of `s pace / (1 - pace)` seconds. Then the decoding rows have `pace` of their
    tokens a second. A pace of 0 pauses nothing.
    """

    def __init__(self, pace: float) -> None:
        self._pause_per_s = pace / (1 - pace)
        self._pause_s = 0.0
        self._has_part = False

    @property
    def is_paused(self) -> bool:
        """Whether prompts that do not end in this step must wait, as long as there are decoding rows."""
        return self._pause_s > 0

    def before_step(self, plan: StepPlan) -> None:
        """Note whether the step feeds a part of a prompt beside decoding rows. A pause is never extended, so it ends."""
        self._has_part = not self.is_paused and 0 < len(plan.decoding) < len(plan.rows)

    def after_step(self, stats: StepStats, _: Sequence[TracedRow]) -> None:
        """Add the pause that the step requires, or subtract the step from it."""
        if self._has_part:
            self._pause_s = stats.step_s * self._pause_per_s
        else:
            self._pause_s = max(0.0, self._pause_s - stats.step_s) if stats.num_decoding_rows else 0.0
