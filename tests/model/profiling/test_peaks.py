"""The peaks of a roofline: measured over more than caches hold, by products of the model's kind."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.core.types import Peaks
from engine.model.causal_lm import adopt
from engine.model.fp8 import Fp8Linear
from engine.model.linear_backends import PackedLinear
from engine.native.linear import NativeLinear
from engine.profiling import peaks
from engine.profiling.machine import machine_facts
from engine.testing import tiny_engine, tiny_module
from tests.model.driving import greedy, run
from tests.model.native_models import PRECISIONS
from tests.model.passes import CPU
from tests.model.trace.test_step_trace import traced, traces_of
from tests.needs import needs_library


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("count", [1, 64, 100, 1000])
@needs_library
def test_first_outputs_are_the_layers(precision, count):
    """A part of the output head is multiplied to find the peak: it must not read past its blocks."""
    linear = nn.Linear(96, 200).requires_grad_(False)
    weights, x = NativeLinear(linear, precision).weights, torch.randn(3, 96)
    part = weights.first(count)
    assert part.num_outputs == min(200, -(-count // 64) * 64)
    assert len(part.packed) * 64 >= part.num_outputs
    assert torch.equal(part.times(x), weights.times(x)[:, : part.num_outputs])


@pytest.mark.parametrize("kind", ["plain", "packed", "fp8", pytest.param("native", marks=needs_library)])
def test_peaks_are_of_the_models_kind(kind, monkeypatch):
    """A step of eight bits could exceed the peak of float32 products."""
    layers: list[Any] = []
    monkeypatch.setitem(peaks._READ_BYTES, "cpu", 8 << 20)
    most = peaks._most

    def watched(work, device):
        layers.extend(cell.cell_contents for cell in work.run.__closure__)
        return most(work, device)

    monkeypatch.setattr(peaks, "_most", watched)
    model = adopt(tiny_module("llama"), CPU, kind)
    found = peaks.measured_peaks(model)
    assert found is not None
    assert found.bytes_per_s > 1e8
    assert found.operations_per_s > 1e8
    expected = {"plain": nn.Linear, "packed": PackedLinear, "fp8": Fp8Linear}.get(kind)
    assert expected is None or expected in {type(one) for one in layers}
    if model.native is not None:
        assert model.native.parts.head.number in {getattr(one, "number", None) for one in layers}


@pytest.mark.parametrize("error", [MemoryError("none left"), torch.OutOfMemoryError("none left")])
def test_full_memory_leaves_peaks_out(error, monkeypatch, caplog):
    """A server that fits must start: on a GPU its cache may have taken what the copies need."""

    def full(_):
        raise error

    monkeypatch.setattr(peaks, "_reading", full)
    caplog.set_level("INFO")
    assert peaks.measured_peaks(adopt(tiny_module("llama"), CPU)) is None
    assert "peaks are not measured: none left" in caplog.text


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LATEBRANCH_CACHE", str(tmp_path))
    monkeypatch.setitem(peaks._READ_BYTES, "cpu", 8 << 20)
    return tmp_path


def test_later_starts_read_the_peaks(own_cache, monkeypatch):
    """Every start measured them for .28 s, although they are a function of the machine, the library and the kind of weights.

    Another precision has other peaks.
    """
    model = adopt(tiny_module("llama"), CPU)
    found = peaks.cached_peaks(model, "float32")
    monkeypatch.setattr(peaks, "_measured", lambda _: Peaks(1.0, 2.0))
    assert peaks.cached_peaks(adopt(tiny_module("llama"), CPU), "float32") == found
    assert peaks.cached_peaks(model, "bfloat16") == Peaks(1.0, 2.0)
    assert len(list((own_cache / "profiles").iterdir())) == 2


@pytest.mark.parametrize("fact", ["processor", "num_threads"])
def test_peaks_of_another_machine_are_measured(fact, own_cache, monkeypatch):
    """A cache folder can be shared by machines, and the number of threads is a setting."""
    model = adopt(tiny_module("llama"), CPU)
    peaks.cached_peaks(model, "float32")
    facts = machine_facts(CPU)
    monkeypatch.setattr(peaks, "machine_facts", lambda _: facts | {fact: "another"})
    monkeypatch.setattr(peaks, "_measured", lambda _: Peaks(1.0, 2.0))
    assert peaks.cached_peaks(model, "float32") == Peaks(1.0, 2.0)


def test_missing_memory_is_not_cached(own_cache, monkeypatch):
    """The next start may have the memory."""
    model, measured = adopt(tiny_module("llama"), CPU), peaks._measured

    def full(_):
        raise MemoryError("none left")

    monkeypatch.setattr(peaks, "_measured", full)
    assert peaks.cached_peaks(model, "float32") is None
    monkeypatch.setattr(peaks, "_measured", measured)
    assert peaks.cached_peaks(model, "float32") is not None


@pytest.mark.parametrize("seconds", [[5, 4, 3, 2, 1, 1, 1, 1, 1], [1, 5, 5, 5, 5], [3, 3, 3, 1, 3, 3, 3, 3]])
def test_runs_go_on_while_they_get_faster(seconds, monkeypatch):
    """A cached peak is used for long: a busy machine's first runs must not decide it."""
    now_s, runs = [0.0], iter(seconds)
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])

    def run() -> None:
        now_s[0] += next(runs)

    assert peaks._most(peaks._Work(run, 60), CPU) == 60 / min(seconds)
    assert next(runs, None) is None, "no run was missed"


def test_a_step_reports_its_shares():
    """Bytes and operations over the whole step's seconds, of the peaks; without peaks there are no shares."""
    engine = tiny_engine(adopt(tiny_module("llama"), CPU))
    requests = [traced(greedy("one", [5, 9, 33], max_tokens=5))]
    assert {trace.bandwidth_share for trace in traces_of(run(engine, requests), "one")} == {None}
    object.__setattr__(engine.info, "peaks", Peaks(1e9, 1e10))
    session = run(engine, [traced(greedy("two", [5, 9, 33], max_tokens=5))])
    stats = {one.step: one for one in session.stats}
    for trace in traces_of(session, "two"):
        own = stats[trace.row.step]
        assert trace.num_read_bytes == own.num_read_bytes > 0
        assert trace.bandwidth_share == pytest.approx(own.num_read_bytes / own.step_s / 1e9)
        assert trace.compute_share == pytest.approx(own.num_operations / own.step_s / 1e10)
