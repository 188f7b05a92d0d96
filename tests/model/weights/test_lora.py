"""Reading PEFT's folders: what is honoured, and what is refused by name before any weight of the base is loaded."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.build import BadConfiguration, build_engine
from engine.core.config import EngineConfig, SchedulerConfig
from engine.engine import Engine
from engine.model import causal_lm
from engine.testing import tiny_module
from engine.weights import lora
from engine.weights.lora import UnusableAdapter, read_adapter
from tests.model.driving import greedy, run
from tests.model.folders import model_folder
from tests.model.lora import write_adapter
from tests.needs import needs_library

FIRST = "base_model.model.model.layers.0.self_attn"
CONFIG = EngineConfig(model="", scheduler=SchedulerConfig(num_slots=2048, max_model_len=256))


def scales(folder, read) -> dict[str, float]:
    """Return the factor of each layer's stored B in the adapter that was read."""
    tensors = load_file(folder / "adapter_model.safetensors")
    return {
        name: float((low.b_OR / tensors[f"base_model.model.{name}.lora_B.weight"]).mean()) for name, low in read.layers.items()
    }


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 6 / 4),
        ({"use_rslora": True}, 6 / math.sqrt(4)),
        ({"alpha_pattern": {"q_proj": 10}}, 10 / 4),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 10, ".*proj": 20}}, 10 / 4),
        ({"alpha_pattern": {".*proj": 20, "q_proj": 10}}, 20 / 4),
        ({"alpha_pattern": {"^q_proj": 10, "proj": 10, "layers.1.self_attn.q_proj": 10}}, 6 / 4),
        ({"alpha_pattern": {"q_proj": 10}, "use_rslora": True}, 10 / math.sqrt(4)),
        ({"r": 8, "rank_pattern": {"(q|v|down)_proj": 4}}, 6 / 4),
        ({"r": 8, "rank_pattern": {"(q|v|down)_proj": 4}, "use_rslora": True}, 6 / 2),
    ],
)
def test_scale_is_pefts(tmp_path, config, expected):
    """A peer reads neither use_rslora nor alpha_pattern, so an adapter has another strength there."""
    folder = write_adapter(tmp_path, rank=4, **config)
    assert scales(folder, read_adapter("a", folder))["model.layers.0.self_attn.q_proj"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "use_dora is not supported"),
        ({"bias": "lora_only"}, "bias 'lora_only'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["experts"]}, "target_parameters"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
        ({"init_lora_weights": "olora"}, "changes the base model"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"new_feature": {"x": 1}}, "new_feature"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"target_modules": ["q_proj", "k_proj"]}, "target module k_proj has no tensors"),
        ({"r": 5}, "do not have rank 5"),
        ({"rank_pattern": {"v_proj": 9}}, "do not have rank 9"),
        ({"r": 0}, "has rank 0"),
        ({"r": None}, "cannot|int"),
        ({"lora_alpha": "x"}, "could not convert"),
        ({"alpha_pattern": {"(": 3}}, "missing|unterminated"),
    ],
)
def test_unhonoured_configuration_is_refused(tmp_path, config, reason):
    with pytest.raises(UnusableAdapter, match=f"^lora a in .*({reason})"):
        read_adapter("a", write_adapter(tmp_path, **config))


def test_neutral_configuration_is_accepted(tmp_path):
    neutral: dict[str, Any] = {
        "use_dora": False,
        "modules_to_save": None,
        "layer_replication": None,
        "init_lora_weights": "gaussian",
    }
    write_adapter(
        tmp_path, **neutral, megatron_core="megatron.core", qalora_group_size=16, lora_dropout=0.1, task_type="CAUSAL_LM"
    )
    assert len(read_adapter("a", tmp_path).layers) == 9


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({f"{FIRST}.q_proj.lora_magnitude_vector": torch.ones(4)}, "DoRA"),
        ({f"{FIRST}.q_proj.lora_B.bias": torch.ones(4)}, "lora_bias"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4)}, "adapted embeddings"),
        ({"base_model.model.lm_head.weight": torch.ones(4, 4)}, "modules_to_save"),
        ({f"{FIRST}.k_proj.lora_A.weight": torch.ones(3, 32)}, "only one of lora_A and lora_B"),
        ({f"{FIRST}.q_proj.lora_B.weight": torch.full((32, 3), math.nan)}, "not finite"),
        ({f"{FIRST}.q_proj.lora_B.weight": torch.ones(32)}, "do not have rank 3"),
    ],
)
def test_unhonoured_tensor_is_refused(tmp_path, tensors, reason):
    with pytest.raises(UnusableAdapter, match=reason):
        read_adapter("a", write_adapter(tmp_path, tensors=tensors))


def test_rank_above_the_bound_is_refused(tmp_path):
    with pytest.raises(UnusableAdapter, match="has rank 513; the limit is 512"):
        read_adapter("a", write_adapter(tmp_path, rank=513))


@pytest.mark.parametrize("content", ["[]", "{", '{"r": 3}', "\xff"])
def test_damaged_configuration_is_refused(tmp_path, content):
    write_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(UnusableAdapter):
        read_adapter("a", tmp_path)


def test_missing_and_pickled_files_are_refused(tmp_path):
    folder = write_adapter(tmp_path / "a")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(UnusableAdapter, match="a pickle, which is never read"):
        read_adapter("a", folder)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(UnusableAdapter, match=r"there is no adapter_model\.safetensors"):
        read_adapter("a", folder)
    (folder / "adapter_model.safetensors").write_bytes(b"none")
    with pytest.raises(UnusableAdapter):
        read_adapter("a", folder)
    save_file({}, folder / "adapter_model.safetensors")
    with pytest.raises(UnusableAdapter, match="no adapted layer"):
        read_adapter("a", folder)
    with pytest.raises(UnusableAdapter, match=r"there is no adapter_config\.json"):
        read_adapter("a", tmp_path / "none")


def pair(name: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
    key = f"base_model.model.{name}"
    return {f"{key}.lora_A.weight": torch.ones(3, columns), f"{key}.lora_B.weight": torch.ones(rows, 3)}


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (pair("model.layers.3.self_attn.q_proj", 32, 32), "has no layer model.layers.3"),
        (pair("model.layers.0.self_attn.qkv_proj", 32, 32), "has no layer"),
        (pair("lm_head", 61, 32), "adapted output layer"),
        (pair("model.layers.0.self_attn.k_proj", 32, 32), "another base"),
        (pair("model.layers.0.self_attn", 32, 32), "no linear layer"),
        (pair("model.embed_tokens", 61, 32), "no linear layer"),
    ],
)
def test_unfit_adapter_is_refused_before_weights(tmp_path, tensors, reason, monkeypatch):
    folder, base = write_adapter(tmp_path / "a", tensors=tensors), model_folder(tmp_path / "base")
    monkeypatch.setattr(causal_lm, "load_module", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(UnusableAdapter, match=f"^lora a: .*{reason}"):
        build_engine(replace(CONFIG, model=str(base), lora=(("a", str(folder)),)))


def test_fp8_target_is_refused(tmp_path):
    with pytest.raises(BadConfiguration, match="not supported in dtype fp8"):
        build_engine(replace(CONFIG, dtype="fp8", lora=(("a", str(tmp_path)),)))


PROMPT = list(range(5, 30))


def built_texts(tmp_path, family: str = "llama", **config: Any) -> tuple[Engine, dict[str | None, list[int]]]:
    """Return an engine with two adapters of other ranks, and a text under each and under none."""
    base = model_folder(tmp_path / "base", tiny_module(family), eos=None)
    folders = {name: write_adapter(tmp_path / name, family, seed, rank=seed) for seed, name in enumerate(("one", "two"), 2)}
    named = tuple((name, str(folder)) for name, folder in folders.items())
    engine = build_engine(replace(CONFIG, model=str(base), lora=named, **config))
    found = run(engine, [replace(greedy(str(name), PROMPT), adapter=name) for name in (None, *folders)]).texts()
    return engine, {name: found[str(name)] for name in (None, *folders)}


def merged_texts(tmp_path, family: str) -> dict[str | None, list[int]]:
    """Return the texts of the merged models, by the stored tensors and PEFT's scale."""
    texts = {}
    for name, rank in ((None, 0), ("one", 2), ("two", 3)):
        module = tiny_module(family)
        for layer, (a_RI, b_OR) in stored_pairs(tmp_path / name).items() if name else ():
            module.get_submodule(layer).weight.data += 6 / rank * (b_OR @ a_RI)
        ids = torch.tensor([PROMPT])
        options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
        out = module.generate(ids, attention_mask=torch.ones_like(ids), **options)
        texts[name] = out[0, len(PROMPT) :].tolist()
    return texts


def stored_pairs(folder) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    tensors = load_file(folder / "adapter_model.safetensors")
    names = {key.removeprefix("base_model.model.").partition(".lora_")[0] for key in tensors}
    return {name: tuple(tensors[f"base_model.model.{name}.lora_{one}.weight"] for one in "AB") for name in names}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_built_engine_has_merged_texts(tmp_path, family):
    """The draft model has the target's own weights, and drafts from the base."""
    options = {"drafter": "model", "draft_model": str(tmp_path / "base"), "draft_dtype": "float32"}
    engine, found = built_texts(tmp_path, family, **options)
    assert engine.info.adapters == ("one", "two")
    assert found == merged_texts(tmp_path, family)


def test_texts_differ_without_scale(tmp_path, monkeypatch):
    """The mutant forgets the scale of each adapter."""
    monkeypatch.setattr(lora, "_low_rank", lambda name, pair, config: lora.LowRank(pair["A"].float(), pair["B"].float()))
    found, expected = built_texts(tmp_path)[1], merged_texts(tmp_path, "llama")
    assert [name for name, ids in found.items() if ids != expected[name]] == ["one", "two"]


@needs_library
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "compact"])
def test_packed_target_has_its_plain_texts(tmp_path, dtype):
    """In a packed format the text is that of plain decoding with the same packed base, and drafts do not change it."""
    plain = built_texts(tmp_path, dtype=dtype)[1]
    options = {"drafter": "model", "draft_model": str(tmp_path / "base"), "draft_dtype": "float32"}
    engine, drafted = built_texts(tmp_path, dtype=dtype, **options)
    assert engine.info.has_same_bits
    assert drafted == plain
    assert len({tuple(ids) for ids in plain.values()}) == 3
