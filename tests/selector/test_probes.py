"""Probes: a share of all seconds, whatever they lose, and ever rarer where they bring nothing."""

import pytest

from engine.core.policy import DraftOutcome
from engine.core.tree import PLAIN, Expansion
from selector.probes import Probes
from tests.selector.machine import Text, flat

CHAIN = Expansion(4, 1, 0)


def spent_on_probes() -> float:
    """Return the seconds lost to probes in 4,000 steps of one second, where each probe that can be paid is made."""
    probes, spent = Probes(), 0.0
    for _ in range(4000):
        probes.save(1.0)
        probes.resize(1.0)
        if probes.can_pay(0.4):
            probes.end([], 0.4)
            spent += 0.4
    return spent


def test_probing_spends_no_more_than_its_share():
    assert 4000 * 0.004 < spent_on_probes() < 4000 * 0.004 + 2.5


def test_probing_on_credit_is_detected(monkeypatch):
    monkeypatch.setattr(Probes, "can_pay", lambda *_: True)
    assert spent_on_probes() > 4000 * 0.004 + 2.5


@pytest.mark.parametrize(("most_lost", "is_bounded"), [(16.0, True), (1e6, False)])
def test_long_step_is_charged_within_bounds(most_lost, is_bounded, monkeypatch):
    monkeypatch.setattr("selector.probes._MOST_LOST_STEPS", most_lost)
    probes = Probes()
    probes.resize(1.0)
    probes.end([], 1000.0)
    for _ in range(int(16.0 / 0.004) + 10):
        probes.save(1.0)
    assert probes.is_full == is_bounded


@pytest.mark.parametrize(("tried", "accepted", "interval"), [(CHAIN, 0, 48), (CHAIN, 1, 12), (PLAIN, 0, 24)])
def test_refused_probes_wait_twice_as_long(tried, accepted, interval):
    """The first sequence is probed at once. A probe without room gives no information."""
    probes, text = Probes(), Text(flat(0.0))
    for one, count, wait in [(CHAIN, 0, 24), (tried, accepted, interval)]:
        assert probes.due([text.view("r")], [True])[0] == [0]
        probes.begin([text.view("r")])
        assert set(probes.probed) == {"r"}
        probes.end([DraftOutcome("r", one, one.num_draft_tokens, one.max_depth, count)], 0.0)
        assert not probes.probed
        assert probes.due([text.view("r")], [True]) == ([], wait)
        text.num_generated += wait


@pytest.mark.parametrize("outcomes", [[DraftOutcome("r", PLAIN, 0, 0, 0)], []])
def test_first_probe_without_room_waits(outcomes):
    """The bug: a first probe whose tree had no room was repeated in every step. Neighbour: cached text replaced the tree."""
    probes, text = Probes(), Text(flat(0.0))
    probes.due([text.view("r")], [True])
    probes.begin([text.view("r")])
    probes.end(outcomes, 0.0)
    assert probes.due([text.view("r")], [True]) == ([], 12)
