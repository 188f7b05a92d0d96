"""An engine through random lives: sound books after each step, no foreign slot, exact accounts, the texts of plain decoding."""

from dataclasses import replace

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from engine.core.types import Progress
from engine.scheduler.scheduler import Scheduler
from tests.model.engine_machine import EngineMachine


def run(machine: type[EngineMachine], max_examples: int, *phases: Phase) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=max_examples, stateful_step_count=12, phases=phases))


def test_engine(pytestconfig):
    run(EngineMachine, int(pytestconfig.getoption("--engine-examples")), Phase.generate)


class ForgetsAToken(EngineMachine):
    """The mutant: the last reported token is lost with its engine."""

    def resumed(self, life):
        return replace(super().resumed(life), progress=Progress(tuple(life.token_ids[:-1])))


def test_token_reported_twice_is_detected():
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        run(ForgetsAToken, 30, Phase.generate)


_PREEMPT = Scheduler._preempt


def keeps_its_length(scheduler, sequence):
    """The mutant: after a preemption the length of the drafter's cache stays."""
    draft_len = sequence.draft_len
    _PREEMPT(scheduler, sequence)
    sequence.draft_len = draft_len


def test_a_preemption_that_keeps_something_is_noticed(monkeypatch):
    monkeypatch.setattr(Scheduler, "_preempt", keeps_its_length)
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        run(EngineMachine, 120, Phase.generate)
