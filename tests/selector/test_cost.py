"""The cost model: positive, monotone, learnt from steps, deaf to outliers, quick to follow a machine that slows down."""

import math
import random
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.core.policy import StepWork
from selector import cost
from selector.cost import (
    GENERIC_DRAFT,
    GENERIC_REST,
    CostModel,
    draft_features,
    fitted_coefficients,
    rest_features,
)


def work(num_tokens: int, num_passes: int = 0, num_rows: int = 1, num_keys: int = 200) -> StepWork:
    return StepWork(num_rows, num_tokens, num_tokens, num_keys, num_tokens * num_keys, num_passes, num_passes, num_passes)


def true_seconds(one: StepWork, pass_s: float = 0.003) -> tuple[float, float]:
    """Return the seconds of drafting and of the rest."""
    rest_s = 0.010 + 0.0001 * one.num_tokens + 0.0006 * max(0, one.num_tokens - 16)
    return pass_s * one.num_passes, rest_s


def predicted(costs: CostModel, one: StepWork) -> float:
    return costs.step_s(one)


def taught(costs: CostModel, num_steps: int = 200, noise: float = 0.0, outliers: float = 0.0) -> CostModel:
    """Teach steps of 1 to 24 tokens and 0 to 6 passes; `outliers` of them take thirty times as long."""
    chance = random.Random(0)
    for _ in range(num_steps):
        one = work(chance.randint(1, 24), chance.randint(0, 6))
        factor = math.exp(chance.gauss(0.0, noise)) * (30.0 if chance.random() < outliers else 1.0)
        draft_s, rest_s = true_seconds(one)
        costs.observe(one, draft_s * factor, rest_s * factor)
    return costs


def worst_error(costs: CostModel) -> float:
    """Return the largest relative error of the ratio to a plain step, which is what a choice depends on."""

    def ratio(seconds_of: Callable[[StepWork], float]) -> list[float]:
        return [seconds_of(work(1 + nodes, passes)) / seconds_of(work(1)) for nodes, passes in ((1, 1), (4, 4), (15, 3), (23, 6))]

    wanted = ratio(lambda one: sum(true_seconds(one)))
    return max(abs(got / want - 1.0) for got, want in zip(ratio(lambda one: predicted(costs, one)), wanted, strict=True))


def test_unknown_machine_is_learnt():
    assert worst_error(CostModel()) > 0.3
    assert worst_error(taught(CostModel())) < 0.1


def test_noise_and_outliers_do_little_harm():
    assert worst_error(taught(CostModel(), 400, noise=0.15, outliers=0.1)) < 0.2


def test_costs_follow_a_slower_machine():
    """All coefficients follow, seen or not: after 30 plain steps at a third of the speed, drafting is known to be slower too."""
    costs = taught(CostModel())
    before = predicted(costs, work(5, 4))
    for _ in range(30):
        costs.observe(work(1), 0.0, 3.0 * sum(true_seconds(work(1))))
    assert predicted(costs, work(1)) == pytest.approx(3.0 * sum(true_seconds(work(1))), rel=0.1)
    assert predicted(costs, work(5, 4)) > 2.0 * before


def test_own_errors_alone_would_not_follow(monkeypatch):
    monkeypatch.setattr(cost, "_COMMON_VARIANCE", 0.0)
    with pytest.raises(AssertionError):
        test_costs_follow_a_slower_machine()


def test_without_a_bound_outliers_lead_astray(monkeypatch):
    monkeypatch.setattr(cost, "MOST_SIGMAS", 1e9)
    with pytest.raises(AssertionError):
        test_noise_and_outliers_do_little_harm()


works = st.builds(work, st.integers(1, 2000), st.integers(0, 12), st.integers(1, 64), st.integers(0, 10**6))


@given(st.lists(st.tuples(works, st.floats(0, 100), st.floats(0, 100)), max_size=20), works)
def test_seconds_grow_with_work(history, one):
    costs = CostModel()
    for seen, draft_s, rest_s in history:
        costs.observe(seen, draft_s, rest_s)
    seconds = predicted(costs, one)
    assert 0.0 < seconds < math.inf
    assert predicted(costs, work(one.num_tokens + 1, one.num_passes, one.num_rows, one.num_keys)) >= seconds
    assert predicted(costs, work(one.num_tokens, one.num_passes + 1, one.num_rows, one.num_keys)) >= seconds


def share_of_a_wide_step(costs: CostModel, num_steps: int = 3000) -> float:
    """Show small steps of a machine that is often disturbed, two steps in a row; return what a wide step has come to cost."""
    rng = random.Random(3)
    slowness = 1.0
    for index in range(num_steps):
        slowness = rng.choice([0.4, 1.0, 2.5]) if index % 2 == 0 else slowness
        draft_s, rest_s = true_seconds(work(3, 2))
        costs.observe(work(3, 2), draft_s * slowness, rest_s * slowness)
    return predicted(costs, work(40)) / predicted(costs, work(3))


def check_share() -> None:
    costs = taught(CostModel())
    share = predicted(costs, work(40)) / predicted(costs, work(3))
    assert share_of_a_wide_step(costs) == pytest.approx(share, rel=0.35)


def test_disturbances_teach_nothing_of_unseen_work():
    """A wide step once came to cost no more than a small one, because small ones had been disturbed, and trees grew wide."""
    check_share()


def test_ever_less_sure_filter_is_detected(monkeypatch):
    """A filter that begins with ever larger variances has no bound; in the end no variance is one."""
    begin = CostModel._correct

    def correct(self: CostModel, part: str, features: Sequence[float], measured_s: float) -> None:
        self._prior_KK = 1.5 * self._covariance_KK
        begin(self, part, features, measured_s)

    monkeypatch.setattr(CostModel, "_correct", correct)
    with pytest.raises((AssertionError, TypeError)):
        check_share()


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_tokens_curve_is_coefficients_times_features(first, second):
    """T(N) rises as a step's seconds do, on its bends, between them and beyond the last."""
    costs = taught(CostModel())
    ones = [work(tokens, num_keys=0) for tokens in (first, second)]
    drawn = costs.coefficients["drawn"] * (second - first)
    rise = costs.tokens_s(second) - costs.tokens_s(first)
    assert rise + drawn == pytest.approx(predicted(costs, ones[1]) - predicted(costs, ones[0]), abs=1e-9)


@cache
def known_costs() -> CostModel:
    return taught(CostModel())


def check_rises(costs: CostModel, num_tokens: float, count: int) -> None:
    """Each rise of T(N) is that from one number to the next, also between whole numbers and beyond the last bend."""
    rises = costs.rises_s(num_tokens, count)
    assert len(rises) == count
    for index, rise in enumerate(rises):
        assert rise == pytest.approx(costs.tokens_s(num_tokens + index + 1) - costs.tokens_s(num_tokens + index), abs=1e-9)


@given(st.floats(1.0, 700.0), st.integers(0, 70))
@example(1.0, 64)
@example(500.5, 70)
def test_rises_are_differences_of_the_curve(num_tokens, count):
    check_rises(known_costs(), num_tokens, count)


class RoundsDown(CostModel):
    def rises_s(self, num_tokens, count):
        return super().rises_s(int(num_tokens), count)


def test_rises_from_whole_numbers_are_detected():
    with pytest.raises(AssertionError):
        check_rises(taught(RoundsDown()), 15.5, 2)


def test_coefficients_are_found_again():
    chance = random.Random(1)
    ones = [work(chance.randint(1, 200), chance.randint(1, 5), chance.randint(1, 8), chance.randint(1, 4000)) for _ in range(80)]
    drafted, seconds = np.array([true_seconds(one) for one in ones]).T
    features = [rest_features(one) for one in ones]
    coefficients = np.array(fitted_coefficients(features, seconds, GENERIC_REST))
    assert (coefficients > 0).all()
    assert np.abs(np.array(features) @ coefficients / seconds - 1.0).max() < 0.1
    found = fitted_coefficients([draft_features(one) for one in ones], drafted, GENERIC_DRAFT)
    assert sum(found[:3]) == pytest.approx(0.003, rel=0.1)


def test_shared_calls_are_learnt():
    """Steps of 10 ms, of which a call takes 2 ms: four in a row share it."""
    costs = CostModel()
    for _ in range(200):
        for num_steps in (1, 4):
            costs.observe(work(1)._replace(num_calls=1.0 / num_steps), 0.0, 0.008 + 0.002 / num_steps)
    costs.longest_runs_s = 0.04, 0.01
    assert costs.step_s(work(1)) == pytest.approx(0.010, rel=0.02)
    assert costs.saved_s(0.010) == pytest.approx(0.0015, rel=0.2)
    assert costs.saved_s(0.010, has_drafts=True) == 0.0, "they run singly"


@pytest.mark.parametrize("rest", [[1.0], [0.0] * cost.NUM_REST, [math.nan] * cost.NUM_REST])
def test_invalid_coefficients_are_refused(rest):
    with pytest.raises(ValueError, match="coefficients"):
        CostModel(rest)
