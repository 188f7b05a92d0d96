"""Stored configurations have the attributes that transformers reads, and are not trusted blindly."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from engine.weights import UnsupportedModel, WeightsCache, WeightsError, pretrained
from engine.weights.facts import read_facts
from engine.weights.stored_config import StoredConfig, read_config

SIZES = {"vocab_size": 61, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 2},
    "qwen2": {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 512},
    "gemma3_text": {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "sliding_window": 8},
    "mistral": {"hidden_size": 32, "sliding_window": 16},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61},  # sizes under names of its own
}
# What the engine reads (engine.memory_plan, engine.weights.facts, engine.attention.paged.attention).
READ = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "tie_word_embeddings", "eos_token_id", "sliding_window"),
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LATEBRANCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "configurations"


def folder_of(tmp_path: Path, family: str) -> Path:
    folder = tmp_path / family
    AutoConfig.for_model(family, **({} if family == "gpt2" else SIZES) | FAMILIES[family]).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_attributes_equal_those_of_transformers(tmp_path: Path, cache: Path, family: str) -> None:
    """A default that config.json leaves out must be the library's, or memory and lengths would be wrong."""
    folder = folder_of(tmp_path, family)
    theirs = pretrained.load_config(folder)
    for _ in range(2):
        ours = read_config(folder)
        assert isinstance(ours, StoredConfig)
        assert ours.model_type == theirs.model_type
        assert ours.to_json_string() == theirs.to_json_string()
        missing = object()
        for name in READ:
            assert getattr(ours.get_text_config(), name, missing) == getattr(theirs.get_text_config(), name, missing), name
    assert len(list(cache.iterdir())) == 1


def test_a_stored_configuration_needs_no_transformers(tmp_path: Path, cache: Path) -> None:
    folder = folder_of(tmp_path, "llama")
    read_config(folder)
    code = (
        "import sys; from pathlib import Path; from engine.weights.facts import read_facts;"
        f"print(read_facts(Path({str(folder)!r})).width, 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "32 False\n"


def test_a_changed_configuration_is_read_again(tmp_path: Path, cache: Path) -> None:
    folder = folder_of(tmp_path, "llama")
    assert read_config(folder).get_text_config().num_hidden_layers == 2
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "num_hidden_layers": 3}))
    assert read_config(folder).get_text_config().num_hidden_layers == 3


@pytest.mark.parametrize(
    "damage", [lambda old: old.replace("32", "31", 1), lambda old: "", lambda old: old[:-1], lambda old: "[1]"]
)
def test_a_damaged_file_is_made_again(tmp_path: Path, cache: Path, damage: Any) -> None:
    folder = folder_of(tmp_path, "llama")
    read_config(folder)
    (entry,) = cache.iterdir()
    entry.write_text(damage(entry.read_text()))
    assert read_config(folder).to_json_string() == pretrained.load_config(folder).to_json_string()
    assert read_config(folder).get_text_config().hidden_size == 32


def test_a_refused_configuration_is_not_stored(tmp_path: Path, cache: Path) -> None:
    folder = folder_of(tmp_path, "llama")
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {}}))
    for _ in range(2):
        with pytest.raises(UnsupportedModel):
            read_config(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(WeightsError):
        read_config(folder)
    assert not cache.exists()


@pytest.mark.parametrize(("ends", "expected"), [(5, (5,)), ([5, 7], (5, 7)), (None, (2,)), (..., (2,))])
def test_ends_are_those_of_the_generation_settings(tmp_path: Path, cache: Path, ends: Any, expected: tuple[int, ...]) -> None:
    folder = folder_of(tmp_path, "llama")
    (folder / "generation_config.json").write_text("{}" if ends is ... else json.dumps({"eos_token_id": ends}))
    assert read_facts(folder).eos_token_ids == expected


def test_unwritable_cache_makes_text_each_time(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("a file where the folder would be")
    cache, made = WeightsCache(tmp_path / "root"), []
    for _ in range(2):
        assert cache.text(cache.fingerprint("key"), lambda: made.append(1) or "text") == "text"  # type: ignore[func-returns-value]
    assert len(made) == 2
