"""A policy that raises costs no request its step: the fixed expansion is drafted, counted, and logged once with its reason."""

import logging

import pytest

from engine.core.policy import ExpansionChoice, Reason
from engine.core.tree import PLAIN, Expansion
from selector.guard import GuardedPolicy
from tests.selector.machine import Machine, Text, flat, run

CHAIN = Expansion(4, 1, 0)


class Failing:
    """A policy that fails at every second choice and at every observation."""

    name = "failing"
    num_choices = 0

    def choose(self, views):
        self.num_choices += 1
        if self.num_choices % 2:
            raise ArithmeticError("no such number")
        return ExpansionChoice((PLAIN,) * len(views))

    def observe(self, feedback):
        raise KeyError("no such request")


def test_failing_policy_is_replaced_and_logged_once(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        ran = run(GuardedPolicy(Failing(), CHAIN), Machine(), [Text(flat(0.5)), Text(flat(0.5))], 4)
    assert ran.choices == [(CHAIN, CHAIN), (PLAIN, PLAIN)] * 2
    assert ran.reasons == [Reason.FALLBACK, Reason.FIXED] * 2
    assert len(caplog.records) == 1
    assert "no such number" in caplog.text
