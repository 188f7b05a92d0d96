"""The memory that is computed before loading equals that of the loaded engine. What does not fit is refused by parts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from engine import build
from engine import memory_plan as memory
from engine.build import BadConfiguration, build_engine
from engine.core.config import EngineConfig, SchedulerConfig
from engine.core.tree import Expansion
from engine.draft.models.head_drafter import HeadDrafter
from engine.draft.models.native_head import NativeHead
from engine.draft.text_and_model import CombinedDrafter
from engine.memory_plan import Memory, memory_need, shortage
from engine.native import library
from engine.native.linear import QUANTISED
from engine.testing import tiny_module
from engine.weights.weight_headers import num_parameters
from tests.conformance.folder import served_folder
from tests.model.heads import random_head
from tests.needs import needs_library

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = str(served_folder(tmp_path_factory.mktemp("memory")))
    limits = SchedulerConfig(num_slots=256, max_model_len=128, max_step_tokens=64, max_running=8)
    return EngineConfig(folder, drafter="model", draft_model=folder, draft_dtype="float32", device="cpu", scheduler=limits)


def test_weights_and_caches_use_computed_memory(config):
    need = memory_need(config, "float32", CPU)
    engine = build_engine(config)
    assert not engine.target.model.module.config.tie_word_embeddings
    assert need.weights == need.draft_weights == num_parameters(Path(config.model)) * 4
    assert need.cache == need.draft_cache == engine.target.cache.num_bytes


@pytest.mark.parametrize(
    ("precision", "is_tied", "bytes_of_others", "bytes_of_head"),
    [
        ("float32", True, 4, 4),
        ("float32", False, 4, 0),
        ("bfloat16", True, 2, 2),
        ("bfloat16", False, 2, 0),
    ],
)
def test_library_keeps_embeddings_and_a_tied_head(precision, is_tied, bytes_of_others, bytes_of_head, tmp_path, monkeypatch):
    """Embeddings are float32; where weights are integers more is needed to load a model than to keep it."""
    config = LlamaConfig(**{**tiny_module().config.to_dict(), "tie_word_embeddings": is_tied})
    module = AutoModelForCausalLM.from_config(config)
    module.save_pretrained(folder := served_folder(tmp_path))
    embeddings, count = 61 * 32, module.num_parameters()
    plain = EngineConfig(str(folder), drafter="none", dtype=precision)
    monkeypatch.setattr(library, "is_available", lambda: True)
    kept_as_int8 = (count if is_tied else count - embeddings) + 4 * embeddings
    kept = (count - embeddings) * bytes_of_others + embeddings * (4 + bytes_of_head)
    assert memory_need(plain, "float32", CPU).weights == kept
    for dtype in QUANTISED:
        assert memory_need(replace(plain, dtype=dtype), "float32", CPU).weights == count * 4
    module.bfloat16().save_pretrained(folder)
    assert memory_need(replace(plain, dtype="int8"), "float32", CPU).weights == max(2 * count, kept_as_int8)
    monkeypatch.setattr(library, "is_available", lambda: False)
    assert memory_need(plain, "float32", CPU).weights == count * bytes_of_others


def test_weights_stored_twice_are_counted_once(tmp_path):
    parts = {"a.safetensors": {"x": torch.zeros(6)}, "b.safetensors": {"y": torch.zeros(4)}}
    for name, tensors in {**parts, "consolidated.safetensors": {"x": torch.zeros(6), "y": torch.zeros(4)}}.items():
        save_file(tensors, tmp_path / name)
    assert num_parameters(tmp_path) == 20
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert num_parameters(tmp_path) == 10
    save_file({"x": torch.zeros(7)}, tmp_path / "model.safetensors")
    assert num_parameters(tmp_path) == 7


@pytest.mark.parametrize(
    "changed",
    [
        {"scheduler": SchedulerConfig(num_slots=256, max_model_len=256, max_step_tokens=64, max_running=8)},
        {"scheduler": SchedulerConfig(num_slots=256, max_model_len=128, max_step_tokens=128, max_running=8)},
    ],
    ids=["longer texts", "larger steps"],
)
def test_a_step_needs_more_for(config, changed):
    assert memory_need(replace(config, **changed), "float32", CPU).step > memory_need(config, "float32", CPU).step


def test_step_has_room_for_any_tree(config):
    """There was room for the configured tree's nodes alone, and the policy and requests draft larger ones."""
    trees = (Expansion(1, 1, 0), Expansion(8, 4, 8))
    few, many = (memory_need(replace(config, expansion=tree), "float32", CPU).step for tree in trees)
    assert few == many


def test_oversized_model_is_refused_before_load(config, monkeypatch):
    need = memory_need(config, "float32", CPU)
    monkeypatch.setattr(build, "load_model", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr(memory, "memory_of", lambda _: Memory(need.total - 1, need.total - 1))
    with pytest.raises(BadConfiguration, match=r"GB are needed \(weights .* drafter's weights .* drafter's cache .* a step"):
        build_engine(config)


def test_memory_in_use_is_short_on_cards(config, monkeypatch):
    need = memory_need(config, "float32", CPU)
    monkeypatch.setattr(memory, "memory_of", lambda _: Memory(need.total, need.total - 1))
    assert shortage(need, CPU) is None
    assert shortage(need, torch.device("cuda")) is not None


def test_container_has_only_its_limit(tmp_path: Path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_CGROUP_LIMIT", limit)
    whole = memory.memory_of(CPU)
    limit.write_text("1000\n")
    assert memory.memory_of(CPU) == Memory(1000, 1000)
    limit.write_text("max\n")
    assert memory.memory_of(CPU).total == whole.total


@needs_library
@pytest.mark.parametrize("dtype", QUANTISED)
def test_rounded_inputs_halve_keys_and_values(config, dtype):
    config = replace(config, drafter="none", draft_model=None, dtype=dtype)
    assert memory_need(config, "int8", CPU).cache == build_engine(config).target.cache.num_bytes
    assert memory_need(config, "int8", CPU).cache * 2 == memory_need(replace(config, dtype="float32"), "float32", CPU).cache


@needs_library
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_head_keeps_its_states_and_feature_inputs(precision, config, tmp_path):
    random_head().save(tmp_path / "head", {})
    config = replace(config, drafter="head", draft_model=None, head=str(tmp_path / "head"), draft_dtype=precision)
    combined = build_engine(config).drafter
    assert isinstance(combined, CombinedDrafter)
    drafter = combined.model
    assert isinstance(drafter, HeadDrafter)
    assert isinstance(drafter._head, NativeHead)
    num_slots = config.scheduler.num_slots + 1
    pools = (drafter._pool, drafter._head._states)  # a row more each: the state before all positions
    of_pools = sum(pool.rows_SW[:num_slots].nbytes for pool in pools)
    assert memory_need(config, precision, CPU).draft_cache == drafter._cache.num_bytes + of_pools
