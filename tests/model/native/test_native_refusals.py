"""Models that the library does not run are named and left to transformers, or refused in int8 and compact."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, OlmoConfig, PreTrainedModel

from engine.audit.reference import load_reference
from engine.build import build_engine
from engine.core.config import EngineConfig
from engine.model.causal_lm import adopt, load_model
from engine.model.linear_backends import NATIVE, fastest_linears
from engine.native import library
from engine.native.decoder import UnknownDecoder, refuse_by_structure
from engine.native.linear import QUANTISED
from engine.testing import tiny_module
from engine.weights import UnsupportedModel
from tests.conformance.folder import served_folder
from tests.model.native_models import KNOWN, PRECISIONS, alone, native
from tests.model.passes import CPU
from tests.needs import needs_library

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.skipif(shutil.which("g++") is None or not library.supported(), reason="needs g++ and a processor with AVX2")
@pytest.mark.parametrize("instructions", library.INSTRUCTION_SETS)
def test_the_library_was_compiled(instructions):
    """An optional extension that fails to compile is left out in silence: `make install` builds it."""
    assert library.is_compiled(instructions), "for every set, those too that this processor has not"
    if instructions in library.supported():
        assert library.compiled_for(instructions)
    assert library.is_available()


@needs_library
@pytest.mark.parametrize("precision", PRECISIONS)
def test_native_engine_never_rounds_by_width(precision, tmp_path):
    folder = served_folder(tmp_path)
    engine = build_engine(EngineConfig(str(folder), drafter="none", dtype=precision, device="cpu"))
    assert engine.info.has_same_bits
    assert not engine.info.rounds_by_width
    assert load_reference(folder, precision, "cpu").dtype == (precision if precision in QUANTISED else "float32")


def test_torch_engine_rounds_by_width_in_bfloat16(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "is_available", lambda: False)
    folder = served_folder(tmp_path)
    info = build_engine(EngineConfig(str(folder), drafter="none", dtype="bfloat16", device="cpu")).info
    assert info.rounds_by_width
    assert not info.has_same_bits
    assert load_reference(folder, "bfloat16", "cpu").dtype == "bfloat16"


def other_family() -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(OlmoConfig(**SIZES))


def with_activation() -> PreTrainedModel:
    module = tiny_module("llama")
    module.model.layers[1].mlp.act_fn = nn.GELU()
    return module


def with_norm() -> PreTrainedModel:
    module = tiny_module("llama")
    module.model.layers[1].input_layernorm = nn.LayerNorm(32)
    return module


def with_rotation() -> PreTrainedModel:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, max_position_embeddings=64, rope_parameters=rope))


def with_odd_heads() -> PreTrainedModel:
    module = tiny_module("llama")
    module.model.layers[2].self_attn.head_dim = 7
    return module


def with_capped_scores() -> PreTrainedModel:
    module = tiny_module("gemma3")
    module.config.final_logit_softcapping = 30.0
    return module


UNKNOWN = {
    other_family: "OlmoDecoderLayer.* is not a known part",
    with_activation: "GELU is not a known part",
    with_norm: "LayerNorm is not a known part",
    with_rotation: "rotary embeddings of type dynamic are not known",
    with_odd_heads: "the head size 7 is odd",
    with_capped_scores: "final_logit_softcapping is not known",
}


@pytest.mark.parametrize(("make", "why"), UNKNOWN.items())
def test_unsupported_part_is_named_before_any_change(make, why):
    module = make()
    before = [type(part) for part in module.modules()]
    with pytest.raises(UnknownDecoder, match=why):
        adopt(module, CPU, NATIVE, "float32")
    assert [type(part) for part in module.modules()] == before


def test_unsupported_decoder_is_named():
    body = tiny_module("llama").model
    with pytest.raises(UnknownDecoder, match="LlamaModel lacks the parts of a decoder"):
        refuse_by_structure(body)


@pytest.mark.parametrize("family", KNOWN)
def test_the_known_ones_are_known(family):
    refuse_by_structure(tiny_module(family))


@needs_library
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [other_family, with_rotation])
def test_unsupported_models_use_transformers_except_integer_weights(make, stored, tmp_path):
    make().to(stored).save_pretrained(tmp_path)
    for precision in ("float32", "bfloat16"):
        loaded = load_model(tmp_path, precision, CPU, NATIVE)
        assert loaded.native is None
        assert loaded.module.dtype == getattr(torch, precision)
    for precision in QUANTISED:
        with pytest.raises(UnsupportedModel, match=f"{precision}: .* known"):
            load_model(tmp_path, precision, CPU, NATIVE)


@pytest.mark.parametrize("precision", QUANTISED)
def test_integers_without_the_library_are_refused(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tiny_module("qwen2").save_pretrained(tmp_path)
    monkeypatch.setattr(library, "is_available", lambda: False)
    with pytest.raises(UnsupportedModel, match=f"{precision} needs the compiled library"):
        load_model(tmp_path, precision, CPU, fastest_linears(CPU))
    assert load_model(tmp_path, "float32", CPU, fastest_linears(CPU)).native is None


@needs_library
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", KNOWN)
def test_a_model_is_loaded_from_a_folder(family, precision, tmp_path):
    tiny_module(family).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, precision, CPU, fastest_linears(CPU))
    assert loaded.native is not None
    assert loaded.max_positions == 512
    if (family, precision) != ("gemma3", "bfloat16"):  # whose factor of embeddings is then rounded too
        assert torch.equal(alone(loaded, [4, 5, 6]), alone(native(family, precision), [4, 5, 6]))
