"""The peaks of a roofline: measured over more than caches hold, by products of the model's kind."""

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
from engine.testing import tiny_engine, tiny_module
from tests.model.driving import greedy, run
from tests.model.native_models import PRECISIONS, needs_library
from tests.model.passes import CPU
from tests.model.trace.test_step_trace import traced, traces_of


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
