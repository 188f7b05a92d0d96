"""A fingerprint changes with the tokens, with the special tokens and with the weights only."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine.testing import tiny_module
from engine.weights import WeightsError
from engine.weights import fingerprint as fingerprint_module
from engine.weights.facts import read_facts
from engine.weights.fingerprint import Fingerprint, fingerprint
from engine.weights.vocabulary import read_vocabulary
from tests.model.folders import SPECIAL, WORDS, model_folder, with_rows
from tests.tokenizers_for_tests import byte_level


def changed(one: Fingerprint, other: Fingerprint) -> set[str]:
    return {name for name in Fingerprint.__slots__ if getattr(one, name) != getattr(other, name)}


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Fingerprint:
    return fingerprint(model_folder(tmp_path_factory.mktemp("original")))


def test_it_is_read_as_it_was_written(original):
    assert Fingerprint.from_text(original.as_text()) == original
    assert (original.vocab_size, original.num_tokens, original.width, original.num_layers) == (61, 61, 32, 3)
    for text in ("{}", "[]", "12", "{", '{"tokenizer": "a"}'):
        with pytest.raises(ValueError, match=r".+"):
            Fingerprint.from_text(text)


def test_each_field_changes_with_its_own_cause(original, tmp_path):
    swapped = (*WORDS[:3], WORDS[4], WORDS[3], *WORDS[5:])
    assert changed(original, fingerprint(model_folder(tmp_path / "same"))) == set()
    assert changed(original, fingerprint(model_folder(tmp_path / "words", words=swapped))) == {"tokenizer"}
    assert changed(original, fingerprint(model_folder(tmp_path / "special", special=SPECIAL[1:]))) == {"special_tokens"}
    assert changed(original, fingerprint(model_folder(tmp_path / "weights", tiny_module("llama", 1)))) == {"weights"}
    assert changed(original, fingerprint(model_folder(tmp_path / "rows", with_rows(64)))) == {"vocab_size", "weights"}


def tuned(folder: Path, name: str, amount: float) -> Path:
    """Change one tensor of a folder's weights everywhere, as training does."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name] += amount
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def test_training_any_tensor_changes_the_weights_digest(original, tmp_path):
    for index, name in enumerate(("model.norm.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight")):
        assert changed(original, fingerprint(tuned(model_folder(tmp_path / str(index)), name, 1e-3))) == {"weights"}


def test_mutant_reading_shapes_confuses_tuned_models(original, tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint_module, "_SAMPLE_BYTES", 0)
    folder = model_folder(tmp_path / "model")
    assert fingerprint(folder) == fingerprint(tuned(folder, "model.norm.weight", 1.0))


def test_fingerprint_is_independent_of_file_layout(original, tmp_path):
    folder = model_folder(tmp_path / "sharded")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for index, (name, tensor) in enumerate(tensors.items()):
        save_file({name: tensor}, folder / f"model-{index}.safetensors", metadata={"part": str(index)})
    assert fingerprint(folder) == original


def test_names_that_pad_vocabulary_are_no_tokens(original, tmp_path):
    """GGUF files name every row of a padded output, the same model on the hub does not."""
    padded = fingerprint(model_folder(tmp_path / "padded", with_rows(64), (*WORDS, "[PAD61]", "[PAD62]", "[PAD63]")))
    assert changed(original, padded) == {"vocab_size", "weights"}
    misnumbered = fingerprint(model_folder(tmp_path / "other", with_rows(64), (*WORDS, "[PAD63]", "[PAD62]", "[PAD61]")))
    assert changed(padded, misnumbered) == {"tokenizer", "num_tokens"}


def test_the_vocabulary_is_transformers_own(tmp_path):
    """Added tokens of tokenizer_config.json, which transformers adds too, are among them."""
    tokenizer = byte_level()
    tokenizer.save_pretrained(tmp_path)
    assert read_vocabulary(tmp_path).tokens == {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    assert sorted(read_vocabulary(tmp_path).special_ids) == [0, 1, 2]
    path = tmp_path / "tokenizer_config.json"
    added = {"added_tokens_decoder": {"400": {"content": "<new>", "special": True}}}
    path.write_text(json.dumps(json.loads(path.read_text()) | added))
    assert read_vocabulary(tmp_path).tokens[400] == "<new>"
    assert 400 in read_vocabulary(tmp_path).special_ids


def test_splitting_changes_with_merges_and_normaliser_alone(tmp_path):
    byte_level().save_pretrained(tmp_path)
    vocabulary = read_vocabulary(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    merges = content["model"]["merges"]
    for change in ({"merges": merges[::-1]}, {"merges": [" ".join(pair) for pair in merges]}):
        path.write_text(json.dumps(content | {"model": content["model"] | change}))
        other = read_vocabulary(tmp_path)
        assert (other.tokens_digest, other.special_digest) == (vocabulary.tokens_digest, vocabulary.special_digest)
        assert (other.splitting == vocabulary.splitting) == isinstance(change["merges"][0], str)
    path.write_text(json.dumps(content | {"normalizer": {"type": "NFC"}}))
    assert read_vocabulary(tmp_path).splitting != vocabulary.splitting


@pytest.mark.parametrize(("eos", "expected"), [(2, (2,)), ([2, 5], (2, 5)), (None, (2,))])
def test_end_tokens_prefer_generation_settings(tmp_path, eos, expected):
    folder = model_folder(tmp_path / "model", eos=eos)
    assert read_facts(folder).eos_token_ids == expected
    (folder / "generation_config.json").unlink()
    assert read_facts(folder).eos_token_ids == (2,)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_unreadable_part_is_named(tmp_path, file):
    folder = model_folder(tmp_path / "model")
    (folder / file).write_bytes(b"not what it should be")
    with pytest.raises(WeightsError, match=r"of .*model cannot be read"):
        fingerprint(folder)


@pytest.mark.weights
def test_the_shipped_pair_has_one_vocabulary():
    from engine.weights import resolve

    one, other = (fingerprint(resolve(name).folder) for name in ("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"))
    assert changed(one, other) == {"width", "num_layers", "weights"}
    assert one.num_tokens == 151665
