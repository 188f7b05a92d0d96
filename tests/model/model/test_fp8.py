"""Weights of eight-bit floats: the rounding, the layers of a model, and the divergence that they cost."""

import pytest
import torch

from engine.build import BadConfiguration, build_engine
from engine.core.config import EngineConfig
from engine.memory_plan import memory_need
from engine.model.causal_lm import adopt, load_model
from engine.model.fp8 import FORMAT, Fp8Linear, rounded
from engine.model.linear_backends import prepare_linears
from engine.testing import tiny_module
from engine.weights import UnsupportedModel
from tests.model.folders import model_folder
from tests.model.model.test_fused import fused_model, scenes
from tests.model.passes import CPU, node_logits

STEP = 2.0**-4  # largest relative rounding of three bits of mantissa


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_rows_are_rounded_by_their_own_scale(scale):
    """So that a large row does not coarsen a small one. A row of zeros stays one."""
    x = (
        torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1.0, 100.0, 1e-3, 0.0, 1.0])[:, None]
        * scale
    )
    found = rounded(x)
    back = found.numbers_RI.float() * found.scales_R[:, None]
    assert found.numbers_RI.dtype == FORMAT
    assert ((back - x).abs() <= STEP * x.abs() + 1e-2 * x.abs().amax(-1, keepdim=True) * STEP).all()
    assert not back[3].any()
    one_scale = (x / x.abs().max() * 448).to(FORMAT).float() * x.abs().max() / 448
    assert (one_scale[2] - x[2]).norm() > 1.5 * (back[2] - x[2]).norm()


def test_layers_multiply_what_they_round():
    linear = torch.nn.Linear(64, 48)
    layer, x = Fp8Linear(linear), torch.randn(2, 3, 64)
    inputs = rounded(x.flatten(0, -2))
    expected = (inputs.numbers_RI.float() * inputs.scales_R[:, None]) @ layer.dense_weight().T + linear.bias
    assert torch.allclose(layer(x).flatten(0, 1), expected, atol=1e-5)
    assert (layer(x) - linear(x)).norm() < 0.06 * linear(x).norm()


def test_all_layers_but_the_head_are_fp8():
    module = tiny_module("qwen3")
    prepare_linears(module, "fp8")
    kinds = {name: type(part).__name__ for name, part in module.named_modules() if "proj" in name or name == "lm_head"}
    assert kinds.pop("lm_head") == "Linear"
    assert set(kinds.values()) == {"Fp8Linear"}
    model = adopt(tiny_module("qwen3"), CPU, "fp8")
    assert model.attend is None
    batch = node_logits(model, scenes())
    exact = node_logits(adopt(tiny_module("qwen3"), CPU), scenes())
    divergence = torch.cat(
        [(b.log_softmax(-1).exp() * (b.log_softmax(-1) - a.log_softmax(-1))).sum(-1) for a, b in zip(batch, exact)]
    )
    assert 0.0 < divergence.mean() < 0.2


def test_fused_layers_read_eight_bits():
    """They widen weights and keep their inputs, so that they round less than the module's layers."""
    model = fused_model("qwen3")
    from engine.attention.paged.reference import attend
    from engine.model.fused.decoder import FusedDecoder
    from engine.model.fused.reference import TorchOperations

    module = tiny_module("qwen3")
    prepare_linears(module, "fp8")
    before = model.fused
    assert before is not None
    model.fused = FusedDecoder(module, TorchOperations(), attend)
    assert model.fused.weight_bytes < before.weight_bytes
    assert vars(model.fused)["_layers"][0].qkv.rows_OI.dtype == FORMAT
    found, exact = node_logits(model, scenes()), node_logits(adopt(tiny_module("qwen3"), CPU), scenes())
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))
    assert 1e-4 < error < 0.2


def test_a_processor_refuses_eight_bit_floats(tmp_path):
    folder = model_folder(tmp_path)
    with pytest.raises(UnsupportedModel, match="fp8 needs a GPU that multiplies it: cpu is no CUDA device"):
        load_model(folder, "fp8", CPU, "plain")
    assert memory_need(EngineConfig(str(folder), dtype="fp8"), "float32", CPU).weights > 0  # and does not end before


def test_deterministic_is_refused_where_impossible(tmp_path, monkeypatch):
    """Without our library a processor rounds by the width of a pass."""
    folder = str(model_folder(tmp_path))
    monkeypatch.setattr("engine.build.fastest_linears", lambda _: "plain")
    with pytest.raises(BadConfiguration, match="deterministic: on cpu passes of this model round by their width"):
        build_engine(EngineConfig(folder, device="cpu", deterministic=True))


def test_the_library_is_deterministic_already(tmp_path):
    assert build_engine(EngineConfig(str(model_folder(tmp_path)), device="cpu", deterministic=True)).info.has_same_bits
