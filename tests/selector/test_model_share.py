"""How much of drafting the model does, counted by rounds of the steps that the policy knows whole."""

import pytest

from engine.policy import DraftOutcome, StepFeedback, StepWork
from engine.tree import Expansion
from selector.model_share import ModelShare
from tests.selector.machine import feedback

OUTCOME = DraftOutcome("r", Expansion(4, 1, 0), 4, 4, 2)


def step(num_passes: int, num_rounds: int, num_rows: int = 1) -> StepFeedback:
    return feedback(StepWork(num_rows, 5, 5, 9, 45, num_passes, 5, num_rounds), (OUTCOME,), 0.1, 0.2)


def test_rounds_without_a_pass_are_counted():
    share = ModelShare()
    assert share.share == 1.0
    for index in range(300):
        share.observe(step(4 if index % 4 == 0 else 0, 4))
    assert share.share == pytest.approx(0.25, abs=0.05)


def test_plain_steps_and_steps_known_in_part_say_nothing():
    share = ModelShare()
    for _ in range(100):
        share.observe(step(0, 0))
        share.observe(step(0, 16, num_rows=2))
    assert share.share == 1.0
