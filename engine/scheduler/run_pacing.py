"""How many steps of plain decoding run in a row before the host sees their tokens."""

from collections.abc import Sequence

from engine.core.row_trace import TracedRow
from engine.core.step_observer import StepObserver
from engine.core.types import StepStats

LONGEST_RUN_S = 0.028  # for which a new request, an abort and the streams wait
_MEMORY = 0.8  # decay of the average step


class RunPacing(StepObserver):
    """Measures steps of plain decoding by their number of rows, and bounds runs of such steps in time."""

    def __init__(self) -> None:
        self._step_s: dict[int, float] = {}

    def most_steps(self, num_rows: int) -> int:
        """Return how many steps a run may have: 1 for a number of rows that has not been measured."""
        step_s = self._step_s.get(num_rows)
        return 1 if step_s is None else max(1, int(LONGEST_RUN_S / step_s))

    def after_step(self, stats: StepStats, _: Sequence[TracedRow]) -> None:
        """Measure a step that decodes plainly."""
        num_rows = stats.num_decoding_rows
        if num_rows and not stats.num_drafts and stats.num_target_tokens == stats.num_row_steps:
            step_s = stats.step_s / stats.num_steps
            self._step_s[num_rows] = _MEMORY * self._step_s.get(num_rows, step_s) + (1.0 - _MEMORY) * step_s
