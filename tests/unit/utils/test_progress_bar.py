"""Progress in a terminal and in a log."""

import contextlib
import io
import os
import pty
import subprocess
import sys
import time

import pytest

from engine.utils import progress_bar as module
from engine.utils.progress_bar import long_work, progress_bar

WORK = """
from engine.utils.progress_bar import progress_bar
for _ in progress_bar(range(3), what="texts", total=3, unit="text"):
    pass
"""


def test_a_log_gets_lines_without_control_characters() -> None:
    done = subprocess.run([sys.executable, "-c", WORK], capture_output=True, text=True, check=True)
    first, *_, last = done.stderr.splitlines()
    assert first.startswith("texts: 0 of 3 text (0%)")
    assert last.startswith("texts: 3 of 3 text (100%)")
    assert all(one.isprintable() for one in done.stderr.splitlines())
    assert done.stdout == ""


def test_terminal_gets_a_redrawn_bar() -> None:
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", WORK], stderr=theirs, check=True)
    os.close(theirs)
    seen = ""
    with contextlib.suppress(OSError):  # a terminal raises it after its other end is closed
        while more := os.read(ours, 65536):
            seen += more.decode()
    os.close(ours)
    assert seen.count("\r") > 1
    assert "100%|" in seen


def test_a_log_is_not_flooded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with an interval as short as a terminal's, which is the mutant."""

    def num_lines() -> int:
        log = io.StringIO()
        monkeypatch.setattr(sys, "stderr", log)
        now_s = [0.0]
        bar = progress_bar(what="steps", total=1000, unit="step")
        monkeypatch.setattr(bar, "_time", lambda: now_s[0])
        bar.start_t = bar.last_print_t = 0.0
        for _ in range(1000):
            now_s[0] += 0.03
            bar.update()
        bar.close()
        return log.getvalue().count("\n")

    assert num_lines() <= 8  # the first, one each five of thirty seconds, the last
    monkeypatch.setattr(module, "LOG_INTERVAL_S", 0.1)
    assert num_lines() > 100


def log_of(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return what is written to stderr from now on, with an interval of a twentieth of a second."""
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setattr(module, "LONG_INTERVAL_S", 0.05)
    return log


def until(log: io.StringIO, words: str) -> None:
    end_s = time.monotonic() + 20
    while words not in log.getvalue() and time.monotonic() < end_s:
        time.sleep(0.01)
    assert words in log.getvalue()


def test_long_work_repeats_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of(monkeypatch)
    with long_work("packing"):
        assert log.getvalue() == "packing\n"
        until(log, "packing (0 s so far)")
    num_lines = len(log.getvalue().splitlines())
    time.sleep(0.2)
    assert len(log.getvalue().splitlines()) == num_lines


def test_silent_loading_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: between packing and measuring a loaded machine wrote nothing for twenty seconds."""
    log = log_of(monkeypatch)
    with long_work("loading", is_announced=False):
        assert log.getvalue() == ""
        until(log, "loading (0 s so far)")


def test_inner_work_is_written_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two works at a time would write twice as many lines, and the outer one reports less."""
    log = log_of(monkeypatch)
    with long_work("loading", is_announced=False), long_work("packing"):
        until(log, "packing (0 s so far)")
        time.sleep(0.3)
        written = log.getvalue()  # when the inner work ends, the outer one may write
    assert "loading" not in written


def test_a_bar_is_written_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of(monkeypatch)
    with long_work("loading", is_announced=False), progress_bar(what="measuring", total=2, unit="step"):
        time.sleep(0.3)
    assert "loading" not in log.getvalue()


def test_progress_bar_can_be_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(what="texts", total=2, unit="text", is_shown=False) as bar:
        bar.update(2)
    assert capsys.readouterr().err == ""
