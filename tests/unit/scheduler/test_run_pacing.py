"""Steps in a row are bounded in time, by what steps with as many rows took, with drafts or without."""

from typing import Any

import pytest

from engine.core.tree import PLAIN
from engine.core.types import StepStats
from engine.scheduler.run_pacing import LONGEST_RUN_S, RunPacing


def paced(*steps: StepStats) -> RunPacing:
    pacing = RunPacing()
    for stats in steps:
        pacing.after_step(stats, ())
    return pacing


def step(num_rows: int, step_s: float, num_steps: int = 1, **given) -> StepStats:
    counts: dict[str, Any] = {"num_decoding_rows": num_rows, "num_target_tokens": num_rows * num_steps, "num_steps": num_steps}
    counts |= {"expansions": {PLAIN.label: num_rows}, **given}
    return StepStats(1, num_rows, 0, 0, 9, step_s=step_s, **counts)


def drafting(num_rows: int, step_s: float) -> StepStats:
    return step(num_rows, step_s, num_target_tokens=num_rows + 9, num_draft_tokens=9, expansions={"noise_aware": num_rows})


def most_of(pacing: RunPacing, num_rows: int, at_most: int = 100) -> tuple[int, int]:
    found = pacing.most_steps(num_rows, at_most)
    return found.plain, found.drafting


@pytest.mark.parametrize("share", [1 / 28, 1 / 4.5, 1 / 2.1, 1 / 1.9, 3.0])
def test_run_fits_in_its_time(share):
    step_s = share * LONGEST_RUN_S * 0.999
    most = max(1, int(1 / share))
    assert most_of(paced(step(4, step_s)), 4) == (most, 1)
    assert most_of(paced(drafting(4, step_s)), 4) == (1, most)
    assert most_of(paced(step(4, step_s)), 4, at_most=3) == (min(3, most), 1)


def test_steps_of_other_kinds_are_not_measured():
    """Nothing is known of another number of rows, and of prompts."""
    pacing = paced(step(4, LONGEST_RUN_S / 10.5), step(2, 0.001, num_target_tokens=9), drafting(3, 0.1), StepStats(1, 1, 0, 0, 9))
    assert [most_of(pacing, num_rows) for num_rows in (0, 1, 2, 3, 4)] == [(1, 1)] * 4 + [(10, 1)]


def test_run_is_measured_by_its_steps():
    """The mutant, seconds of whole runs, would halve the next run again and again."""
    pacing = paced(*[step(4, 0.9 * LONGEST_RUN_S, num_steps=4)] * 30)
    assert most_of(pacing, 4) == (4, 1)


def test_slower_steps_shorten_runs():
    assert most_of(paced(step(4, 0.002), *[step(4, LONGEST_RUN_S / 3.5)] * 30), 4) == (3, 1)
