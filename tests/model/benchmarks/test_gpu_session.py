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
from benchmarks.gpu.models import TINY, counting_model
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
    assert {one["to"] for one in by_part["waits"]} == {"afterwards", "rounds"}
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


@pytest.mark.parametrize("linears", ["plain", "fp8"])
def test_answers_are_known_in_every_format(linears):
    """So that drafts of a known share are right, whatever a format rounds."""
    model = counting_model(TINY, CPU, linears)
    texts = run(tiny_engine(model, None, PlainDecoding()), [greedy("one", [5, 9, 33], max_tokens=9)]).texts()
    assert texts["one"] == [*range(34, 43)]


TINY_RUN = [sys.executable, "-m", "benchmarks.gpu", "session", "--device", "cpu", "--tiny"]


def run_tiny(path: Path, *more: str, script: str = "") -> "subprocess.CompletedProcess[str]":
    """Run a session whose worker first runs a script, which may break what it likes."""
    folder = path.parent / "injected"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(f"import sys\nif '--worker' in sys.orig_argv:\n    {script or 'pass'}\n")
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": f"{folder}:{Path.cwd()}"}
    command = [*TINY_RUN, "--out", str(path.with_suffix("")), *more]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def patched(name: str, body: str) -> str:
    """Return a script that replaces a part of the session, once its module is imported."""
    return f"exec({PATCH!r}.format(name={name!r}, body={body!r}))"


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
            def broken(session):
                {body}
            module._PARTS["{name}"] = broken
        spec.loader.exec_module = load
        return spec
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise ValueError('wrong')", "ValueError: wrong"),
        ("import os; os._exit(7)", "its worker ended with 7"),
        ("import os; os.kill(os.getpid(), 11)", "its worker ended with -11"),
        ("raise MemoryError", "MemoryError: "),
        ("session.end_s = 0.0; session.is_late", session.LATE),
    ],
)
def test_a_broken_part_leaves_the_others(body, reason, tmp_path):
    """It raises, ends its process, or is late. The table has all others, and the status is 0."""
    path = tmp_path / "found.jsonl"
    done = run_tiny(path, "--only", "exact", "pages", "races", script=patched("pages", body))
    assert done.returncode == 0, done.stderr
    ended = {one["name"]: one.get("left_out") for one in figures_of(path) if one["part"] == "ended"}
    assert ended == {"exact": None, "pages": reason, "races": None}
    assert f"left out: {reason}" in done.stdout
    again = run_tiny(path, "--only", "exact", "pages", "races")
    is_open = reason == session.LATE
    assert again.returncode == 0
    assert (f"left out: {reason}" in again.stdout) != is_open
    assert ("pages of 16" in again.stdout) == is_open


def test_a_worker_that_cannot_begin_ends_the_session(tmp_path):
    """Its table is written nevertheless: of what was found before."""
    path = tmp_path / "found.jsonl"
    session._append(path, {"part": "exact", "case": "before", "value": 1.0})
    done = run_tiny(path, "--only", "exact", script="import os; os._exit(3)")
    assert done.returncode == 1
    assert "no part began: its worker ended with 3" in done.stderr
    assert "before" in done.stdout


def test_a_torn_line_is_skipped(tmp_path):
    """A process that dies may leave one. What follows must not be appended to it."""
    path = tmp_path / "found.jsonl"
    path.write_text('{"part": "begun", "name": "exact"}\n{"part": "exa')
    session._append(path, {"part": "ended", "name": "exact"})
    assert session._begun(path) is None
    assert session._open_parts(path, ["exact", "decode"]) == ["decode"]
    assert len(session.read_figures(path)) == 2


def test_late_parts_are_open_in_the_next_session(tmp_path):
    """In this one they have ended, or it would not end."""
    path, only = tmp_path / "found.jsonl", ["exact", "decode", "verify"]
    for figure in ({"name": "exact"}, {"name": "decode", "left_out": session.LATE}, {"name": "verify", "left_out": "it broke"}):
        session._append(path, {"part": "ended", **figure})
    assert session._open_parts(path, only) == []
    session._append(path, {"part": "session"})
    assert session._open_parts(path, only) == ["decode"]


def test_tests_run_without_plugins():
    """A GPU machine lacks pytest-asyncio, whose settings are then unknown."""
    from benchmarks.gpu import session_parts

    source = Path(session_parts.__file__).read_text()
    lenient = ["-o", "addopts=", "-o", "filterwarnings=default"]
    assert json.dumps(lenient) in source
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "tests/gpu/test_fused.py"]
    strict, found = (subprocess.run([*command, *more], capture_output=True, text=True, check=False) for more in ((), lenient))
    assert "Unknown config option: asyncio_mode" in strict.stdout + strict.stderr
    assert found.returncode == 0, found.stdout + found.stderr
