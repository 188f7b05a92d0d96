"""How many steps run in a row before the host sees their tokens."""

from collections.abc import Sequence

from engine.core.row_trace import TracedRow
from engine.core.step_observer import StepObserver
from engine.core.tree import PLAIN
from engine.core.types import StepStats
from engine.scheduler.scheduler import MostSteps

LONGEST_RUN_S = 0.045  # for which a new request, an abort and the streams wait
_MEMORY = 0.8  # decay of the average step


class RunPacing(StepObserver):
    """Measures steps by their number of rows, and whether they draft, and bounds runs of such steps in time."""

    def __init__(self, drafts_run: bool = True) -> None:
        self._drafts_run = drafts_run  # whether steps with drafts can run in a row
        self._step_s: dict[tuple[int, bool], float] = {}

    def most_steps(self, num_rows: int, at_most: int) -> MostSteps:
        """Return how many steps a run may have, up to `at_most`: 1 for steps like none that has been measured."""
        return MostSteps(self._most(num_rows, False, at_most), self._most(num_rows, True, at_most if self._drafts_run else 1))

    def _most(self, num_rows: int, drafts: bool, at_most: int) -> int:
        step_s = self._step_s.get((num_rows, drafts))
        return 1 if step_s is None else max(1, min(at_most, int(LONGEST_RUN_S / step_s)))

    def after_step(self, stats: StepStats, _: Sequence[TracedRow]) -> None:
        """Measure a step that decodes all of its rows and feeds no prompt."""
        num_rows = stats.num_decoding_rows
        if num_rows and stats.num_target_tokens == stats.num_row_steps + stats.num_draft_tokens:
            kind, step_s = (num_rows, stats.expansions.keys() != {PLAIN.label}), stats.step_s / stats.num_steps
            self._step_s[kind] = _MEMORY * self._step_s.get(kind, step_s) + (1.0 - _MEMORY) * step_s
