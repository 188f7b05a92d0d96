"""A step's tokens are shared: between prompts and trees, between rows, and between drafter and target."""

import pytest

from engine.config import SchedulerConfig
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.tree import Expansion
from engine.types import Request, SamplingParams

HUGE = Expansion(64, 16, 64)


def planned(prompt_lens, expansion=HUGE, drafts_own_cache=False, **limits):
    """Return the first plan of requests with prompts of these lengths, all wanting one expansion."""
    config = SchedulerConfig(**{"max_running": 8, "max_step_tokens": 64, "num_slots": 4096, **limits})
    scheduler = Scheduler(config, drafts_own_cache)
    for index, length in enumerate(prompt_lens):
        request = Request(str(index), tuple(range(length)), SamplingParams(max_tokens=200))
        scheduler.add(Sequence(request, index, "traversal"))
    scheduler.admit()
    return scheduler.plan([expansion] * len(prompt_lens))


def target_tokens(plan):
    return sum(len(row.certain_ids) + row.expansion.num_draft_tokens for row in plan.rows)


def test_no_row_takes_the_others_trees():
    """The oldest row once got the whole budget, and the others drafted nothing."""
    sizes = [row.expansion.num_draft_tokens for row in planned([1] * 8).rows]
    assert min(sizes) >= 5
    assert sum(sizes) <= 64 - 8


def test_what_a_row_leaves_goes_to_the_next():
    plan = planned([30, 1, 1])  # the first row drafts little beside its prompt
    assert len(plan.rows[0].certain_ids) == 30
    assert target_tokens(plan) <= 64
    assert all(row.expansion.num_draft_tokens >= 10 for row in plan.rows[1:])


@pytest.mark.parametrize("prompt_lens", [[1], [200], [3, 200, 5], [1] * 8, [70] * 8])
def test_a_step_is_never_larger_than_its_budget(prompt_lens):
    plan = planned(prompt_lens)
    assert target_tokens(plan) <= 64
    assert len(plan.rows) == len(prompt_lens)
    assert all(row.certain_ids for row in plan.rows)


def test_the_drafter_is_not_fed_more_than_a_step():
    """Eight prompts of 60 tokens once reached the drafter in one pass of 480."""
    plan = planned([60] * 8, drafts_own_cache=True)
    assert sum(len(row.draft_ids) for row in plan.rows) <= 64


def test_prompt_tokens_are_counted_once_each():
    """The root of the first step is a prompt token too; it was left out, and preempted prompts counted twice."""
    assert [row.num_new_prompt_tokens for row in planned([1, 5]).rows] == [1, 5]
    sequence = Sequence(Request("a", (1, 2, 3, 4), SamplingParams()), 0, "traversal")
    assert [sequence.count_prompt(end) for end in (3, 3, 4, 9)] == [3, 0, 1, 0]


def test_limits_that_cannot_hold_are_refused():
    with pytest.raises(ValueError, match="max_step_tokens"):
        SchedulerConfig(max_running=32, max_step_tokens=31)
    with pytest.raises(ValueError, match="at least 1"):
        SchedulerConfig(num_slots=0)
