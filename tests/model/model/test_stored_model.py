"""Stored models: the bits of the checked model, and a file that is not trusted blindly."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, OlmoConfig

from engine.build import build_served
from engine.core.config import EngineConfig
from engine.model import causal_lm, stored_model
from engine.model.causal_lm import load_model
from engine.model.hidden_states import StateTap
from engine.model.linear_backends import NATIVE
from engine.model.stored_model import StoredModel, load_stored, read_stored
from engine.native import library
from engine.testing import tiny_module
from engine.weights import UnsupportedModel, WeightsError
from tests.model.folders import model_folder
from tests.model.native.test_native_refusals import SIZES
from tests.model.native_models import KNOWN, PRECISIONS, alone
from tests.model.stored_models import stores_tiny_models
from tests.needs import needs_library

CPU = torch.device("cpu")
TEXT = [5, 17, 3, 44, 44, 9, 60, 1]

pytestmark = needs_library


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The precisions that are stored, in an empty cache."""
    return stores_tiny_models(tmp_path, monkeypatch)


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "packed").glob("*"))


@pytest.mark.usefixtures("stored")
def test_states_of_a_stored_model_are_read(tmp_path: Path) -> None:
    """The bug: a tap looked for transformers' module, so that only our own heads could be served with a stored model."""
    folder = model_folder(tmp_path / "model", tiny_module("llama"))
    models = [load_stored(folder, "float32", CPU), load_model(folder, "float32", CPU, NATIVE)]
    for is_last_normed in (True, False):
        states = []
        for model in models:
            assert model is not None
            tap = StateTap(model, (1, 3), is_last_normed)
            alone(model, TEXT)
            states.append(tap.latest())
            tap.close()
        assert torch.equal(*states)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", KNOWN)
def test_a_stored_model_has_the_same_bits(tmp_path: Path, stored: list[str], family: str, precision: str) -> None:
    """A request gets equal results from a model packed now and from one packed at an earlier start."""
    folder = model_folder(tmp_path / "model", tiny_module(family))
    for num_stored in (1, 1):
        found = load_stored(folder, precision, CPU)
        assert isinstance(found, StoredModel)
        assert len(stored) == num_stored
        whole = load_model(folder, precision, CPU, NATIVE)
        assert torch.equal(alone(found, TEXT), alone(whole, TEXT))
        ids_M = torch.tensor([0, 3, 17, 60])
        assert torch.equal(found.output_rows(ids_M), whole.output_rows(ids_M))
        assert torch.equal(found.embeddings_VD, whole.embeddings_VD)
        for name in (
            "vocab_size",
            "max_positions",
            "eos_token_ids",
            "depth",
            "description",
            "precision",
            "cache_dtype",
            "has_same_bits",
        ):
            assert getattr(found, name) == getattr(whole, name), name


def test_rotations_match_for_long_sequences(tmp_path: Path, stored: list[str]) -> None:
    """A table is extended with the text: its later part comes from the stored frequencies as well."""
    folder = model_folder(tmp_path / "model", tiny_module("gemma3"))
    found, whole = load_stored(folder, "float32", CPU), load_model(folder, "float32", CPU, NATIVE)
    assert found is not None
    assert found.native is not None
    assert whole.native is not None
    positions_P = torch.arange(5000)
    assert len(found.native.parts.rotations) == 2
    for ours, theirs in zip(found.native.parts.rotations, whole.native.parts.rotations, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours(positions_P), theirs(positions_P), strict=True))


def flipped(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-64]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0" * 8),
    "last byte": lambda path: flipped(path, -1),
    "header": lambda path: flipped(path, 20),
    "length": lambda path: flipped(path, 6),
    "number": lambda path: path.write_bytes(path.read_bytes().replace(b'\\"window\\": 0', b'\\"window\\": 9', 1)),
    "no JSON": lambda path: path.write_bytes((4).to_bytes(8, "little") + b"null"),
    "40 %": lambda path: flipped(path, path.stat().st_size * 40 // 100),
    "60 %": lambda path: flipped(path, path.stat().st_size * 60 // 100),
    "80 %": lambda path: flipped(path, path.stat().st_size * 80 // 100),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_again(tmp_path: Path, stored: list[str], damage: str) -> None:
    """A changed byte of the weights would change texts without an error."""
    folder = model_folder(tmp_path / "model")
    first = load_stored(folder, "float32", CPU)
    assert first is not None
    (entry,) = entries(tmp_path)
    before = entry.read_bytes()
    DAMAGES[damage](entry)
    assert entry.read_bytes() != before
    again = load_stored(folder, "float32", CPU)
    assert again is not None
    assert torch.equal(alone(again, TEXT), alone(load_model(folder, "float32", CPU, NATIVE), TEXT))
    assert len(stored) == 2


def test_unchecked_sum_is_detected(tmp_path: Path, stored: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: without the comparison the damaged file is taken as it is."""
    folder = model_folder(tmp_path / "model")
    load_stored(folder, "float32", CPU)
    monkeypatch.setattr(stored_model, "_sum_of", lambda octets: _Anything())
    (entry,) = entries(tmp_path)
    flipped(entry, entry.stat().st_size * 60 // 100)
    load_stored(folder, "float32", CPU)
    assert len(stored) == 1


class _Anything:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


CHANGES = {
    "weights": lambda folder: flipped(folder / "model.safetensors", -1),
    "times": lambda folder: os.utime(folder / "model.safetensors", ns=(1, 1)),
    "ends": lambda folder: (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]})),
    "configuration": lambda folder: (folder / "config.json").write_text((folder / "config.json").read_text() + " "),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_is_stored_again(tmp_path: Path, stored: list[str], change: str) -> None:
    """A model that is trained further in its folder must not be served from the earlier file."""
    folder = model_folder(tmp_path / "model")
    load_stored(folder, "float32", CPU)
    CHANGES[change](folder)
    found = load_stored(folder, "float32", CPU)
    assert found is not None
    assert len(stored) == 2
    assert found.eos_token_ids == load_model(folder, "float32", CPU, NATIVE).eos_token_ids


@pytest.mark.parametrize("what", ["_digest_of_code", "processor", "digest"])
def test_other_code_and_processors_check_again(
    tmp_path: Path, stored: list[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The check's verdict holds for the code, the library and the processor that it was made with."""
    folder = model_folder(tmp_path / "model")
    load_stored(folder, "float32", CPU)
    place: Any = stored_model if what == "_digest_of_code" else library
    stored_model._digest_of_code.cache_clear()
    monkeypatch.setattr(place, what, lambda: "another")
    load_stored(folder, "float32", CPU)
    monkeypatch.undo()
    stored_model._digest_of_code.cache_clear()
    assert len(stored) == 2


def test_old_files_are_deleted(tmp_path: Path, stored: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change of the code makes another file; they must not fill the disk. Files of other models stay."""
    folder, other = model_folder(tmp_path / "model"), model_folder(tmp_path / "model-float32")
    load_stored(other, "float32", CPU)
    for number in range(4):
        monkeypatch.setattr(stored_model, "_digest_of_code", lambda number=number: str(number))
        load_stored(folder, "float32", CPU)
    names = [entry.name.rpartition("-")[0] for entry in entries(tmp_path)]
    assert sorted(names) == ["model-float32", "model-float32", "model-float32-float32"]


def test_stored_model_is_readable_by_user_only(tmp_path: Path, stored: list[str]) -> None:
    load_stored(model_folder(tmp_path / "model"), "float32", CPU)
    (entry,) = entries(tmp_path)
    assert entry.stat().st_mode & 0o077 == 0
    assert entry.parent.stat().st_mode & 0o077 == 0


def test_model_that_fails_check_is_not_stored(tmp_path: Path, stored: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict is stored only if it is good: the next start checks again."""
    folder = model_folder(tmp_path / "model")
    monkeypatch.setitem(vars(causal_lm)["_TOLERANCE"], "float32", 0.0)
    for number in (1, 2):
        with pytest.raises(UnsupportedModel, match="differs from the model's own"):
            load_stored(folder, "float32", CPU)
        assert len(stored) == number
        assert entries(tmp_path) == []


def test_file_with_other_logits_is_not_stored(tmp_path: Path, stored: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The written file is read again and compared with the checked model."""
    flattened = stored_model._flattened

    def changed(*arguments: Any) -> Any:
        tensors, content = flattened(*arguments)
        return {**tensors, "last_norm": tensors["last_norm"] * 2}, content

    monkeypatch.setattr(stored_model, "_flattened", changed)
    with pytest.raises(WeightsError, match="gives other logits"):
        load_stored(model_folder(tmp_path / "model"), "float32", CPU)
    assert entries(tmp_path) == []


def test_unknown_model_is_tried_once(tmp_path: Path, stored: list[str]) -> None:
    """A model that the library does not know is loaded as before, without a second process at each start."""
    folder = model_folder(tmp_path / "model", AutoModelForCausalLM.from_config(OlmoConfig(**SIZES)))
    assert load_stored(folder, "float32", CPU) is None
    assert load_stored(folder, "float32", CPU) is None
    assert len(stored) == 1


@pytest.mark.parametrize("why", ["small", "no space", "read-only", "cuda"])
def test_unsupported_models_are_loaded_completely(
    tmp_path: Path, stored: list[str], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    folder = model_folder(tmp_path / "model")
    if why == "small":
        monkeypatch.setattr(stored_model, "_FEWEST_PARAMETERS", 1 << 40)
    elif why == "no space":
        monkeypatch.setattr(stored_model, "_SPARE_BYTES", 1 << 60)
    elif why == "read-only":
        (tmp_path / "cache").write_text("a file where the folder would be")
    assert load_stored(folder, "float32", torch.device("cuda") if why == "cuda" else CPU) is None
    assert stored == []


def test_a_served_engine_steps_a_stored_model(tmp_path: Path, stored: list[str]) -> None:
    """It needs no module of transformers: neither the timer, nor the warm-up, nor the report of the drafter's weights."""
    config = EngineConfig(str(model_folder(tmp_path / "model")), drafter="none", policy="plain", device="cpu")
    engine = build_served(config)
    assert stored == ["float32"]
    assert engine.info.has_same_bits
    audited = build_served(replace(config, audit_share=0.5))
    assert stored == ["float32"], "an audited engine compares with the module"
    assert audited.info.peaks is not None, "every served engine has them"
    assert replace(audited.info, peaks=None) == replace(engine.info, peaks=None)


def test_files_of_other_versions_are_refused(tmp_path: Path, stored: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    load_stored(model_folder(tmp_path / "model"), "float32", CPU)
    (entry,) = entries(tmp_path)
    monkeypatch.setattr(stored_model, "_VERSION", 99)
    with pytest.raises(ValueError, match="version"):
        read_stored(entry, "float32")
