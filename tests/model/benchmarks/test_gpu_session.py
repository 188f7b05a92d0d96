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
    assert {one["to"] for one in by_part["decode"]} == {"floor", "transformers"}
    assert next(one["value"] for one in by_part["exact"] if one["case"] == "right answers") == 1.0
    assert all(one["value"] > 0 for one in by_part["policy"])
    assert (tmp_path / "found.md").read_text() in done.stdout
    again = subprocess.run([*command, "--only", *parts], env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0
    assert figures_of(tmp_path / "found.jsonl") == found


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
