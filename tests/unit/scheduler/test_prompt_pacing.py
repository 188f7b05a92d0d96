"""Decoding sequences keep their share of the pace beside long prompts, and short prompts do not wait."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.config import SchedulerConfig
from engine.core.step_plan import Feeding
from engine.core.tree import PLAIN
from engine.core.types import Request, SamplingParams
from engine.scheduler.prompt_pacing import PromptPacing
from engine.scheduler.scheduler import RowResult, Scheduler
from engine.scheduler.sequence import Sequence
from tests.unit.scheduler.scheduler_machine import random_tree, step_stats
from tests.unit.scheduler.test_starvation import sequence_of

STEP_TOKENS = 8
PLAIN_STEP_S = 1.0


class NeverPauses(PromptPacing):
    is_paused = False


class HalvesPauses(PromptPacing):
    def __init__(self, pace):
        super().__init__(pace)
        self._pause_per_s /= 2


def scheduler_with(pacing: PromptPacing) -> Scheduler:
    config = SchedulerConfig(max_step_tokens=STEP_TOKENS, max_running=4, num_slots=4096, prefix_block_tokens=4)
    scheduler = Scheduler(config, Feeding.TARGET_CACHE)
    scheduler.pacing = pacing
    return scheduler


def run_step(scheduler: Scheduler, prompt_token_s: float) -> tuple[float, list[str]]:
    """Run a step that takes a second and `prompt_token_s` for each prompt token. Return its seconds and the requests in it."""
    scheduler.admit()
    plan = scheduler.plan([PLAIN] * len(scheduler.views()))
    scheduler.pacing.before_step(plan)
    for row in plan.rows:
        if row.is_decoding:
            scheduler.commit(row, RowResult(random_tree(random.Random(0), row.history[-1], PLAIN), (0,), 7, 0))
        else:
            scheduler.commit_chunk(row)
    step_s = PLAIN_STEP_S + prompt_token_s * sum(len(row.certain_ids) - 1 for row in plan.rows)
    scheduler.pacing.after_step(step_stats(step_s, len(plan.decoding)), [])
    return step_s, [row.request_id for row in plan.rows]


def pace_beside(pacing: PromptPacing, prompt_token_s: float, num_prompt: int) -> float:
    """Return the pace of a decoding sequence, relative to its pace alone, beside a long prompt and its pauses."""
    scheduler = scheduler_with(pacing)
    scheduler.add(sequence_of(0, 1, 4000))
    run_step(scheduler, prompt_token_s)
    scheduler.add(sequence_of(1, num_prompt, 1))
    seconds, num_tokens = 0.0, 0
    while "1" in scheduler or pacing.is_paused:
        step_s, ids = run_step(scheduler, prompt_token_s)
        seconds, num_tokens = seconds + step_s, num_tokens + ids.count("0")
    return num_tokens * PLAIN_STEP_S / seconds


@settings(max_examples=25)
@given(st.sampled_from([0.0, 0.3, 0.6]), st.floats(0.0, 4.0), st.integers(200, 300))
def test_decoding_keeps_its_pace(pace, prompt_token_s, num_prompt):
    """The step that ends a prompt is not paced, as little as a short prompt's. It is at most a 25th of the steps here."""
    assert pace_beside(PromptPacing(pace), prompt_token_s, num_prompt) >= 0.95 * pace


@pytest.mark.parametrize("mutant", [NeverPauses, HalvesPauses])
def test_pace_is_lost_by_mutant(mutant):
    assert pace_beside(mutant(0.6), 2.0, 300) < 0.57


def test_short_prompts_do_not_wait():
    """A pause must hold back only what caused it: a prompt that fits into a step is read beside a paused one."""
    scheduler = scheduler_with(PromptPacing(0.6))
    scheduler.add(sequence_of(0, 1, 400))
    run_step(scheduler, 1.0)
    scheduler.add(sequence_of(1, 100, 1))
    run_step(scheduler, 1.0)
    scheduler.add(sequence_of(2, 5, 20))
    assert run_step(scheduler, 1.0)[1] == ["0", "2"]


def test_short_prompts_do_not_extend_a_pause():
    """The bug: each unfinished part of any prompt lengthened the pause, so a stream of short prompts starved a long one."""
    scheduler = scheduler_with(PromptPacing(0.6))
    scheduler.add(sequence_of(0, 1, 4000))
    run_step(scheduler, 1.0)
    scheduler.add(sequence_of(1, 60, 1))
    for number in range(2, 600, 2):
        if number % 8 == 0:
            scheduler.add(sequence_of(number, 7, 1))
            scheduler.add(sequence_of(number + 1, 7, 1))
        run_step(scheduler, 1.0)
        if "1" not in scheduler:
            return
    raise AssertionError("the long prompt starved")


def test_paused_prompt_blocks_no_shorter_one():
    """The bug: a prompt with the beginning of a paused one waited for it."""
    scheduler = scheduler_with(PromptPacing(0.6))
    scheduler.add(sequence_of(0, 1, 400))
    run_step(scheduler, 1.0)
    scheduler.add(sequence_of(1, 100, 1))
    run_step(scheduler, 1.0)
    assert scheduler.pacing.is_paused
    for name, num_tokens in (("2", 90), ("3", 7)):
        prompt = tuple(5000 + place for place in range(num_tokens))
        scheduler.add(Sequence(Request(name, prompt, SamplingParams(max_tokens=1), cache_salt=""), 0, "traversal"))
    fed = [request_id for _ in range(2) for request_id in run_step(scheduler, 1.0)[1]]
    assert "3" in fed
    assert "2" not in fed


def test_prompt_alone_does_not_wait():
    """A long prompt beside nothing that decodes is read in consecutive steps, also after a pause began."""
    scheduler = scheduler_with(PromptPacing(0.6))
    scheduler.add(sequence_of(0, 1, 3))
    run_step(scheduler, 1.0)
    scheduler.add(sequence_of(1, 30, 1))
    steps = [run_step(scheduler, 1.0)[1] for _ in range(5)]
    assert steps == [["0", "1"], ["0"], ["1"], ["1"], ["1"]]


def test_pause_leaves_room_for_decoding():
    """A paused prompt holds slots. If a decoding sequence then lacks one, the step must not be empty."""
    scheduler = Scheduler(
        SchedulerConfig(max_step_tokens=8, max_running=2, num_slots=16, prefix_block_tokens=0), Feeding.TARGET_CACHE
    )
    scheduler.add(sequence_of(0, 14, 1))
    scheduler.add(sequence_of(1, 1, 12))
    for _ in range(40):
        if not scheduler.has_work:
            return
        assert run_step(scheduler, 3.0)[1]
    raise AssertionError("a sequence did not end")
