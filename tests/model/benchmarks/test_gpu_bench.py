"""benchmarks/gpu on a processor: every part runs and writes its figures, and a wrong text or kernel is an exit status of 1."""

import json
import sys
from collections import Counter

import pytest
import torch

from benchmarks.gpu import __main__ as bench
from benchmarks.gpu import kernel, texts
from benchmarks.gpu.figures import Figures, in_turns
from benchmarks.gpu.models import TINY
from engine.attention.packing import pack
from engine.attention.paged import graphs as recordings
from engine.attention.paged import table
from engine.attention.paged.reference import attend
from tests.model.paged import causal, needs_triton
from tests.model.passes import CPU


@pytest.fixture
def figures(tmp_path):
    found = Figures(tmp_path / "figures.jsonl", limit_s=1000.0)
    yield found
    found.close()


def run_bench(tmp_path, monkeypatch, *more):
    """Return the exit status, the figures and the summary of a run."""
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--tiny", "--turns", "2", "--out", str(tmp_path / "gpu"), *more])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    lines = (tmp_path / "gpu.jsonl").read_text().splitlines()
    return ended.value.code, [*map(json.loads, lines)], (tmp_path / "gpu.md").read_text()


def test_every_part_writes_its_figures(tmp_path, monkeypatch):
    status, found, text = run_bench(tmp_path, monkeypatch)
    assert not status
    parts = Counter(figure["part"] for figure in found)
    assert parts["texts"] == 4
    assert parts["pass"] == 4
    assert parts["attention"] == parts["machine"] == parts["end"] == 1
    assert all(figure["wrong"] == figure["different"] == 0 for figure in found if figure["part"] == "texts")
    assert sum(figure["accepted"] for figure in found if figure["part"] == "texts") > 50
    timed = next(figure for figure in found if figure["part"] == "pass")
    assert timed["gather"]["ratio"] == 1.0
    assert timed["padded"]["median_ms"] > 0.0
    assert "| tiny | torch.float32 | trees, padded |" in text


def test_skipped_measurements_are_reported(tmp_path, monkeypatch):
    _, found, text = run_bench(tmp_path, monkeypatch, "--minutes", "0")
    assert [figure["part"] for figure in found if "are over" in figure.get("left_out", "")] == ["attention", "pass"]
    assert "pass: left out" in text


def test_wrong_sequence_is_detected(figures, monkeypatch):
    table_of = table.table_of

    def causally(batch, *rest):
        return table_of(pack([*map(causal, batch.segments)], batch.device), *rest)

    monkeypatch.setattr(recordings, "table_of", causally)
    assert not texts.check(figures, TINY, torch.float32, CPU, 16)
    wrong = {figure["way"]: figure["wrong"] for figure in figures.of("texts")}
    assert wrong["plain"] == wrong["trees"] == 0
    assert wrong["trees, padded"] > 0


@needs_triton
def test_a_wrong_kernel_is_found(figures, monkeypatch):
    monkeypatch.setattr(kernel, "kernel", lambda: lambda *given: attend(*given) * 1.001)
    assert not kernel.check(figures, kernel.TINY_LAYERS[:1], CPU, (0, 40))
    monkeypatch.setattr(kernel, "kernel", lambda: attend)
    assert kernel.check(figures, kernel.TINY_LAYERS[:1], CPU, (0, 40))


def test_missing_package_skips_the_completions_check(figures, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named 'msgspec' ({name})", name="msgspec")

    monkeypatch.setattr("importlib.import_module", missing)
    assert bench._check_texts(figures, CPU, is_tiny=True)
    assert figures.of("texts") == [{"part": "texts", "left_out": "msgspec is not installed"}]


def test_ratios_are_to_first_of_same_turn(monkeypatch):
    """The second turn is slow for all contenders. The warm-up is not counted."""
    seconds = iter([99.0, 99.0, 99.0, 99.0, 1.0, 2.0, 10.0, 40.0])
    monkeypatch.setattr("benchmarks.gpu.figures._timed", lambda run, device: next(seconds))
    times = in_turns({"first": int, "second": int}, 2, CPU)
    assert times["first"].ratio == 1.0
    assert times["second"].ratio == 3.0
    assert times["second"].median_ms == 21.0
