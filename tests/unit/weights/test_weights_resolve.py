"""Each kind of reference leads to its folder, in a fixed order; others are refused in one line with the reason."""

import subprocess
from pathlib import Path

import pytest

from engine.weights import LocalWeights, WeightsCache, WeightsError, load_presets, resolve
from engine.weights.hub import is_hub_id
from engine.weights.references import RECIPE
from tests.unit.weights.weights_wheels import python_command

FILES = ("config.json", "model.safetensors", "tokenizer.json")


def _model_folder(path: Path, files: tuple[str, ...] = FILES) -> Path:
    path.mkdir(parents=True)
    for file in files:
        (path / file).touch()
    return path


def _cached(cache: Path, name: str) -> Path:
    """Put an empty model at the path of the preset's."""
    return _model_folder(WeightsCache(cache).model(f"{load_presets()[name].key}-r{RECIPE}"))


def _refusal(reference: str, cache: Path) -> str:
    with pytest.raises(WeightsError) as raised:
        resolve(reference, cache=cache)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_folder_is_itself(tmp_path):
    folder = _model_folder(tmp_path / "mine")
    assert resolve(str(folder), cache=tmp_path / "cache") == LocalWeights("mine", folder)


def test_a_relative_folder_is_itself(tmp_path, monkeypatch):
    folder = _model_folder(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name", cache=tmp_path / "cache").folder == folder
    monkeypatch.chdir(folder)
    assert resolve(".", cache=tmp_path / "cache") == LocalWeights("name", folder)


@pytest.mark.parametrize("missing", FILES)
def test_unfinished_folder_names_missing_files(tmp_path, missing):
    folder = _model_folder(tmp_path / "mine", tuple(file for file in FILES if file != missing))
    assert missing.removeprefix("model") in _refusal(str(folder), tmp_path)


def test_cached_preset_is_found_without_gguf(tmp_path):
    folder = _cached(tmp_path, "smollm2-135m")
    assert resolve("smollm2-135m", cache=tmp_path) == LocalWeights("smollm2-135m", folder)


def test_preset_precedes_folder_of_same_name(tmp_path, monkeypatch):
    folder = _cached(tmp_path / "cache", "smollm2-135m")
    mine = _model_folder(tmp_path / "smollm2-135m")
    monkeypatch.chdir(tmp_path)
    assert resolve("smollm2-135m", cache=tmp_path / "cache").folder == folder
    assert resolve("./smollm2-135m", cache=tmp_path / "cache").folder == mine


def test_unknown_reference_lists_attempted_places(tmp_path):
    message = _refusal("smollm3", tmp_path)
    assert "smollm2-135m, qwen2.5-coder-1.5b" in message
    assert str(Path("smollm3").absolute()) in message
    assert "hub id" in message


@pytest.mark.parametrize("reference", ["./a/b", "/a/b", "~/a", "org/name.gguf", "a/b/c", ""])
def test_a_path_never_reaches_the_hub(reference, tmp_path, monkeypatch):
    def reached(_: str) -> Path:
        raise AssertionError("the hub was queried")

    monkeypatch.setattr("engine.weights.references.snapshot", reached)
    assert "is no model" in _refusal(reference, tmp_path)


@pytest.mark.parametrize(
    ("reference", "is_one"), [("org/name", True), ("org/na.me-1@v1.0", True), ("name", False), ("./a/b", False)]
)
def test_shape_of_a_hub_id(reference, is_one):
    assert is_hub_id(reference) is is_one


@pytest.mark.slow
def test_broken_gguf_is_refused_without_leftovers(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but not really")
    with pytest.raises(WeightsError, match="cannot convert") as raised:
        resolve(str(broken), cache=tmp_path / "cache", progress=False)
    assert "\n" not in str(raised.value)
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []
    assert not (tmp_path / "cache" / "models").exists()


OFFLINE = """
import sys
from engine.weights import WeightsError, resolve
for reference in ("org/cached", "org/absent"):
    try:
        print("found", resolve(reference).folder)
    except WeightsError as error:
        print("refused", error)
"""


def test_hub_ids_resolve_from_cache_offline(tmp_path, monkeypatch):
    repository = tmp_path / "hub" / "models--org--cached"
    folder = _model_folder(repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    output = subprocess.run(python_command(OFFLINE), capture_output=True, text=True, check=True).stdout.splitlines()
    assert output[0] == f"found {folder}"
    assert output[1].startswith("refused cannot get org/absent from the hub or its local cache: ")
    assert len(output) == 2
