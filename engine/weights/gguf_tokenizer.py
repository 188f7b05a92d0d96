"""The tokenizer of a GGUF file. The file has a vocabulary, and only the name of the rule that splits text.

A wrong rule silently gives tokens that the model was not trained on. So a rule is supported only if it gives the tokens of the
model's own tokenizer for llama.cpp's test texts (tests/model/weights/test_gguf_tokenizers.py). Other rules are refused.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf import read_gguf_metadata

from engine.weights.errors import WeightsError

_CONTROL, _USER_DEFINED = 3, 4  # types of tokens
_SPACE = "\u2581"
_NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_PHI3_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class Splitting:
    """How a byte-level vocabulary splits text before it merges bytes.

    `ignores_merges`: a piece that is itself a token is not split further. `adds_bos` is the default of a file without it.
    """

    steps: tuple[Any, ...]
    normalizer: Any = None
    ignores_merges: bool = False
    adds_bos: bool = False


def _isolated(*patterns: str) -> tuple[Any, ...]:
    return tuple(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns)


_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_BYTES_OF_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)  # by GPT-2's rule
_DIGITS = pre_tokenizers.Digits(individual_digits=True)
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_HAN_AND_HANGUL = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LETTERS = (
    "[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώ"
    "ᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏"
    "𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]"
)
_DEEPSEEK_PUNCTUATION = "[!-/:-~！-／：-～‘-‟\u3000-。]"

_DIGITS_ALONE = Splitting((_DIGITS, _BYTES_OF_WORDS))
_SPLITTINGS = {
    "gpt-2": Splitting((_BYTES_OF_WORDS,)),
    "smollm": _DIGITS_ALONE,
    "starcoder": _DIGITS_ALONE,
    "refact": _DIGITS_ALONE,
    "llama-bpe": Splitting((*_isolated(_LLAMA_3), _BYTES), ignores_merges=True, adds_bos=True),
    "qwen2": Splitting((*_isolated(_QWEN_2), _BYTES), normalizers.NFC()),
    "falcon": Splitting(
        (
            pre_tokenizers.Punctuation("contiguous"),
            _BYTES_OF_WORDS,
            pre_tokenizers.Digits(individual_digits=False),
            *_isolated("[0-9][0-9][0-9]"),
        )
    ),
    "deepseek-llm": Splitting(
        (
            *_isolated(r"[\r\n]", rf"\s?{_DEEPSEEK_LETTERS}+", rf"\s?{_DEEPSEEK_PUNCTUATION}+", r"\s+$", _HAN_AND_HANGUL),
            _DIGITS,
            _BYTES,
        )
    ),
    "deepseek-coder": Splitting((*_isolated(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL), _DIGITS, _BYTES)),
}
# Supported values of tokenizer.ggml.pre, by tokenizer.ggml.model. SentencePiece does not split text first.
_RULES: dict[str | None, tuple[str | None, ...]] = {"gpt2": tuple(_SPLITTINGS), "llama": (None, "default")}


def load_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a file; raise WeightsError unless its rule is known to give the model's own tokens."""
    fields, _ = read_gguf_metadata(str(gguf), ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"))
    kind, rule = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind not in _RULES:
        raise WeightsError(_refusal("model", kind, _RULES))
    if rule not in _RULES[kind]:
        raise WeightsError(_refusal("pre", rule, _RULES[kind]))
    return _byte_level(fields, _SPLITTINGS[rule]) if kind == "gpt2" else _sentencepiece(gguf, fields)


def _refusal(field: str, value: str | None, known: Iterable[str | None]) -> str:
    named = "missing" if value is None else repr(value)
    return (
        f"tokenizer.ggml.{field} is {named}: it is not known how to split text into the tokens of the model's own tokenizer; "
        f"known are {', '.join(name for name in known if name)}"
    )


def _byte_level(fields: dict[str, Any], splitting: Splitting) -> PreTrainedTokenizerFast:
    """Build a tokenizer that merges bytes. Marked tokens of the file are matched in text before it is split."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=splitting.ignores_merges))
    if splitting.normalizer is not None:
        backend.normalizer = splitting.normalizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(list(splitting.steps))
    backend.decoder = decoders.ByteLevel()
    marked = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    backend.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL) for token, kind in marked])
    ids = {name: fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in _NAMED_TOKENS.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=fields.get("tokenizer.chat_template"),
        add_bos_token=fields.get("tokenizer.ggml.add_bos_token", splitting.adds_bos),
        add_eos_token=fields.get("tokenizer.ggml.add_eos_token", False),
        **{name: None if token_id is None else tokens[token_id] for name, token_id in ids.items()},
    )


def _sentencepiece(gguf: Path, fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Let transformers build a tokenizer that merges characters, and correct it.

    A space is put before every text, even if the text begins with a space.
    Phi-3's special tokens include the whitespace after them.
    """
    for name in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if fields.get(f"tokenizer.ggml.{name}"):
            raise WeightsError(
                f"tokenizer.ggml.{name} changes text before it is split, which is not known to be done as by the model's own"
            )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    backend, architecture = tokenizer.backend_tokenizer, fields["general.architecture"]
    if architecture.startswith("gemma"):
        return tokenizer
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(_SPACE))
    backend.normalizer, backend.pre_tokenizer = normalizers.Sequence(spaces), None
    if architecture == "phi3":
        marked = [token.content for token in backend.get_added_tokens_decoder().values()]
        stripped = [
            AddedToken(token, rstrip=True, normalized=False, special=True) for token in marked if token not in _PHI3_UNSTRIPPED
        ]
        backend.add_tokens(stripped)
    return tokenizer
