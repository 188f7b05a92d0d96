"""A batch that decodes plainly runs without the policy between the policy's own steps."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from engine.choice_cache import CachedChoice
from engine.core.policy import MOST_UNOBSERVED, BatchViews, ExpansionChoice, Reason, StepFeedback
from engine.core.step_observer import Ending, PolicySteps
from engine.core.tree import PLAIN, Expansion

TREE = Expansion(2, 1, 0)


@dataclass
class Step:
    """A committed step without tensors."""

    feedbacks: list[StepFeedback]
    num_steps: int = 1
    endings: dict[str, Ending] = field(default_factory=dict)
    logits_NV: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    draft_probs_RV: Tensor = field(default_factory=lambda: torch.empty(0, 0))

    @property
    def has_drafted(self) -> bool:
        return self.feedbacks[0].has_drafted

    @property
    def make_feedbacks(self) -> list[Callable[[], StepFeedback]]:
        return [partial(copy, one) for one in self.feedbacks]


class Counts:
    """A policy with one choice, which counts its calls and the steps that it observed."""

    name = "counts"

    def __init__(self, choice: ExpansionChoice) -> None:
        self._choice, self.num_choices, self.num_observed = choice, 0, list[int]()
        self.num_observed_first = list[int]()  # before each choice

    def choose(self, views):
        self.num_choices += 1
        self.num_observed_first.append(len(self.num_observed))
        return self._choice

    def observe(self, feedback):
        self.num_observed.append(feedback.num_steps)


def ran(policy: PolicySteps, compositions, has_drafted: bool = False, most_steps: int = 1) -> list[bool]:
    """Run a step with each composition, or up to `most_steps` in a row; return whether the policy chose."""
    chose = []
    for composition in compositions:
        views = BatchViews(list, 1, composition)
        chose.append(policy.reused(views) is None)
        if chose[-1]:
            policy.choose(views)
        num_steps = min(most_steps, policy.most_steps)
        unread = partial(pytest.fail, "read")
        feedback = StepFeedback(0.1, 0.9, False, 1, int(has_drafted), 0, unread, tuple, num_steps)
        policy.after_commit(Step([feedback], num_steps))
    return chose


PLAINLY = ExpansionChoice((PLAIN,), Reason.PLAIN_IS_BEST, num_steps=20)


def test_plain_steps_run_without_the_policy():
    counts = Counts(PLAINLY)
    assert ran(PolicySteps(CachedChoice(counts)), [7] * 20) == [True, *[False] * 7] * 2 + [True, *[False] * 3]
    assert counts.num_choices == 1
    assert counts.num_observed == [8, 8], "the account of probes gets every step, the last four later"


@pytest.mark.parametrize(
    ("most_steps", "chose", "num_steps"), [(3, [True, False, False], 9), (5, [True, False], 10), (8, [True], 8), (100, [True], 8)]
)
def test_steps_in_a_row_count_as_many(most_steps, chose, num_steps):
    """The last run may pass the steps that do not need the policy. The account of probes gets all steps."""
    counts = Counts(replace(PLAINLY, num_steps=100))
    assert ran(PolicySteps(CachedChoice(counts)), [7] * len(chose * 5), most_steps=most_steps) == chose * 5
    assert counts.num_choices == 1
    assert set(counts.num_observed) == {num_steps}


def test_runs_beyond_choice_are_detected(monkeypatch):
    """The mutant: a run counts as one step."""
    monkeypatch.setattr(Step, "num_steps", property(lambda step: 1, lambda step, value: None), raising=False)
    counts = Counts(PLAINLY)
    ran(PolicySteps(CachedChoice(counts)), [7] * 12, most_steps=3)
    assert counts.num_choices == 1


@pytest.mark.parametrize(
    ("choice", "has_drafted", "composition"),
    [
        (ExpansionChoice((TREE,), Reason.SPECULATION_PAYS), True, 7),
        (ExpansionChoice((TREE,), Reason.COPIED_TEXT, num_steps=20), True, 7),
        (ExpansionChoice((PLAIN,), Reason.FIXED, num_steps=20), False, 7),
        (PLAINLY, True, 7),  # a request sets its own tree, so that cached text must be followed
        (PLAINLY, False, None),  # a prompt is fed
        (ExpansionChoice((PLAIN,), Reason.PLAIN_IS_BEST), False, 7),
    ],
)
def test_other_steps_use_the_policy(choice, has_drafted, composition):
    counts = Counts(choice)
    assert all(ran(PolicySteps(counts), [composition] * 10, has_drafted))
    assert counts.num_observed == [1] * 10


def choices_with_drafts(
    has_news: Sequence[bool], compositions: Sequence[int], kind: type[PolicySteps] = PolicySteps
) -> list[int]:
    """Return the steps in which a policy chooses drafts for 12 steps. It has observed all earlier steps then."""
    counts, chosen = Counts(ExpansionChoice((TREE,), Reason.SPECULATION_PAYS, num_steps=12)), list[int]()
    steps = kind(CachedChoice(counts))
    for step, (is_news, composition) in enumerate(zip(has_news, compositions, strict=True)):
        views = BatchViews(list, 1, composition)
        views.has_news = is_news
        assert steps.reused(views) is None, "cached text is followed"
        assert steps.choose(views).expansions == (TREE,)
        if counts.num_choices > len(chosen):
            chosen.append(step)
        steps.after_commit(Step([StepFeedback(0.1, 0.9, False, 1, 1, 0, partial(pytest.fail, "read"), tuple)]))
    assert counts.num_observed_first == chosen
    assert set(counts.num_observed) == {1}
    return chosen


def test_drafts_are_reused_for_their_steps():
    """Neighbours: a look at cached text between two choices, and another batch."""
    assert choices_with_drafts([False] * 30, [7] * 30) == [0, 12, 24]
    assert choices_with_drafts([step % 5 == 0 for step in range(30)], [7] * 30) == [0, 12, 24]
    assert choices_with_drafts([False] * 30, [7] * 5 + [8] * 25) == [0, 5, 17, 29]


class ForgetsFeedback(PolicySteps):
    def _observe(self):
        self._unobserved.clear()


def test_lost_feedback_is_detected():
    with pytest.raises(AssertionError):
        choices_with_drafts([False] * 30, [7] * 30, ForgetsFeedback)


def check_news(kind: type[PolicySteps] = PolicySteps) -> None:
    """A wrapper of the policy, which looks at cached text, sees every step with news."""
    seen = list[int]()

    class Looks(CachedChoice):
        def choose(self, views):
            seen.append(step)
            return super().choose(views)

    steps = kind(Looks(Counts(ExpansionChoice((TREE,), Reason.SPECULATION_PAYS, num_steps=12))))
    for step in range(14):
        views = BatchViews(list, 1, 7)
        views.has_news = step in (4, 5)
        steps.choose(views)
        steps.after_commit(Step([StepFeedback(0.1, 0.9, False, 1, 1, 0, partial(pytest.fail, "read"), tuple)]))
    assert seen == [0, 4, 5, 12]


def test_cached_text_is_searched_when_news_come():
    check_news()


class IgnoresNews(PolicySteps):
    def choose(self, views):
        views.has_news = False
        return super().choose(views)


def test_ignored_news_are_detected():
    with pytest.raises(AssertionError):
        check_news(IgnoresNews)


def test_new_batches_use_the_policy():
    """Neighbours: a request ends, a prompt is fed. The cached choice counts the steps that ran without the policy."""
    counts = Counts(PLAINLY)
    assert ran(PolicySteps(CachedChoice(counts)), [7, 7, 7, 8, 8, None, 8]) == [True, False, False, True, False, True, True]
    assert counts.num_choices == 1
    steps = PolicySteps(CachedChoice(counts := Counts(PLAINLY)))
    ran(steps, [7] * 18)
    assert [sum(ran(steps, [8])) for _ in range(3)] == [1, 0, 1]
    assert counts.num_choices == 2


def test_only_steps_that_ran_are_observed():
    """The bug: a batch that changed in every second step was credited with eight steps for each choice."""
    counts = Counts(PLAINLY)
    ran(PolicySteps(counts), [number // 2 for number in range(40)])
    assert counts.num_observed == [2] * 19


@pytest.mark.parametrize("has_news", [False, True])
def test_each_drafting_step_of_run_is_observed(has_news):
    """The choice is reused for as many steps fewer as ran, also where cached text has the policy choose again."""
    choice = ExpansionChoice((TREE,), Reason.SPECULATION_PAYS, num_steps=12)
    counts = Counts(choice)
    policy, most = PolicySteps(CachedChoice(counts)), []
    for _ in range(6):
        views = BatchViews(list, 1, 7)
        views.has_news = has_news
        assert policy.reused(views) is None
        policy.choose(views)
        most.append(policy.most_steps)
        num_steps = min(5, policy.most_steps)
        single = [StepFeedback(0.1, 0.9, False, 1, 1, 0, partial(pytest.fail, "read"), tuple) for _ in range(num_steps)]
        policy.after_commit(Step(single, num_steps))
    assert most == [8, 7, 2, 8, 7, 2]
    assert counts.num_choices == 2
    assert sum(counts.num_observed) == len(counts.num_observed) == 24


def test_reuse_without_bound_is_detected(monkeypatch):
    """The mutant: cached text would not be searched while plain decoding is reused."""
    monkeypatch.setattr("engine.core.step_observer.MOST_UNOBSERVED", 10**6)
    assert sum(ran(PolicySteps(Counts(PLAINLY)), [7] * 20)) == 1 < 20 / MOST_UNOBSERVED
