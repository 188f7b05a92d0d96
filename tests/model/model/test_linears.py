"""Prepacked linear layers compute the same function."""

import weakref

import pytest
import torch
from torch import nn

from engine.model import linear_backends
from engine.model.linear_backends import NATIVE, PackedLinear, fastest_linears, fastest_precision, prepare_linears
from engine.native import library
from engine.testing import FAMILIES, tiny_module

IDS = torch.arange(3, 40)[None]
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")


@torch.inference_mode()
def logits_error(packed: nn.Module, plain: nn.Module) -> float:
    return float((packed(input_ids=IDS).logits - plain(input_ids=IDS).logits).abs().max())


@needs_onednn
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_is_plain_up_to_rounding(family):
    module = tiny_module(family)
    num_linears = sum(type(part) is nn.Linear for part in module.modules())
    prepare_linears(module, "packed")
    assert sum(isinstance(part, PackedLinear) for part in module.modules()) == num_linears > 10
    assert logits_error(module, tiny_module(family)) < 1e-4


@needs_onednn
def test_packed_layer_detects_forgotten_bias():
    module = tiny_module("qwen2")
    prepare_linears(module, "packed")
    for part in module.modules():
        if isinstance(part, PackedLinear):
            part.bias = None  # type: ignore[assignment]
    assert logits_error(module, tiny_module("qwen2")) > 1e-2


def test_plain_changes_nothing():
    module = tiny_module("llama")
    before = [type(part) for part in module.modules()]
    prepare_linears(module, "plain")
    assert [type(part) for part in module.modules()] == before


def test_layer_is_freed_when_replaced(monkeypatch):
    """The bug: they all stayed until the last one was packed, and a model was in memory twice."""
    layers: list[weakref.ref[nn.Linear]] = []
    most_alive = 0

    def replaced(linear: nn.Linear, _: str) -> nn.Module:
        nonlocal most_alive
        layers.append(weakref.ref(linear))
        most_alive = max(most_alive, sum(layer() is not None for layer in layers))
        return nn.Identity()

    monkeypatch.setitem(linear_backends._KINDS, "replaced", replaced)
    prepare_linears(tiny_module("llama"), "replaced")
    assert len(layers) > 10
    assert most_alive == 1


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match="known: plain, packed"):
        prepare_linears(tiny_module("llama"), "quantised")


@needs_onednn
@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_single_bfloat16_row_is_multiplied_like_others(num_rows):
    if not linear_backends._packs(torch.bfloat16):
        pytest.skip("oneDNN refuses bfloat16 on this processor")
    linear = nn.Linear(48, 40).bfloat16().requires_grad_(False)
    x = torch.randn(num_rows, 1, 48).bfloat16()
    assert PackedLinear(linear)(x).shape == (num_rows, 1, 40)
    assert torch.allclose(PackedLinear(linear)(x).float(), linear(x).float(), atol=2e-2)


@needs_onednn
@pytest.mark.parametrize("takes_it", [True, False])
def test_format_refused_by_onednn_runs_in_torch(monkeypatch, takes_it):
    """oneDNN refuses bfloat16 on processors with AVX2 alone, although it reports support."""
    monkeypatch.setattr(linear_backends, "_packs", lambda dtype: takes_it)
    module = tiny_module("llama")
    prepare_linears(module, "packed")
    assert any(isinstance(part, PackedLinear) for part in module.modules()) is takes_it


CPU, CARD = torch.device("cpu"), torch.device("cuda")


def test_library_beside_torch_narrows_float32_if_faster(monkeypatch):
    monkeypatch.setattr(library, "is_available", lambda: False)
    assert fastest_precision(CPU, torch.float16) == "float16"
    assert fastest_precision(CARD, torch.float32) == "float32"
    assert fastest_precision(CPU, torch.float32) in ("bfloat16", "float32")
    assert fastest_linears(CPU) in ("packed", "plain")


def test_library_drafters_use_8_bits_unlike_cards(monkeypatch):
    monkeypatch.setattr(library, "is_available", lambda: True)
    assert [fastest_precision(CPU, dtype) for dtype in (torch.float32, torch.bfloat16)] == ["int8", "int8"]
    assert fastest_linears(CPU) == NATIVE
    assert fastest_precision(CARD, torch.bfloat16) == "bfloat16"
    assert fastest_linears(CARD) == "plain"
