"""A step's tokens are shared: between prompts and trees, between rows, and between drafter and target."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.config import SchedulerConfig
from engine.core.step_plan import Feeding
from engine.core.tree import PLAIN, Expansion, TokenTree
from engine.core.types import Request, SamplingParams
from engine.scheduler.scheduler import RowResult, Scheduler
from engine.scheduler.sequence import Sequence
from engine.scheduler.token_budget import TokenDemand, fair_shares, share_tokens

HUGE = Expansion(64, 16, 64)


def planned(prompt_lens, expansion=HUGE, feeding=Feeding.TARGET_CACHE, **limits):
    """Return the first plan of requests with prompts of these lengths, all wanting one expansion."""
    config = SchedulerConfig(**{"max_running": 8, "max_step_tokens": 64, "num_slots": 4096, **limits})
    scheduler = Scheduler(config, feeding)
    for index, length in enumerate(prompt_lens):
        request = Request(str(index), (index, *range(length - 1)), SamplingParams(max_tokens=200))
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


def test_short_prompt_does_not_wait_for_long():
    """Prompts were fed strictly by age: 511 tokens of the old one, 1 of the other, for as many steps as the old one took."""
    plan = planned([4000, 5], expansion=PLAIN, num_slots=8192)
    assert [len(row.certain_ids) for row in plan.rows] == [64 - 5, 5]
    assert [row.is_decoding for row in plan.rows] == [False, True]


def test_prompts_and_trees_leave_each_other_half():
    claims = [TokenDemand(400, 0), TokenDemand(1, 500), TokenDemand(1, 500)]
    prompt, *decoding = share_tokens(claims, 64)
    assert prompt.num_certain == 33
    assert [share.max_draft_tokens for share in decoding] == [14, 15]
    assert (
        share_tokens([TokenDemand(400, 0), TokenDemand(1, 2)], 64)[0].num_certain == 1 + 62 - 2
    )  # what trees do not want is the prompt's
    assert share_tokens([TokenDemand(400, 0)], 64)[0].num_certain == 64


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(0, 100))
def test_shares_are_fair(wants, total):
    shares = fair_shares(wants, total)
    assert all(0 <= share <= want for share, want in zip(shares, wants, strict=True))
    assert sum(shares) == min(total, sum(wants))
    unmet = [share for share, want in zip(shares, wants, strict=True) if share < want]
    assert not unmet or max(shares) <= min(unmet) + 1


def test_tree_leaves_slots_to_younger_rows():
    """An older row's tree once took the last free slots, and the younger row lost its whole cache for want of one."""
    config = SchedulerConfig(max_running=2, max_step_tokens=64, num_slots=63)
    scheduler = Scheduler(config, Feeding.TARGET_CACHE)
    for name in "ab":
        scheduler.add(Sequence(Request(name, (ord(name), *range(27)), SamplingParams(max_tokens=30)), 0, "traversal"))
    scheduler.admit()
    for _ in range(3):
        plan = scheduler.plan([Expansion(8, 1, 0)] * scheduler.num_running)
        assert plan.num_preempted == 0
        assert len(plan.rows) == 2
        for row in plan.rows:
            scheduler.commit(row, RowResult(TokenTree.single(row.certain_ids[-1]), (0,), 9, 0))


def test_unused_budget_goes_to_next_row():
    plan = planned([30, 1, 1])  # the first row drafts little beside its prompt
    assert len(plan.rows[0].certain_ids) == 30
    assert target_tokens(plan) <= 64
    assert all(row.expansion.num_draft_tokens >= 10 for row in plan.rows[1:])


@pytest.mark.parametrize("prompt_lens", [[1], [200], [3, 200, 5], [1] * 8, [70] * 8])
def test_step_never_exceeds_its_budget(prompt_lens):
    plan = planned(prompt_lens)
    assert target_tokens(plan) <= 64
    assert len(plan.rows) == len(prompt_lens)
    assert all(row.certain_ids for row in plan.rows)


def test_drafter_input_is_limited_per_step():
    """Eight prompts of 60 tokens once reached the drafter in one pass of 480."""
    plan = planned([60] * 8, feeding=Feeding.OWN_CACHE)
    assert sum(len(row.draft_ids) for row in plan.rows) <= 64


@pytest.mark.parametrize(("feeding", "first_tree"), [(Feeding.OWN_CACHE, 2), (Feeding.TARGET_FEATURES, 3)])
@pytest.mark.parametrize("prompt_len", [100, 128])
def test_a_drafter_that_follows_soon_drafts(feeding, first_tree, prompt_len):
    """Behind the target's features a prompt is fed a step late, and a root is proposed for once its text is cached.

    A prompt whose last chunk fills a step leaves one token more than a step for the drafter: one plain step, and not for ever.
    """
    config = SchedulerConfig(max_running=1, max_step_tokens=64, num_slots=256)
    scheduler = Scheduler(config, feeding)
    scheduler.add(Sequence(Request("a", tuple(range(prompt_len)), SamplingParams(max_tokens=20)), 0, "traversal"))
    scheduler.admit()
    for _ in range(first_tree - 1 + (prompt_len == 128)):
        (row,) = scheduler.plan([Expansion(4, 1, 0)]).rows
        assert row.expansion.is_plain
        if row.is_decoding:
            scheduler.commit(row, RowResult(TokenTree.single(row.certain_ids[-1]), (0,), 9, 0))
        else:
            scheduler.commit_chunk(row)
    (row,) = scheduler.plan([Expansion(4, 1, 0)]).rows
    assert not row.expansion.is_plain
    assert row.draft_len + len(row.draft_ids) == row.end


@pytest.mark.parametrize("keeps_up", [True, False])
def test_long_prompt_feeds_only_active_drafter(keeps_up):
    """Where drafting does not pay a drafter once read all but the last chunk of each long prompt for nothing."""
    scheduler = Scheduler(SchedulerConfig(max_running=1, max_step_tokens=64, num_slots=256), Feeding.OWN_CACHE)
    scheduler.add(Sequence(Request("a", tuple(range(200)), SamplingParams(max_tokens=20)), 0, "traversal"))
    scheduler.admit()
    num_fed = 0
    for _ in range(3):
        (row,) = scheduler.plan([PLAIN], keeps_up=keeps_up).rows
        num_fed += len(row.draft_ids)
        scheduler.commit_chunk(row)
    assert num_fed == (192 if keeps_up else 0)


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
