"""A request ends within the tokens of earlier ones, however many come after it, and whatever slots are taken from it.

The oldest running request is fed at least a token in each step and is never preempted for others. A preempted request runs
before new ones. So a request ends within as many steps as there are tokens, in prompts and answers, of it and of earlier ones.
"""

import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engine.core.config import SchedulerConfig
from engine.core.step_plan import Feeding
from engine.core.tree import Expansion
from engine.core.types import Request, SamplingParams
from engine.scheduler.scheduler import RowResult, Scheduler
from engine.scheduler.sequence import Sequence
from tests.unit.scheduler.scheduler_machine import random_tree

NUM_SLOTS = 24
MOST_ALIVE = 12
LARGEST_REQUEST = NUM_SLOTS  # it runs alone to its end


def sequence_of(number: int, num_prompt: int, max_tokens: int) -> Sequence:
    prompt = tuple(100 * number + 20 + place for place in range(num_prompt))
    return Sequence(Request(str(number), prompt, SamplingParams(max_tokens=max_tokens, stop_token_ids=(2,))), number, "traversal")


def steps_of(rng: random.Random, scheduler: Scheduler, sizes: list[tuple[int, int]], most_steps: int) -> int:
    """Return the steps that the last of these requests takes, while others keep coming; at most `most_steps` and one."""
    for number, size in enumerate(sizes):
        scheduler.add(sequence_of(number, *size))
    number, last = len(sizes), str(len(sizes) - 1)
    for step in range(most_steps + 1):
        if last not in scheduler:
            return step
        while scheduler.num_running + scheduler.num_waiting < MOST_ALIVE:
            num_prompt = rng.randint(1, LARGEST_REQUEST - 1)
            scheduler.add(sequence_of(number, num_prompt, rng.randint(1, LARGEST_REQUEST - num_prompt)))
            number += 1
        scheduler.admit()
        wishes = [Expansion(rng.randint(0, 3), rng.randint(1, 3), rng.randint(0, 2)) for _ in scheduler.views()]
        for row in scheduler.plan(wishes).rows:
            if row.is_decoding:
                tree = random_tree(rng, row.history[-1], row.expansion)
                path = tree.path(rng.randrange(tree.num_nodes))
                scheduler.commit(row, RowResult(tree, path, rng.randrange(3, 12), 0))
            else:
                scheduler.commit_chunk(row)
    return most_steps + 1


def check_no_request_starves(scheduler_class: type[Scheduler], *phases: Phase) -> None:
    size = st.integers(1, LARGEST_REQUEST - 1).flatmap(
        lambda num_prompt: st.tuples(st.just(num_prompt), st.integers(1, LARGEST_REQUEST - num_prompt))
    )

    @settings(max_examples=100, phases=phases)
    @given(
        sizes=st.lists(size, min_size=1, max_size=6),
        max_running=st.integers(1, 6),
        max_step_tokens=st.integers(6, 30),
        feeding=st.sampled_from(Feeding),
        seed=st.integers(0, 2**32),
    )
    def check(sizes, max_running, max_step_tokens, feeding, seed):
        config = SchedulerConfig(max_running=max_running, max_step_tokens=max_step_tokens, num_slots=NUM_SLOTS)
        num_tokens = sum(map(sum, sizes))
        assert steps_of(random.Random(seed), scheduler_class(config, feeding), sizes, num_tokens) <= num_tokens

    check()


def test_no_request_starves():
    check_no_request_starves(Scheduler, Phase.generate, Phase.shrink)


class PreemptsTheOldest(Scheduler):
    def _preempt(self, sequence):
        super()._preempt(self._running[0])


class LetsThePreemptedWaitLast(Scheduler):
    def _preempt(self, sequence):
        super()._preempt(sequence)
        self._waiting.remove(sequence)
        del self._by_id[sequence.request_id]
        self.add(sequence)


class RunsTheNewestFirst(Scheduler):
    def admit(self):
        super().admit()
        self._running.sort(key=lambda sequence: -int(sequence.request_id))


@pytest.mark.parametrize("mutant", [PreemptsTheOldest, LetsThePreemptedWaitLast, RunsTheNewestFirst])
def test_starvation_check_kills_mutants(mutant):
    with pytest.raises(AssertionError):
        check_no_request_starves(mutant, Phase.generate)
