"""The tokenizer of a GGUF file: a vocabulary, and the name of a rule by which text is split, which the file does not hold.

A wrong rule gives other tokens than the model was trained on, silently. So only rules are taken that give the tokens of the models'
own tokenizers for the test texts of llama.cpp (tests/model/test_gguf_tokenizers.py); a file with another is refused by its name.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf import read_gguf_metadata

from engine.weights.errors import WeightsError

_CONTROL, _USER_DEFINED = 3, 4  # types of tokens
_SPACE = "\u2581"
# Without it: Phi-3's special tokens take the whitespace behind them, but for these.
_PHI3_WITHOUT_STRIP = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class Splitting:
    """How a byte-level vocabulary splits text before it merges bytes.

    `ignores_merges`: a piece that is a token is taken whole. `adds_bos` counts where a file leaves it open.
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
_QWEN_35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
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
    "mpt": Splitting((_BYTES_OF_WORDS,)),
    "smollm": _DIGITS_ALONE,
    "starcoder": _DIGITS_ALONE,
    "refact": _DIGITS_ALONE,
    "command-r": _DIGITS_ALONE,
    "llama-bpe": Splitting((*_isolated(_LLAMA_3), _BYTES), ignores_merges=True, adds_bos=True),
    "qwen2": Splitting((*_isolated(_QWEN_2), _BYTES), normalizers.NFC()),
    "qwen35": Splitting((*_isolated(_QWEN_35), _BYTES), normalizers.NFC()),
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


def load_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a file; raise WeightsError where it is not known to be the model's own."""
    fields, _ = read_gguf_metadata(str(gguf), ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"))
    of_tokenizer = {name.removeprefix("tokenizer."): value for name, value in fields.items()}
    kind = of_tokenizer.get("ggml.model")
    if kind == "gpt2":
        return _byte_level(of_tokenizer)
    if kind == "llama":
        return _sentencepiece(gguf, of_tokenizer)
    raise WeightsError(f"tokenizers of the kind {_named(kind)} (tokenizer.ggml.model) are not known to give the model's own tokens")


def _named(value: Any) -> str:
    return "of no name" if value is None else repr(value)


def _byte_level(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Build a tokenizer that merges bytes."""
    rule = fields.get("ggml.pre")
    if rule not in _SPLITTINGS:
        raise WeightsError(
            f"the file splits text by the rule {_named(rule)} (tokenizer.ggml.pre), which is not known to give the model's own "
            f"tokens; known: {', '.join(_SPLITTINGS)}"
        )
    splitting, tokens = _SPLITTINGS[rule], fields["ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["ggml.merges"]]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=splitting.ignores_merges))
    if splitting.normalizer is not None:
        backend.normalizer = splitting.normalizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(list(splitting.steps))
    backend.decoder = decoders.ByteLevel()
    types = fields["ggml.token_type"]
    whole = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    backend.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL) for token, kind in whole])
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: fields.get(f"ggml.{key}_token_id") for name, key in names.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=fields.get("chat_template"),
        add_bos_token=fields.get("ggml.add_bos_token", splitting.adds_bos),
        add_eos_token=fields.get("ggml.add_eos_token", False),
        **{f"{name}_token": None if token_id is None else tokens[token_id] for name, token_id in ids.items()},
    )


def _sentencepiece(gguf: Path, fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Have transformers build a tokenizer that merges characters, and give it SentencePiece's space before the text."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    backend = tokenizer.backend_tokenizer
    if not fields["general.architecture"].startswith("gemma"):
        spaces = [normalizers.Replace(" ", _SPACE)]
        if fields.get("ggml.add_space_prefix", True):  # also before a space, where transformers leaves it out
            spaces.insert(0, normalizers.Prepend(_SPACE))
        backend.normalizer, backend.pre_tokenizer = normalizers.Sequence(spaces), None
    return tokenizer
