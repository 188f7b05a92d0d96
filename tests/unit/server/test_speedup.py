"""The speed-up over plain decoding: its interval holds whenever it is read, and a slower policy is found."""

import math
import random
from collections.abc import Callable, Iterator

import pytest
from msgspec import structs

from engine.core.types import StepStats
from server.metrics import speedup
from server.metrics.speedup import Interval, PairedSeconds, SpeedupOverPlain

NUM_RUNS = 1000


def coverage(draw: Callable[[random.Random], tuple[float, float]], truth: float, num_pairs: int = 300) -> float:
    """Return the share of runs whose interval contains the truth after each pair: a reader stops at the worst time."""
    draws = random.Random(0)
    num_covered = 0
    for _ in range(NUM_RUNS):
        sums = PairedSeconds()
        num_covered += all(_covers(sums, draw(draws), truth) for _ in range(num_pairs))
    return num_covered / NUM_RUNS


def _covers(sums: PairedSeconds, pair: tuple[float, float], truth: float) -> bool:
    sums.add(*pair)
    _, lower, upper = sums.interval()
    return lower <= truth <= upper


def _normal(draws: random.Random) -> tuple[float, float]:
    return draws.gauss(1.3, 0.1), draws.gauss(1.0, 0.02)


def _skewed(draws: random.Random) -> tuple[float, float]:
    """Seconds whose logarithms are normal, of blocks that serve one row or sixteen."""
    size = draws.choice((1.0, 3.0))
    return size * 1.3 * draws.lognormvariate(-0.02, 0.2), size * draws.lognormvariate(-0.005, 0.1)


@pytest.mark.parametrize("draw", [_normal, _skewed])
def test_interval_covers_at_all_times(draw):
    assert coverage(draw, 1.3) >= 0.95


def test_interval_for_one_time_fails_when_watched(monkeypatch):
    """The mutant: the bound of a test at one fixed time."""
    monkeypatch.setattr(speedup, "most_t_squared", lambda _: 1.97**2)
    assert coverage(_normal, 1.3) < 0.8


def test_interval_narrows_with_pairs():
    sums, draws, widths = PairedSeconds(), random.Random(1), {}
    for count in range(1, 1025):
        sums.add(*_normal(draws))
        widths[count] = sums.interval().upper - sums.interval().lower
    assert widths[1] == math.inf
    assert widths[1024] < widths[128] < widths[32] < math.inf
    assert widths[1024] < 0.04


class Server:
    """Steps of a policy that drafts, with one plain step of 256, or decodes plainly; some steps are interrupted."""

    def __init__(self, speed: float, drafts: bool = True) -> None:
        self._draws, self._speed, self._drafts = random.Random(2), speed, drafts

    def steps(self, count: int) -> Iterator[StepStats]:
        """Yield steps of one or two rows; two draft tokens, of which both or none are accepted."""
        for step in range(count):
            rows = 1 + step // 2000 % 2
            is_plain = not self._drafts or step % 256 == 255
            tokens = rows if is_plain else rows * self._draws.choice((1, 3))
            seconds = 0.01 * rows * self._draws.gauss(1.0, 0.1) * (1.0 if is_plain else 2.0 / self._speed)
            seconds *= 40.0 if self._draws.random() < 0.002 else 1.0
            yield StepStats(
                *(step, rows, 0, 0, 1),
                num_generated_tokens=tokens,
                num_draft_tokens=0 if is_plain else 2 * rows,
                num_decoding_rows=rows,
                num_target_tokens=rows if is_plain else 3 * rows,
                expansions={"0.1.0" if is_plain else "2.1.0": rows},
                step_s=seconds,
                policy_s=self._draws.uniform(0.0, 0.02) * seconds,
            )


def measured(server: Server, count: int) -> Interval:
    found = SpeedupOverPlain()
    for stats in server.steps(count):
        found.on_step(stats)
    return found.interval()


@pytest.mark.parametrize("speed", [0.8, 1.0, 1.5])
def test_speedup_of_drafting_is_found(speed):
    estimate, lower, upper = measured(Server(speed), 60_000)
    assert lower < speed < upper
    assert lower < estimate < upper < lower + 0.15 * speed
    assert (upper < 0.98) == (speed < 0.98)


def test_plain_steps_lose_the_policys_seconds():
    _, lower, upper = measured(Server(1.0, drafts=False), 30_000)
    assert 0.985 < lower < 0.99 < upper < 0.995


def test_plain_steps_in_a_row_count_singly():
    """The bug: several plain steps in a row are neither a prompt nor one long, interrupted step."""
    single, found = SpeedupOverPlain(), SpeedupOverPlain()
    steps = [one for one in Server(1.5).steps(20_000) if one.num_draft_tokens or one.num_decoding_rows == 1]
    for stats in steps:
        single.on_step(stats)
        if stats.num_draft_tokens:
            found.on_step(stats)
            continue
        sums = {name: 5 * getattr(stats, name) for name in ("num_generated_tokens", "num_target_tokens", "step_s", "policy_s")}
        found.on_step(structs.replace(stats, num_steps=5, **sums))
    assert 0.9 * single.interval().estimate < found.interval().estimate < single.interval().estimate


def test_nothing_is_known_without_plain_steps():
    server = Server(1.5)
    found = SpeedupOverPlain()
    for stats in server.steps(255):
        found.on_step(stats)
    assert found.interval()[1:] == (0.0, math.inf)


def test_steps_that_feed_prompts_are_left_out():
    """Neighbours: a step without decoding rows, one after a preemption, one without seconds."""
    found = SpeedupOverPlain()
    for _ in range(1000):
        found.on_step(StepStats(1, 1, 0, 0, 1, num_prompt_tokens=5, num_target_tokens=5, step_s=1.0))
        found.on_step(StepStats(1, 1, 0, 0, 1, num_decoding_rows=1, num_target_tokens=9, expansions={"0.1.0": 1}, step_s=1.0))
        found.on_step(StepStats(1, 1, 0, 0, 1, num_decoding_rows=1, num_target_tokens=1, expansions={"0.1.0": 1}))
    assert math.isnan(found.interval().estimate)


@pytest.mark.parametrize("num_undraftable", [1, 2])
def test_rows_that_disable_drafting_are_left_out(num_undraftable):
    """The bug: plain steps of clients that disable drafting moved the speed-up towards 1. Neighbour: a mixed batch."""
    found, mixed = SpeedupOverPlain(), Server(1.0, drafts=False)
    for drafting, plain in zip(Server(1.5).steps(60_000), mixed.steps(60_000), strict=True):
        found.on_step(drafting)
        if plain.num_decoding_rows == 2:
            found.on_step(structs.replace(plain, num_undraftable_rows=num_undraftable))
    assert found.interval().lower < 1.5 < found.interval().upper


def test_change_is_found_after_a_new_window(monkeypatch):
    """The bug: an average over all time hides that the policy has become slow. The last interval is kept while one begins."""
    monkeypatch.setattr(speedup, "_WINDOW_PAIRS", 200)
    found = SpeedupOverPlain()
    for stats in Server(1.5).steps(256 * 200):
        found.on_step(stats)
    assert found.interval().lower > 1.3
    for number, stats in enumerate(Server(0.8).steps(256 * 150)):
        found.on_step(stats)
        if number == 256 * 40:
            assert found.interval().lower > 1.3
    assert found.interval().upper < 0.98


def test_steps_long_before_a_comparison_count_little():
    """The bug: a block grew without end until a plain step, and one pair of hours outweighed all others."""
    found = SpeedupOverPlain()
    for stats in Server(1.5).steps(30_000):
        found.on_step(stats)
    before = found.interval()
    last = next(stats for stats in Server(1.5).steps(256) if not stats.num_draft_tokens)
    for stats in Server(1.5).steps(60_000):
        if stats.num_draft_tokens:
            found.on_step(stats)
    found.on_step(last)
    assert found.interval().estimate == pytest.approx(before.estimate, rel=0.1)
    assert found.interval().upper < 1.2 * before.upper
