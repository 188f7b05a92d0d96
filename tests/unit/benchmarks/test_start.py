"""The benchmark of starts: its table, and its names of checkouts."""

from pathlib import Path

import pytest

from benchmarks import start
from benchmarks.start import Start

OWN = Start({"/live": 1.0, "/ready": 3.0, "stop": 0.1}, 1.0, 2.0, {"front end": 1 << 20})
OTHER = Start({"/live": 1.0, "/ready": 6.0, "stop": 0.1}, 1.0, 4.0, {"front end": 2 << 20})


def test_one_checkout_is_compared_with_none() -> None:
    """The bug: without another checkout there was no row for the base of the ratios, and the table a KeyError."""
    report = start._report({"this checkout": [OWN]}, "this checkout")
    assert "| /ready, s | 3.0 (3.0–3.0) |" in report
    assert "over" not in report


def test_ratios_are_over_the_first_checkout() -> None:
    report = start._report({"before": [OTHER, OTHER], "this checkout": [OWN, OWN]}, "before")
    assert "| /ready over before | 1.00 (1.00–1.00) | 0.50 (0.50–0.50) |" in report
    assert "| memory over before | 1.00 (1.00–1.00) | 0.50 (0.50–0.50) |" in report


@pytest.mark.parametrize("words", [[], ["--first"], ["--set", "dtype=compact"]])
def test_every_command_has_a_base(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As `main` names it: a start without other checkouts, of README's command too."""
    monkeypatch.setattr(start, "measured", lambda subject: OWN)
    monkeypatch.setattr(start, "resolve", lambda model: type("Resolved", (), {"gguf": None})())
    monkeypatch.setattr("sys.argv", ["start", "--rounds", "1", *words])
    start.main()
    assert "| /ready, s |" in capsys.readouterr().out


def test_this_checkout_has_its_own_name() -> None:
    assert [start._name_of(folder) for folder in (Path("/elsewhere/before"), start._HERE)] == ["before", "this checkout"]
