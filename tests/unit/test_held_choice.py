"""What a policy is told of steps in which its choice is held, and when."""

from typing import Any

import pytest

from engine.held import MOST_UNTOLD, HeldChoice
from engine.policy import BatchViews, Choice
from engine.tree import PLAIN


class Listens:
    """A policy whose choices hold for so many steps; notes what it is told between being asked."""

    name = "listens"

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self.heard: list[object] = []

    def choose(self, views):
        self.heard.append("asked")
        return self._choice

    def observe(self, feedback):
        self.heard.append(feedback if isinstance(feedback, tuple) else feedback.num_steps)


def heard(choice, has_drafted, kind=HeldChoice):
    """Return what a policy hears of steps of which some have drafted: of each its place, and for how many it stands."""
    policy = Listens(choice)
    held = kind(policy)
    for step, drafted in enumerate(has_drafted):
        held.choose(BatchViews(list, 1, 7), has_news=False)
        held.observe(lambda num_steps, step=step: (step, num_steps), has_drafted=bool(drafted))
    return policy.heard


def held_for(num_steps, **told):
    return Choice((PLAIN,), num_steps=num_steps, **told)


def check_each_is_told_before_it_is_asked(kind: type[HeldChoice] = HeldChoice) -> None:
    assert heard(held_for(3), [0, 1, 0, 1, 0, 0, 1], kind) == [
        "asked",
        (0, 1),
        (1, 1),
        (2, 1),
        "asked",
        (3, 1),
        (4, 1),
        (5, 1),
        "asked",
    ]
    assert heard(held_for(1), [0, 1, 0], kind) == ["asked", (0, 1), "asked", (1, 1), "asked"]


def test_each_step_is_told_in_order_before_the_policy_is_asked_again():
    check_each_is_told_before_it_is_asked()


def test_a_lesson_that_fails_takes_no_other_with_it():
    policy = Listens(held_for(9))
    held = HeldChoice(policy)
    held.choose(BatchViews(list, 1, 7), has_news=False)
    lessons: Any = (lambda num_steps: (1, num_steps), lambda num_steps: 1 // 0, lambda num_steps: (3, num_steps))
    for one in lessons:
        held.observe(one, has_drafted=True)
    with pytest.raises(ZeroDivisionError):
        held.tell()
    held.tell()
    assert policy.heard == ["asked", (1, 1), (3, 1)]


def test_no_more_steps_wait_than_a_few():
    all_told = ["asked", *((step, 1) for step in range(3 * MOST_UNTOLD))]
    assert heard(held_for(1000), [1] * (3 * MOST_UNTOLD + 1)) == all_told


def check_those_in_which_nobody_drafts_are_told_together(kind: type[HeldChoice] = HeldChoice) -> None:
    choice = held_for(12, plain_told=range(2, 12, 4))
    assert heard(choice, [0] * 13, kind) == ["asked", (2, 3), (6, 4), (10, 4), 1, "asked"]
    told = ["asked", 1, (1, 1), (3, 2), 1, (5, 1), (8, 3), 3, "asked"]
    assert heard(choice, [0, 1, 0, 0, 0, 1, *[0] * 7], kind) == told


def test_of_steps_in_which_nobody_drafts_one_is_told_for_several():
    """All are counted, in their order beside those in which somebody does."""
    check_those_in_which_nobody_drafts_are_told_together()


class LosesSome(HeldChoice):
    def tell(self):
        self._num_counted = 0
        super().tell()


def test_steps_that_are_lost_are_noticed():
    with pytest.raises(AssertionError):
        check_those_in_which_nobody_drafts_are_told_together(LosesSome)


class TellsLate(HeldChoice):
    def choose(self, views, has_news):
        untold, self._untold = self._untold, []
        choice = super().choose(views, has_news)
        self._untold = untold
        return choice


def test_what_is_told_behind_the_question_is_noticed():
    with pytest.raises(AssertionError):
        check_each_is_told_before_it_is_asked(TellsLate)
