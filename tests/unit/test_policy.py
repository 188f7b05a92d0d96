"""Policies that need no training: always a wish for every sequence, never more than allowed, and the sensible shape."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.policy import (
    AdaptiveExpansion,
    DraftOutcome,
    FixedExpansion,
    PlainDecoding,
    SequenceView,
    StepCosts,
    StepFeedback,
    _expected_tokens,
    _menu,
)
from engine.tree import PLAIN, Expansion
from engine.types import SamplingParams
from tests.strategies import expansions

LARGEST = Expansion(3, 3, 2)


def view(outcomes: list[DraftOutcome] | None = None, num_generated: int = 10) -> SequenceView:
    return SequenceView("r", 50, num_generated, SamplingParams(), "traversal", tuple(outcomes or ()))


def feedback(
    num_tokens: int, seconds: float, *, draft_s: float = 0.0, levels: int = 0, has_prefill: bool = False
) -> StepFeedback:
    expansion = Expansion(levels, 1, 0)
    return StepFeedback((expansion,), (DraftOutcome(levels, 0),), num_tokens, 1, draft_s, seconds, seconds + draft_s, has_prefill)


def costs_of(base_s: float, token_s: float, level_s: float) -> StepCosts:
    """Return costs learnt from steps that follow a line exactly."""
    costs = StepCosts()
    for step in range(200):
        num_tokens, levels = 1 + step % 9, 1 + step % 4
        costs.observe(feedback(num_tokens, base_s + token_s * num_tokens, draft_s=level_s * levels, levels=levels))
    return costs


@given(expansions(), st.integers(0, 5))
def test_fixed_and_plain_wish_the_same_for_all(expansion, num_views):
    assert FixedExpansion(expansion).choose([view()] * num_views) == [expansion] * num_views
    assert PlainDecoding().choose([view()] * num_views) == [PLAIN] * num_views


@given(st.floats(1e-3, 1.0), st.floats(1e-4, 0.1), st.floats(1e-4, 0.1))
def test_costs_learn_the_line(base_s, token_s, level_s):
    costs = costs_of(base_s, token_s, level_s)
    assert costs.step_s(20, 3) == pytest.approx(base_s + 20 * token_s + 3 * level_s, rel=1e-4)


def test_costs_do_not_learn_from_prompts_or_from_idle_steps():
    """An idle step (one that only tells of aborts) costs nothing and says nothing of what a forward costs."""
    costs = costs_of(0.01, 0.001, 0.002)
    before = costs.step_s(7, 2)
    costs.observe(feedback(500, 9.0, has_prefill=True))
    costs.observe(feedback(0, 0.0))
    assert costs.step_s(7, 2) == before
    costs.observe(feedback(500, 9.0))
    assert costs.step_s(7, 2) != before


observed = st.builds(
    feedback, st.integers(0, 500), st.floats(0, 10), draft_s=st.floats(0, 10), levels=st.integers(0, 6), has_prefill=st.booleans()
)


@given(st.lists(observed, max_size=30), st.integers(1, 300), st.integers(0, 8))
def test_costs_are_positive_whatever_was_seen(history, num_tokens, levels):
    costs = StepCosts()
    for one in history:
        costs.observe(one)
    assert 0.0 < costs.step_s(num_tokens, levels) < math.inf
    assert costs.step_s(num_tokens + 1, levels) >= costs.step_s(num_tokens, levels)


def brute_expected_tokens(expansion: Expansion, acceptance: float) -> float:
    """Return E[accepted] + 1 by going down level by level: P(alive) times the chance to find a child."""
    alive, total = 1.0, 1.0
    for depth in range(1, expansion.max_depth + 1):
        is_fork = depth == expansion.trunk + 1
        alive *= 1.0 - (1.0 - acceptance) ** (expansion.branches if is_fork else 1)
        total += alive
    return total


@given(expansions(), st.floats(0.0, 1.0))
def test_expected_tokens_follow_the_tree(expansion, acceptance):
    if expansion.depth or expansion.branches == 1:
        assert _expected_tokens(expansion, acceptance) == pytest.approx(brute_expected_tokens(expansion, acceptance))


@given(expansions())
def test_the_menu_stays_inside_the_largest(largest):
    menu = _menu(largest)
    assert PLAIN in menu
    assert len(menu) == len(set(menu))
    for shape in menu:
        assert shape.max_depth <= largest.max_depth
        assert shape.num_draft_tokens <= max(largest.num_draft_tokens, largest.max_depth)


def adaptive(costs: StepCosts, largest: Expansion = LARGEST) -> AdaptiveExpansion:
    policy = AdaptiveExpansion(largest)
    policy._costs = costs
    return policy


ACCEPTED = [DraftOutcome(4, 4)] * 32
REFUSED = [DraftOutcome(4, 0)] * 32
CHEAP, DEAR = costs_of(0.1, 1e-6, 1e-6), costs_of(0.001, 0.1, 0.1)


def check_choices(policy_class: type[AdaptiveExpansion]) -> None:
    cheap, dear, middling = policy_class(LARGEST), policy_class(LARGEST), policy_class(LARGEST)
    cheap._costs, dear._costs, middling._costs = CHEAP, DEAR, costs_of(0.05, 0.01, 0.001)
    assert cheap.choose([view(ACCEPTED)])[0].max_depth == LARGEST.max_depth
    assert dear.choose([view(REFUSED)]) == [PLAIN]
    accepting, refusing = middling.choose([view(ACCEPTED), view(REFUSED)])
    assert accepting.num_draft_tokens > refusing.num_draft_tokens


def test_adaptive_goes_deep_where_it_pays():
    check_choices(AdaptiveExpansion)


class DeafToAcceptance(AdaptiveExpansion):
    def _acceptance(self, view):
        return 0.5


class DeafToCosts(AdaptiveExpansion):
    def _seconds(self, expansion, num_rows):
        return 1.0


class CountsDraftsAsFree(AdaptiveExpansion):
    def _seconds(self, expansion, num_rows):
        return super()._seconds(PLAIN, num_rows)


@pytest.mark.parametrize("mutant", [DeafToAcceptance, DeafToCosts, CountsDraftsAsFree])
def test_choices_kill(mutant):
    with pytest.raises(AssertionError):
        check_choices(mutant)


def test_adaptive_spends_less_where_tokens_cost_more():
    """The same acceptance, a dearer token: never a larger tree."""
    outcomes = [DraftOutcome(4, 2)] * 32
    sizes = [
        adaptive(costs_of(0.05, token_s, 0.001)).choose([view(outcomes)])[0].num_draft_tokens
        for token_s in (1e-5, 0.005, 0.02, 0.1)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]


def test_adaptive_looks_again_after_it_gave_up():
    policy = adaptive(DEAR)
    chosen = [policy.choose([view(REFUSED, num_generated)])[0] for num_generated in range(128)]
    assert [n for n, expansion in enumerate(chosen) if not expansion.is_plain] == [63, 127]


@given(
    expansions(),
    st.lists(observed, max_size=10),
    st.lists(st.lists(st.builds(DraftOutcome, st.integers(0, 5), st.integers(0, 5)), max_size=5), max_size=4),
)
@example(PLAIN, [], [[], []])
def test_adaptive_always_answers_from_its_menu(largest, history, recents):
    """A menu of plain decoding alone has nothing to probe with, and once raised at the 64th token."""
    policy = AdaptiveExpansion(largest)
    for one in history:
        policy.observe(one)
    views = [view(recent, num_generated) for num_generated, recent in enumerate(recents, start=62)]
    chosen = policy.choose(views)
    assert len(chosen) == len(views)
    assert set(chosen) <= set(_menu(largest))
