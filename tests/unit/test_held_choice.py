"""What a policy is told of steps in which its choice is held, and when."""

import pytest

from engine.policy import _MOST_UNTOLD, BatchViews, Choice, HeldChoice
from engine.tree import PLAIN


class Listens:
    """A policy whose choices hold for so many steps; notes what it is told between being asked."""

    name = "listens"

    def __init__(self, num_steps: int) -> None:
        self._choice = Choice((PLAIN,), num_steps=num_steps)
        self.heard: list[object] = []

    def choose(self, views):
        self.heard.append("asked")
        return self._choice

    def observe(self, feedback):
        self.heard.append(feedback)


def heard(num_held, num_steps, kind=HeldChoice):
    """Return what a policy hears in so many steps, each told by its number."""
    policy = Listens(num_held)
    held = kind(policy)
    for step in range(num_steps):
        held.choose(BatchViews(list, 1, 7), has_news=False)
        held.observe(lambda step=step: step)
    return policy.heard


def check_each_is_told_before_it_is_asked(kind: type[HeldChoice] = HeldChoice) -> None:
    assert heard(4, 10, kind) == ["asked", 0, 1, 2, 3, "asked", 4, 5, 6, 7, "asked"]
    assert heard(1, 3, kind) == ["asked", 0, "asked", 1, "asked"]


def test_each_step_is_told_in_order_before_the_policy_is_asked_again():
    check_each_is_told_before_it_is_asked()


def test_no_more_steps_wait_than_a_few():
    assert heard(1000, 3 * _MOST_UNTOLD + 1) == ["asked", *range(3 * _MOST_UNTOLD)]


class TellsLate(HeldChoice):
    def choose(self, views, has_news):
        untold, self._untold = self._untold, []
        choice = super().choose(views, has_news)
        self._untold = untold
        return choice


def test_what_is_told_behind_the_question_is_noticed():
    with pytest.raises(AssertionError):
        check_each_is_told_before_it_is_asked(TellsLate)
