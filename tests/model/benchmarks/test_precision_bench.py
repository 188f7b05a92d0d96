"""benchmarks/precision: distances from float32 of every format, a GPU's among them."""

from pathlib import Path

import pytest

from benchmarks import precision
from engine.model.fp8 import Fp8Linear
from engine.testing import tiny_module
from tests.model.folders import model_folder
from tests.needs import needs_library

PROMPTS = Path("configs/bench_prompts.yaml")


@needs_library
def test_formats_of_a_gpu_have_rows(tmp_path):
    """A processor refuses fp8, so that its rounding must be emulated."""
    found = {one.precision: one for one in precision.differences(str(model_folder(tmp_path)), PROMPTS, 1, 4)}
    assert [*found] == ["float32", "bfloat16", "int8", "compact", "GPU bfloat16", "GPU fp8"]
    assert found["float32"].divergence == 0.0
    assert 0.0 < found["GPU bfloat16"].divergence < found["GPU fp8"].divergence < 1.0
    assert len({one.num_rows for one in found.values()}) == 1


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_known_families_round_as_fused(family, tmp_path):
    """Layers of other families are the module's, which round the inputs of eight-bit layers too."""
    model = precision.of_gpu(model_folder(tmp_path, tiny_module(family)), "fp8")
    assert (model.fused is not None) == (family != "gemma3")
    assert model.precision == "bfloat16"
    assert any(isinstance(layer, Fp8Linear) for layer in model.module.modules())
