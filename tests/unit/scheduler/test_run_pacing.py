"""Steps in a row are bounded in time, by what steps with as many rows took."""

import pytest

from engine.core.types import StepStats
from engine.scheduler.run_pacing import LONGEST_RUN_S, RunPacing


def paced(*steps: StepStats) -> RunPacing:
    pacing = RunPacing()
    for stats in steps:
        pacing.after_step(stats, ())
    return pacing


def step(num_rows: int, step_s: float, num_steps: int = 1, **given) -> StepStats:
    counts = {"num_decoding_rows": num_rows, "num_target_tokens": num_rows * num_steps, "num_steps": num_steps, **given}
    return StepStats(1, num_rows, 0, 0, 9, step_s=step_s, **counts)


@pytest.mark.parametrize(("step_s", "most"), [(0.001, 28), (0.006, 4), (0.013, 2), (0.015, 1), (0.1, 1)])
def test_run_fits_in_its_time(step_s, most):
    assert paced(step(4, step_s)).most_steps(4) == most
    assert most == 1 or most * step_s <= LONGEST_RUN_S


def test_steps_of_other_kinds_are_not_measured():
    """Nothing is known of another number of rows, of prompts and of drafts."""
    pacing = paced(step(4, 0.001), step(2, 0.001, num_target_tokens=9), step(3, 0.001, num_drafts=1), StepStats(1, 1, 0, 0, 9))
    assert [pacing.most_steps(num_rows) for num_rows in (0, 1, 2, 3, 4)] == [1, 1, 1, 1, 28]


def test_run_is_measured_by_its_steps():
    """The mutant, seconds of whole runs, would halve the next run again and again."""
    pacing = paced(*[step(4, 0.024, num_steps=4)] * 30)
    assert pacing.most_steps(4) == 4


def test_slower_steps_shorten_runs():
    assert paced(step(4, 0.002), *[step(4, 0.008)] * 30).most_steps(4) == 3
