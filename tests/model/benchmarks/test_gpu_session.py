"""benchmarks/gpu session on a processor: every part writes its figures, and a session goes on where it was cut off."""

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import session
from benchmarks.gpu.figures import read_figures
from benchmarks.gpu.models import TINY, counting_model
from benchmarks.gpu.session_parts import LENIENT
from engine.core.policy import PlainDecoding
from engine.testing import tiny_engine
from tests.model.driving import greedy, run
from tests.model.passes import CPU


def figures_of(path: Path) -> list[dict[str, Any]]:
    return [*map(json.loads, path.read_text().splitlines())]


def test_a_tiny_session_writes_every_part(tmp_path):
    """All but the tests, which are skipped without a GPU."""
    parts = [name for name in session.PARTS if name != "tests"]
    command = [sys.executable, "-m", "benchmarks.gpu", "session", "--device", "cpu", "--tiny", "--out", str(tmp_path / "found")]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([*command, "--only", *parts], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = figures_of(tmp_path / "found.jsonl")
    ended = {one["name"]: one.get("left_out") for one in found if one["part"] == "ended"}
    assert ended == dict.fromkeys(parts)
    by_part = {name: [one for one in found if one["part"] == name and "case" in one] for name in parts}
    assert {name for name, figures in by_part.items() if not figures} == {"races"}
    assert {one["to"] for one in by_part["decode"] if "to" in one} == {"floor", "transformers"}
    assert next(one["value"] for one in by_part["exact"] if one["case"] == "right answers") == 1.0
    assert all(one["value"] > 0 for one in by_part["policy"])
    assert {one["to"] for one in by_part["pages"]} == {"pages of 16", "in order", "no table"}
    assert {one["to"] for one in by_part["waits"]} == {"afterwards", "rounds", "trees first"}
    assert {one["case"] for one in by_part["decode"]} >= {"peak of bytes", "peak of operations"}
    assert (tmp_path / "found.md").read_text() in done.stdout
    again = subprocess.run([*command, "--only", *parts], env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0
    assert figures_of(tmp_path / "found.jsonl") == [*found, {"part": "session"}]


def test_a_worker_that_dies_costs_one_part(tmp_path, monkeypatch):
    """The part has failed, and another worker begins with the next."""
    path, runs = tmp_path / "found.jsonl", iter([["exact", "decode"], ["verify", "where"]])
    args = Namespace(minutes=1.0, only=["exact", "decode", "verify", "where"], out=tmp_path / "found", device="cpu", tiny=True)

    class Worker:
        """Ends one part and dies in the next."""

        returncode = -11

        def __init__(self, command):
            done, dying = next(runs)
            assert session._open_parts(path, args.only)[:2] == [done, dying]
            for figure in ({"part": "begun", "name": done}, {"part": "ended", "name": done}, {"part": "begun", "name": dying}):
                session._append(path, figure)

        def poll(self):
            return self.returncode

        def kill(self):
            pass

    monkeypatch.setattr(subprocess, "Popen", Worker)
    session._supervise(path, args)
    ended = {one["name"]: one.get("left_out") for one in figures_of(path) if one["part"] == "ended"}
    died = "its worker ended with -11"
    assert ended == {"exact": None, "decode": died, "verify": None, "where": died}
    assert session._open_parts(path, args.only) == []
    session._append(path, {"part": "again", "name": "verify"})
    assert session._open_parts(path, args.only) == ["verify"]


def test_a_part_that_hangs_is_ended(tmp_path, monkeypatch):
    path = tmp_path / "found.jsonl"
    monkeypatch.setattr(session, "_GRACE_S", 0.5)
    monkeypatch.setattr(session, "PARTS", {"verify": 0.1})
    session._append(path, {"part": "begun", "name": "verify"})
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    assert session._watched(worker, path, time.monotonic() + 50) == "it took too long"
    assert worker.returncode


def test_parts_cut_by_the_end_go_on(tmp_path, monkeypatch):
    """The bug: a part that was ended with its session counted as too long, and the next session left it out."""
    path = tmp_path / "found.jsonl"
    monkeypatch.setattr(session, "_GRACE_S", 0.5)
    session._append(path, {"part": "begun", "name": "verify"})
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    session._append(path, {"part": "ended", "name": "verify", "left_out": session._watched(worker, path, time.monotonic() + 0.1)})
    session._append(path, {"part": "session"})
    assert session._open_parts(path, ["verify"]) == ["verify"]


@pytest.mark.parametrize("linears", ["plain", "fp8"])
def test_answers_are_known_in_every_format(linears):
    """So that drafts of a known share are right, whatever a format rounds."""
    model = counting_model(TINY, CPU, linears)
    texts = run(tiny_engine(model, None, PlainDecoding()), [greedy("one", [5, 9, 33], max_tokens=9)]).texts()
    assert texts["one"] == [*range(34, 43)]


PATCH = """
import importlib.abc, importlib.util, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname != "benchmarks.gpu.session_parts":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        made = spec.loader.exec_module
        def load(module):
            made(module)
            for name, body in {bodies!r}.items():
                exec("def broken(session): " + body, vars(module))
                module._PARTS[name] = module.broken
        spec.loader.exec_module = load
        return spec
sys.meta_path.insert(0, Finder())
"""
BROKEN = {  # parts that fail, and the reasons that are written
    "exact": ("raise ValueError('wrong')", "ValueError: wrong"),
    "waits": ("import os; os._exit(7)", "its worker ended with 7"),
    "pages": ("session.end_s = 0.0; session.is_late", session.LATE),
    "fused": ("import os; os.kill(os.getpid(), 11)", "its worker ended with -11"),
}


def test_broken_parts_leave_the_others(tmp_path, monkeypatch, capsys):
    """They raise, end their process or are late. The table has all others; in the next session the late one goes on."""
    path, parts = tmp_path / "found.jsonl", [*BROKEN, "races"]
    (tmp_path / "sitecustomize.py").write_text(PATCH.format(bodies={name: body for name, (body, _) in BROKEN.items()}))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    command = ["--device", "cpu", "--tiny", "--out", str(tmp_path / "found"), "--only", *parts]
    session.main(command)
    ended = {one["name"]: one.get("left_out") for one in figures_of(path) if one["part"] == "ended"}
    assert ended == {**{name: reason for name, (_, reason) in BROKEN.items()}, "races": None}
    text = capsys.readouterr().out
    assert all(f"left out: {reason}" in text for reason in ended.values() if reason)
    (tmp_path / "sitecustomize.py").unlink()
    session.main(command)
    text = capsys.readouterr().out
    assert "pages of 16" in text
    assert f"left out: {session.LATE}" not in text
    assert "left out: ValueError: wrong" in text


def test_a_session_without_workers_ends(tmp_path, monkeypatch, capsys):
    """Its table is written nevertheless, of what was found before."""
    session._append(tmp_path / "found.jsonl", {"part": "exact", "case": "before", "value": 1.0})
    started, popen = [], subprocess.Popen

    def failing(command):
        started.append(command)
        return popen([sys.executable, "-c", "raise SystemExit(3)"])

    monkeypatch.setattr(subprocess, "Popen", failing)
    with pytest.raises(SystemExit, match="no part began: its worker ended with 3"):
        session.main(["--device", "cpu", "--tiny", "--out", str(tmp_path / "found"), "--only", "exact"])
    assert len(started) == 1
    assert "before" in capsys.readouterr().out


def test_missing_packages_are_named_together(tmp_path, monkeypatch):
    """With the command that collects packages for this Python."""
    monkeypatch.setattr(session, "NEEDED", ("torch", "no_such_package", "nor_this"))
    version = f"{sys.version_info.major}[.]{sys.version_info.minor}"
    with pytest.raises(SystemExit, match=rf"missing: no_such_package, nor_this; .*\n.*--python-version {version} .*msgspec"):
        session.main(["--device", "cpu", "--tiny", "--out", str(tmp_path / "found")])


def test_a_torn_line_is_skipped(tmp_path):
    """A process that dies may leave one. What follows must not be appended to it."""
    path = tmp_path / "found.jsonl"
    path.write_text('{"part": "begun", "name": "exact"}\n{"part": "exa')
    session._append(path, {"part": "ended", "name": "exact"})
    assert session._begun(path) is None
    assert session._open_parts(path, ["exact", "decode"]) == ["decode"]
    assert len(read_figures(path)) == 2


def test_late_parts_are_open_again_later(tmp_path):
    """In this one they have ended, or it would not end."""
    path, only = tmp_path / "found.jsonl", ["exact", "decode", "verify"]
    for figure in ({"name": "exact"}, {"name": "decode", "left_out": session.LATE}, {"name": "verify", "left_out": "it broke"}):
        session._append(path, {"part": "ended", **figure})
    assert session._open_parts(path, only) == []
    session._append(path, {"part": "session"})
    assert session._open_parts(path, only) == ["decode"]


@pytest.mark.slow
def test_device_tests_start_without_plugins():
    """A GPU machine lacks pytest-asyncio, whose settings are then unknown, which strict configurations refuse."""
    given = ["-p", "no:cacheprovider", "-p", "no:asyncio", *LENIENT, "tests/gpu/test_fused.py"]
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *given], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
