"""A profile is kept for another day only if enough was measured, often enough and calmly enough; on a machine on paper."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from engine.config import SchedulerConfig
from engine.policy import PassSize, StepFeedback, StepWork
from engine.tree import Expansion
from selector.profile import Profile, grid, measure

LIMITS = SchedulerConfig(num_slots=4096, max_model_len=1024, max_step_tokens=256)
SIZES = grid(LIMITS)
PLENTY_S = 4.5 * len(SIZES)  # at a second a pass: a round of two each, and two rounds more


@dataclass
class PaperBench:
    """Passes that last what a script says, on a clock that nothing else moves. `seconds(size, n)` is the n-th time's."""

    seconds: Callable[[PassSize, int], float]
    limits: SchedulerConfig = LIMITS
    now_s: float = 0.0
    counts: dict[PassSize, int] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, str]:
        return {}

    def clock(self) -> float:
        return self.now_s

    def time_pass(self, size: PassSize) -> tuple[StepWork, float]:
        count = self.counts[size] = self.counts.get(size, 0) + 1
        seconds = self.seconds(size, count)
        self.now_s += seconds
        num_keys = size.num_rows * (size.num_context + 1)
        return StepWork(size.num_rows, size.num_tokens, 0, num_keys, size.num_nodes * num_keys, 0, 0), seconds

    def run_steps(self, num_rows: int, num_prompt: int, expansions: Sequence[Expansion]) -> list[StepFeedback]:
        return []

    def profile(self, budget_s: float) -> Profile:
        return measure(self, self.clock, budget_s)


def even(size: PassSize, count: int) -> float:
    return 1.0


def test_a_calm_measurement_of_many_sizes_is_sound():
    bench = PaperBench(even)
    assert bench.profile(PLENTY_S).is_sound
    assert bench.counts == dict.fromkeys(SIZES, 4), "one to warm up, one a round; what fits is repeated"
    assert bench.now_s < PLENTY_S


def test_too_few_sizes_are_not_sound():
    """The first round stops at half the budget, after the seventh size; a second round of those seven fits."""
    bench = PaperBench(even)
    assert not bench.profile(budget_s=26.0).is_sound
    assert bench.counts == dict.fromkeys(SIZES[:7], 3)


def test_the_eighth_size_makes_it_sound():
    bench = PaperBench(even)
    assert bench.profile(budget_s=30.0).is_sound
    assert bench.counts == dict.fromkeys(SIZES[:8], 3)


def test_a_single_round_is_not_sound():
    """The last size is so slow that no second round fits."""
    bench = PaperBench(lambda size, count: PLENTY_S / 3 if size == SIZES[-1] else 1.0)
    assert not bench.profile(PLENTY_S).is_sound
    assert bench.counts == dict.fromkeys(SIZES, 2)


@pytest.mark.parametrize(("slow_s", "is_sound"), [(1.29, True), (1.31, False)])
def test_unsteady_times_are_not_sound(slow_s: float, is_sound: bool):
    """Each size is fast in the first of three rounds only, so that its median is the slow time."""
    bench = PaperBench(lambda size, count: 1.0 if count <= 2 else slow_s)
    assert bench.profile(PLENTY_S).is_sound is is_sound
    assert bench.counts == dict.fromkeys(SIZES, 4)


@pytest.mark.parametrize("is_hit", [lambda size, count: size == SIZES[3], lambda size, count: count == 3], ids=["size", "round"])
def test_one_unsteady_size_or_round_is_forgiven(is_hit: Callable[[PassSize, int], bool]):
    bench = PaperBench(lambda size, count: 1.4 if count > 2 and is_hit(size, count) else 1.0)
    assert bench.profile(PLENTY_S).is_sound
    assert bench.counts == dict.fromkeys(SIZES, 4)
