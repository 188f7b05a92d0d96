"""What is measured at start, on a machine on paper: medians of what is alike, and kept for another day only if that was calm."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

import pytest

from engine.core.config import SchedulerConfig
from engine.core.policy import DraftOutcome, PassSize, StepFeedback, StepWork
from engine.core.tree import Expansion
from selector import profile as profiles
from selector.build import profiled_costs
from selector.cost import CostModel
from selector.profile import Profile, grid, measure
from tests.selector.machine import feedback

LIMITS = SchedulerConfig(num_slots=4096, max_model_len=1024, max_step_tokens=256)
SIZES = grid(LIMITS)
PLENTY_S = 13.5 * len(SIZES)  # at a second a pass: three times each, and one to warm up


def even(size: PassSize, count: int) -> float:
    return 1.0


def calm(length: int, turn: int) -> float:
    return 0.1 * length


def by_length(size: PassSize, count: int) -> float:
    return 1.0 if size.num_tokens < 16 else float(size.num_tokens // 8)


@dataclass
class PaperBench:
    """Passes and drafts with scripted times, on a clock that only passes move. `seconds(size, n)` is the n-th time's."""

    seconds: Callable[[PassSize, int], float] = even
    draft_s: Callable[[int, int], float] = calm
    limits: SchedulerConfig = LIMITS
    has_model: bool = True
    now_s: float = 0.0
    counts: dict[PassSize, int] = field(default_factory=dict)
    num_steps: int = 0
    longest_runs_s: tuple[float, float] = (0.0, 0.0)

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
        return StepWork(size.num_rows, size.num_tokens, 0, num_keys, size.num_nodes * num_keys, 0, 0, 0), seconds

    def run_steps(self, num_rows: int, num_prompt: int, expansions: Sequence[Expansion]) -> list[StepFeedback]:
        steps = []
        for place, expansion in enumerate(expansions):
            length = expansion.max_depth
            passes = length if self.has_model else 0
            num_tokens, num_keys = num_rows * (1 + length), num_rows * num_prompt
            work = StepWork(num_rows, num_tokens, 0, num_keys, num_tokens * num_keys, passes, num_rows * passes, length)
            outcomes = (DraftOutcome("r", expansion, length, length, 0),) * num_rows
            steps.append(feedback(work, outcomes, self.draft_s(length, place // 3), 1.0))
        self.num_steps += len(steps)
        return steps

    def profile(self, budget_s: float) -> Profile:
        return measure(self, self.clock, budget_s)


def test_calm_measurement_of_sizes_is_sound():
    bench = PaperBench()
    assert bench.profile(PLENTY_S).is_sound
    assert bench.counts == dict.fromkeys(SIZES, 4), "one to warm up, three that count"
    assert bench.now_s < PLENTY_S


def test_slow_machine_is_measured_at_key_sizes():
    """The first round alone takes longer than the budget."""
    bench = PaperBench(lambda size, count: 1.4)
    assert bench.profile(budget_s=6.0).is_sound
    assert bench.counts == dict.fromkeys(SIZES[:4], 3)
    assert {size.num_tokens for size in SIZES[:4]} == {1, 4, 16}


def test_very_slow_machine_is_measured_too():
    bench = PaperBench(lambda size, count: 9.0)
    assert bench.profile(budget_s=6.0).costs().coefficients["step"] > 1.0
    assert bench.counts == dict.fromkeys(SIZES[:4], 3)


@pytest.mark.parametrize(("slow_s", "is_sound"), [(1.29, True), (1.31, False)])
def test_unsteady_times_are_not_sound(slow_s: float, is_sound: bool):
    """Each size is fast in the first of three rounds only, so that its median is the slow time."""
    bench = PaperBench(lambda size, count: 1.0 if count <= 2 else slow_s)
    assert bench.profile(PLENTY_S).is_sound is is_sound


def test_unsteady_drafts_are_not_sound():
    """The profile would be kept with what one noisy start made of the drafter."""
    assert not PaperBench(draft_s=lambda length, turn: length * (0.1 if turn < 2 else 3.0)).profile(PLENTY_S).is_sound


@pytest.mark.parametrize("is_hit", [lambda size, count: size == SIZES[3], lambda size, count: count == 3], ids=["size", "round"])
def test_one_unsteady_size_or_round_is_forgiven(is_hit: Callable[[PassSize, int], bool]):
    assert PaperBench(lambda size, count: 1.4 if count > 2 and is_hit(size, count) else 1.0).profile(PLENTY_S).is_sound


def disturbed(length: int, turn: int) -> float:
    """Return a draft's seconds: its first turn chooses kernels, in the third another program runs."""
    return 0.1 * length * {0: 9.0, 2: 40.0}.get(turn, 1.0)


def draft_s_of(bench: PaperBench) -> float:
    return sum(bench.profile(2 * PLENTY_S).costs().coefficients[name] for name in ("round", "pass", "draft_token"))


def test_disturbed_turn_leaves_draft_coefficients_alone():
    bench = PaperBench(draft_s=disturbed)
    assert draft_s_of(bench) == pytest.approx(0.1, rel=0.05)
    assert bench.num_steps > 20


def test_every_step_for_itself_would_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(profiles, "_typical", lambda steps: max(steps, key=lambda step: step.draft_s))
    assert draft_s_of(PaperBench(draft_s=disturbed)) > 1.0


def test_passes_without_model_cost_nothing():
    coefficients = PaperBench(has_model=False).profile(PLENTY_S).costs().coefficients
    assert coefficients["round"] == pytest.approx(0.1, rel=0.05)
    assert max(coefficients["pass"], coefficients["draft_token"], coefficients["pass_key"]) < 1e-3


def test_short_texts_leave_no_room_to_draft():
    bench = PaperBench(limits=SchedulerConfig(num_slots=64, max_model_len=24, max_step_tokens=32))
    assert all(0.0 < value < inf for value in bench.profile(PLENTY_S).costs().coefficients.values())
    assert not bench.num_steps


def test_failed_bench_leaves_generic_coefficients(tmp_path, monkeypatch, caplog):
    def failing(size: PassSize, count: int) -> float:
        raise RuntimeError("no such kernel")

    monkeypatch.setenv("LATEBRANCH_CACHE", str(tmp_path))
    assert profiled_costs(PaperBench(failing)).coefficients == CostModel().coefficients
    assert "no such kernel" in caplog.text


def test_times_without_numbers_are_no_profile(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("LATEBRANCH_CACHE", str(tmp_path))
    assert profiled_costs(PaperBench(lambda size, count: float("nan"))).coefficients == CostModel().coefficients
    assert not list(tmp_path.rglob("*.json"))


def test_long_passes_are_repeated_less_often():
    """Every size has the same time to be repeated in, once at least."""
    bench = PaperBench(by_length)
    measure(bench, bench.clock, 2000.0)
    for size, count in bench.counts.items():
        assert count - 1 == max(2, int(500.0 / len(SIZES) / by_length(size, 0)))


def test_calm_of_most_sizes_counts():
    assert profiles._is_steady([[1.0], [1.0, 1.1]])
    assert not profiles._is_steady([[1.0, 9.0, 9.0], [1.0, 9.0, 9.0], [1.0, 1.0]])


def test_disturbed_first_time_is_repeated():
    """Its second one, which is the first that counts, took twelve times as long; those after it count too."""
    disturbed = SIZES[1]
    bench = PaperBench(lambda size, count: 12.0 if (size, count) == (disturbed, 2) else by_length(size, count))
    measure(bench, bench.clock, 1000.0)
    assert bench.counts[disturbed] > 0.5 * bench.counts[SIZES[0]]
