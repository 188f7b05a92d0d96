"""When a client waits before it starts a worker again, and when it does not start one any more."""

import pytest

from engine.supervision import DeathRecord, Supervision

LIMITS = Supervision(min_backoff_s=1.0, max_backoff_s=5.0, settled_s=10.0, max_failed_starts=3)


def test_a_first_start_that_fails_is_not_repeated() -> None:
    deaths = DeathRecord(LIMITS)
    assert not deaths.is_hopeless
    deaths.note(None)
    assert deaths.is_hopeless


def test_failed_restarts_in_a_row_are_counted() -> None:
    deaths = DeathRecord(LIMITS)
    deaths.note(20.0)
    for _ in range(2):
        deaths.note(None)
    assert not deaths.is_hopeless
    deaths.note(20.0)
    for _ in range(2):
        deaths.note(None)
    assert not deaths.is_hopeless, "a start that succeeded in between forgives"
    deaths.note(None)
    assert deaths.is_hopeless


@pytest.mark.parametrize("early", [None, 0.5])
def test_early_deaths_double_the_wait_up_to_a_cap(early: float | None) -> None:
    deaths = DeathRecord(LIMITS)
    deaths.note(20.0)
    waits = [deaths.backoff_s]
    for _ in range(4):
        deaths.note(early)
        waits.append(deaths.backoff_s)
    assert waits == [0.0, 1.0, 2.0, 4.0, 5.0]
    deaths.note(20.0)
    assert deaths.backoff_s == 0.0
