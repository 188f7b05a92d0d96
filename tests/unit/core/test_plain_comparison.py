"""One of many drafting steps decodes plainly, so that both speeds are measured; probes and plain steps stay."""

import pytest

from engine.core.policy import MOST_UNOBSERVED, BatchViews, ExpansionChoice, Reason
from engine.core.tree import PLAIN, Expansion
from engine.plain_comparison import COMPARED_EVERY, PlainComparison

TREE = Expansion(2, 1, 0)


class Chooses:
    """A policy with one reason and tree."""

    name = "chooses"

    def __init__(self, reason):
        self._reason = reason

    def choose(self, views):
        return ExpansionChoice((TREE,) * len(views), self._reason, speedup=2.0, step_s=1.0, num_steps=8)

    def observe(self, feedback):
        pass


def chosen(reason, num_choices, num_steps=1):
    """Return the choices of steps that are `num_steps` apart."""
    policy = PlainComparison(Chooses(reason))
    views = BatchViews(lambda: [], 2, 1)
    views.num_steps = num_steps
    return [policy.choose(views) for _ in range(num_choices)]


@pytest.mark.parametrize("reason", [Reason.SPECULATION_PAYS, Reason.COPIED_TEXT])
def test_one_drafting_step_of_many_is_plain(reason):
    choices = chosen(reason, 3 * COMPARED_EVERY)
    plain = [step for step, choice in enumerate(choices) if choice.expansions == (PLAIN, PLAIN)]
    assert plain == [COMPARED_EVERY - 1, 2 * COMPARED_EVERY - 1, 3 * COMPARED_EVERY - 1]
    assert {choices[step].reason for step in plain} == {Reason.COMPARISON}
    assert {choices[step].step_s for step in plain} == {None}
    assert {choices[step].num_steps for step in plain} == {MOST_UNOBSERVED}, "single steps would be slower than plain decoding"


def test_steps_between_two_choices_count():
    choices = chosen(Reason.SPECULATION_PAYS, COMPARED_EVERY // 4, num_steps=12)
    assert [one.reason for one in choices].count(Reason.COMPARISON) == 3


@pytest.mark.parametrize("reason", [Reason.PROBE, Reason.PLAIN_IS_BEST, Reason.FALLBACK, Reason.FIXED])
def test_other_choices_are_not_compared(reason):
    """A probe that decoded plainly would be charged with seconds that it did not take."""
    assert all(choice.reason is reason and choice.expansions == (TREE, TREE) for choice in chosen(reason, 3 * COMPARED_EVERY))
