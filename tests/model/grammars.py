"""A tokenizer as small as the tiny models' vocabulary, and the verdict of a fresh llguidance matcher on a text."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerFast

from engine.core.types import FreeBlock, Grammar, GrammarKind
from engine.structured_output.grammars import CompiledGrammars, Vocabulary, source_of
from engine.structured_output.masks import GrammarMasks

V = 61  # rows of logits of a tiny model; the tokenizer has fewer tokens
EOS = 2
_CHARACTERS = '{}[]":,Ġabcdefnlrstu0123456789.-'
_MERGES = [
    ("{", '"'),
    ('"', ":"),
    ('"', ","),
    ("a", "b"),
    ("ab", "c"),
    ("t", "r"),
    ("tr", "u"),
    ("1", "2"),
    (",", "Ġ"),
    ('"', "}"),
]

JSON_OBJECT = Grammar(GrammarKind.JSON_OBJECT)
SCHEMA = Grammar(
    GrammarKind.JSON_SCHEMA,
    '{"type": "object", "properties": {"a": {"enum": ["ab", "abc", "b"]}, "b": {"type": "integer"}, "c": {"type": "string"}},'
    ' "required": ["a", "b"], "additionalProperties": false}',
)
REGEX = Grammar(GrammarKind.REGEX, "[abc]{2,5}(,[abc12]{1,3})*")
CHOICE = Grammar(GrammarKind.CHOICE, '["abc", "ab", "abab", "true", "12"]')
LARK = Grammar(GrammarKind.LARK, 'start: "{" item ("," item)* "}"\nitem: /[abc]+/ | %json {"type": "boolean"} | start')
BLOCK = Grammar(GrammarKind.REGEX, "[abc]{2,5}", block=FreeBlock("<think>", "</think>"))
ALL = {"object": JSON_OBJECT, "schema": SCHEMA, "regex": REGEX, "choice": CHOICE, "lark": LARK, "block": BLOCK}


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return byte-level BPE of a few characters and ten longer tokens; ids 0 to 2 are special, as the tiny models have them."""
    tokens = ["<pad>", "<bos>", "<eos>", *_CHARACTERS, *("".join(pair) for pair in _MERGES), "Ċ"]
    inner = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=_MERGES))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # for bytes that a grammar forces
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    inner.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in ("<think>", "</think>")])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")


@cache
def vocabulary() -> Vocabulary:
    return source_of(tokenizer(), V, [EOS]).load()


def masks(**fields) -> GrammarMasks:
    """Return masks that remember nothing yet."""
    return GrammarMasks(CompiledGrammars(vocabulary), **fields)


_COMPILED = CompiledGrammars(vocabulary)


def ids_of(text: str) -> list[int]:
    return [tokenizer().convert_tokens_to_ids(char) for char in text.replace(" ", "Ġ")]


def text_of(token_ids: Sequence[int]) -> str:
    return str(tokenizer().decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@cache
def allowed_after(grammar: Grammar, token_ids: tuple[int, ...]) -> frozenset[int] | None:
    """Return what llguidance lets come after a text, or None for a text that it does not let come."""
    matcher = _COMPILED.matcher(grammar)
    if EOS in token_ids or matcher.try_consume_tokens(list(token_ids)) < len(token_ids):
        return None
    words = allocate_token_bitmask(1, V)
    fill_next_token_bitmask(matcher, words)
    return frozenset(np.unpackbits(words[0].view(np.uint8), bitorder="little")[:V].nonzero()[0].tolist())


class GrammarProcessor(LogitsProcessor):
    """Transformers' way to constrain a sequence by a grammar."""

    def __init__(self, grammar: Grammar, num_prompt_tokens: int) -> None:
        self._grammar = grammar
        self._num_prompt_tokens = num_prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        edited = torch.full_like(scores, float("-inf"))
        for row, text in enumerate(input_ids.tolist()):
            allowed = sorted(allowed_after(self._grammar, tuple(text[self._num_prompt_tokens :])) or ())
            edited[row, allowed] = scores[row, allowed]
        return edited
