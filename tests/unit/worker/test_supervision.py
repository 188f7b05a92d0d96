"""When a client waits before it starts a worker again, and when it does not start one any more."""

import pytest

from engine.worker.restart_limits import DeathRecord, Supervision

LIMITS = Supervision(min_backoff_s=1.0, max_backoff_s=5.0, stable_s=10.0, max_failed_starts=3)


def test_failed_first_start_is_not_repeated() -> None:
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


WorkerDeath = tuple[float | None, bool]  # seconds after it was ready, and whether it came from outside


def waits(*deaths: WorkerDeath) -> list[float]:
    """Return the wait before the start that follows each death."""
    record = DeathRecord(LIMITS)
    record.note(20.0)
    found = [record.backoff_s]
    for ready_for_s, is_from_outside in deaths:
        record.note(ready_for_s, is_from_outside)
        found.append(record.backoff_s)
    return found


@pytest.mark.parametrize("is_from_outside", [False, True])
def test_failed_starts_double_the_wait(is_from_outside: bool) -> None:
    """Also those that a signal from outside ends: the memory killer does so again and again."""
    assert waits(*[(None, is_from_outside)] * 4) == [0.0, 1.0, 2.0, 4.0, 5.0]


def test_the_first_crash_is_restarted_at_once() -> None:
    assert waits(*[(0.5, False)] * 5) == [0.0, 0.0, 1.0, 2.0, 4.0, 5.0]
    assert waits((0.5, False), (None, False), (0.5, False)) == [0.0, 0.0, 2.0, 2.0]


def test_kills_from_outside_wait_for_nothing() -> None:
    """The bug: five kills less than 30 s apart made the last restart wait 30 s."""
    assert waits(*[(0.5, True)] * 6) == [0.0] * 7
    assert waits(*[(0.5, False), (0.5, True)] * 3) == [0.0, 0.0, 0.0, 1.0, 0.0, 2.0, 0.0], "they forgive no crash either"


def test_long_life_resets_restart_delay() -> None:
    assert waits(*[(0.5, False)] * 3, (20.0, False), (0.5, False)) == [0.0, 0.0, 1.0, 2.0, 0.0, 0.0]
