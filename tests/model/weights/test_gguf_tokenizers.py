"""A tokenizer read from a GGUF file splits text as the model's own does, or is refused by name."""

import dataclasses
import random
from pathlib import Path

import gguf
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf import read_gguf_metadata

from engine.weights import WeightsError, gguf_tokenizer, resolve
from engine.weights.gguf_tokenizer import load_tokenizer
from tests.model.ggml_vocabularies import GgmlVocabulary, vocabularies
from tests.model.tiny_gguf import tiny_model, tokens, write_gguf

READ = ["deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2", "refact", "starcoder"]
REFUSED = {
    "aquila": "tokenizer.ggml.pre is missing",
    "baichuan": "baichuan",
    "bert-bge": "tokenizer.ggml.model is 'bert'",
    "command-r": "tokenizer.ggml.pre is 'command-r'",
    "gemma-4": "tokenizer.ggml.model is 'gemma4'",
    "gpt-neox": "tokenizer.ggml.pre is missing",
    "mpt": "tokenizer.ggml.pre is 'mpt'",
    "nomic-bert-moe": "tokenizer.ggml.model is 't5'",
    "qwen35": "tokenizer.ggml.pre is 'qwen35'",
}


@pytest.fixture(scope="module")
def found() -> dict[str, GgmlVocabulary]:
    return vocabularies()


def reloaded(file: Path, folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer as a converted folder has it."""
    load_tokenizer(file).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def mistakes(tokenizer: PreTrainedTokenizerFast, vocabulary: GgmlVocabulary) -> list[str]:
    return [text for text, ids in vocabulary.texts if tokenizer.encode(text, add_special_tokens=False) != ids]


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_texts_get_the_tokens_of_the_model(found, tmp_path, name):
    """Splitting rules were guessed: `llama-bpe` cut words that are tokens, and `llama-spm` left out a space before a space."""
    assert len(found[name].texts) >= 40
    assert mistakes(reloaded(found[name].file, tmp_path), found[name]) == []


@pytest.mark.weights
@pytest.mark.slow
def test_every_other_vocabulary_is_refused(found):
    assert sorted(found) == sorted([*READ, *REFUSED])
    for name, reason in REFUSED.items():
        with pytest.raises((WeightsError, ValueError), match=reason):
            load_tokenizer(found[name].file)


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_mistakes"), [("llama-bpe", 1), ("deepseek-coder", 1), ("starcoder", 1), ("falcon", 1)])
def test_another_rule_gives_other_tokens(found, monkeypatch, name, num_mistakes):
    """The mutants: GPT-2's rule, and Llama 3's without taking pieces whole."""
    splittings = gguf_tokenizer._SPLITTINGS
    mutant = dataclasses.replace(splittings[name], ignores_merges=False) if name == "llama-bpe" else splittings["gpt-2"]
    monkeypatch.setitem(splittings, name, mutant)
    assert len(mistakes(load_tokenizer(found[name].file), found[name])) >= num_mistakes


@pytest.mark.weights
@pytest.mark.slow
def test_marked_tokens_keep_their_ids(found, tmp_path):
    """DeepSeek's begin token has characters that no byte maps to. The bug: it became a token beyond the vocabulary."""
    tokenizer = reloaded(found["deepseek-coder"].file, tmp_path)
    assert tokenizer("a").input_ids == [32013, 64]
    assert tokenizer.encode("<｜begin▁of▁sentence｜><|EOT|>", add_special_tokens=False) == [32013, 32021]
    assert len(tokenizer) == 32256


@pytest.mark.weights
@pytest.mark.slow
def test_file_may_omit_the_begin_token(found):
    """Llama 3's files do not specify it: its own tokenizer adds one, Qwen2's does not."""
    assert load_tokenizer(found["llama-bpe"].file)("a").input_ids == [128000, 64]
    assert load_tokenizer(found["qwen2"].file)("a").input_ids == [64]


@pytest.mark.weights
@pytest.mark.slow
def test_special_tokens_of_phi3_take_whitespace(found, tmp_path):
    tokenizer = reloaded(found["phi-3"].file, tmp_path)
    assert tokenizer.encode("<|user|>\nHi<|end|>\n", add_special_tokens=False) == [32010, 6324, 32007]
    assert tokenizer.encode("<s>\n", add_special_tokens=False) == [1, 29871, 13]


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-spm", "gemma3-270m"])
def test_tokens_are_those_of_sentencepiece(found, tmp_path, name):
    """On random texts, by SentencePiece itself, built of the file's pieces."""
    if name in found:
        file, tokenizer = found[name].file, reloaded(found[name].file, tmp_path)
    else:
        weights = resolve(name)
        if weights.gguf is None:
            pytest.skip("the preset's GGUF file was deleted")
        file, tokenizer = weights.gguf, AutoTokenizer.from_pretrained(weights.folder)
    expected = _sentencepiece(file)
    rng = random.Random(0)
    words = [expected.id_to_piece(token_id).replace("▁", " ") for token_id in range(3, expected.vocab_size())]
    words = [word for word in words if not word.startswith("<")]
    kinds = [
        lambda: rng.choice(words),
        lambda: " " * rng.randint(1, 9),
        lambda: "\n" * rng.randint(1, 4),
        lambda: "\t",
        lambda: chr(rng.randint(0x20, 0xD7FF)),
    ]
    for _ in range(1000):
        text = "".join(rng.choice(kinds)() for _ in range(rng.randint(1, 8)))
        if "▁" not in text and " " * 31 not in text:  # Gemma's longest token of spaces
            assert tokenizer.encode(text, add_special_tokens=False) == expected.encode(text), repr(text)


def _sentencepiece(file: Path) -> sentencepiece.SentencePieceProcessor:
    prefix = "tokenizer.ggml."
    fields, _ = read_gguf_metadata(str(file), (prefix + "tokens",))
    model = sentencepiece_model_pb2.ModelProto()
    for token, score, kind in zip(*(fields[prefix + name] for name in ("tokens", "scores", "token_type")), strict=True):
        piece = token.replace(" ", "▁") if kind == gguf.TokenType.USER_DEFINED else token
        model.pieces.add(piece=piece, score=score, type=kind)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.byte_fallback, trainer.vocab_size = trainer.BPE, True, len(model.pieces)
    for name, key in {"unk_id": "unknown", "bos_id": "bos", "eos_id": "eos", "pad_id": "padding"}.items():
        setattr(trainer, name, fields.get(f"{prefix}{key}_token_id", -1))
    normalizer.name, normalizer.remove_extra_whitespaces = "identity", False
    normalizer.add_dummy_prefix = fields.get(prefix + "add_space_prefix", True)
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


@pytest.mark.parametrize("rule", ["llama3", "tekken", "gpt-4o", "default", "qwen2 ", "command-r"])
def test_an_unknown_rule_is_refused_by_name(tmp_path, rule):
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", is_tied=True), "llama", rule)
    with pytest.raises(WeightsError, match=f"tokenizer.ggml.pre is '{rule}': it is not known"):
        load_tokenizer(tmp_path / "tiny.gguf")


def test_a_refusal_is_one_line(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", is_tied=True), "llama", "tekken")
    with pytest.raises(WeightsError, match=r"cannot convert .*tiny\.gguf: tokenizer\.ggml\.pre is 'tekken': it is") as raised:
        resolve(str(tmp_path / "tiny.gguf"), cache=tmp_path / "cache", progress=False)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", "gemma4", "none"])
def test_an_unknown_tokenizer_is_refused_by_name(tmp_path, kind):
    _write_tokenizer(tmp_path / "tiny.gguf", kind)
    with pytest.raises(WeightsError, match=f"tokenizer.ggml.model is '{kind}': it is not known"):
        load_tokenizer(tmp_path / "tiny.gguf")


def test_a_file_without_a_tokenizer_is_refused(tmp_path):
    _write_tokenizer(tmp_path / "tiny.gguf", None)
    with pytest.raises(WeightsError, match=r"tokenizer\.ggml\.model is missing"):
        load_tokenizer(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("rule", ["llama-bpe", "smollm"])
def test_sentencepiece_knows_no_splitting_rule(tmp_path, rule):
    _write_tokenizer(tmp_path / "tiny.gguf", "llama", rule)
    with pytest.raises(WeightsError, match=f"tokenizer.ggml.pre is '{rule}': .*; known are default$"):
        load_tokenizer(tmp_path / "tiny.gguf")


def _write_tokenizer(path: Path, kind: str | None, rule: str | None = None) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    if kind is not None:
        writer.add_tokenizer_model(kind)
    if rule is not None:
        writer.add_tokenizer_pre(rule)
    writer.add_token_list(tokens())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
