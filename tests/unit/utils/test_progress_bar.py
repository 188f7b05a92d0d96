"""Progress in a terminal and in a log."""

import contextlib
import io
import os
import pty
import subprocess
import sys

import pytest

from engine.utils import progress_bar as module
from engine.utils.progress_bar import progress_bar

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


def test_a_terminal_gets_a_bar_that_is_redrawn() -> None:
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", WORK], stderr=theirs, check=True)
    os.close(theirs)
    seen = ""
    with contextlib.suppress(OSError):  # what a terminal says when nobody writes to it any more
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

    assert num_lines() <= 5  # the first, one each ten of thirty seconds, the last
    monkeypatch.setattr(module, "LOG_INTERVAL_S", 0.1)
    assert num_lines() > 100


def test_it_can_be_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(what="texts", total=2, unit="text", is_shown=False) as bar:
        bar.update(2)
    assert capsys.readouterr().err == ""
