"""Small vocabularies that spell the calls of a markup, made from its row of server.tool_calls.syntaxes: a new row has one too."""

import re
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from engine.core.types import Grammar, GrammarKind
from engine.structured_output.grammars import Vocabulary, compiled, source_of
from server.tool_calls.grammars import forced_calls
from server.tool_calls.syntaxes import SYNTAXES

V = 256
EOS = 2
FUNCTIONS: dict[str, dict[str, Any]] = {
    "f": {
        "type": "object",
        "properties": {"a": {"enum": ["x", "xy", "z"]}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "g": {"type": "object", "properties": {}, "additionalProperties": False},
}
_SPECIAL = ["<pad>", "<bos>", "<eos>"]
_MOST_TOKENS = 9  # of a call


@dataclass(frozen=True)
class MarkupCase:
    """A grammar of forced calls, of one or of many, with markers that are tokens or text, and a tokenizer of its texts."""

    markup: str
    has_tokens: bool
    is_one: bool

    def __str__(self) -> str:
        return f"{self.markup}-{'tokens' if self.has_tokens else 'text'}-{'one' if self.is_one else 'many'}"

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Tokens are parts of texts with one call, so long that a call has few of them."""
        texts = self._calls()
        found = (self._trained(texts, num_merges) for num_merges in range(20, V, 20))
        return next(one for one in found if max(len(one.encode(text)) for text in texts) <= _MOST_TOKENS)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return source_of(self.tokenizer, V, [EOS]).load()

    @cached_property
    def grammar(self) -> Grammar:
        return self._grammar_of(self.tokenizer, self.is_one)

    def allowed_after(self, token_ids: tuple[int, ...]) -> list[int]:
        """Return what a new matcher lets follow a text."""
        matcher = self._start.deep_copy()
        assert matcher.try_consume_tokens(list(token_ids)) == len(token_ids)
        return _allowed(matcher, V)

    def text_of(self, token_ids: tuple[int, ...]) -> str:
        return str(self.tokenizer.decode([token_id for token_id in token_ids if token_id != EOS], skip_special_tokens=False))

    @cached_property
    def _start(self) -> LLMatcher:
        return compiled(self.vocabulary, self.grammar)

    @property
    def _markers(self) -> tuple[str, ...]:
        return SYNTAXES[self.markup].markers if self.has_tokens else ()

    def _grammar_of(self, tokenizer: PreTrainedTokenizerFast, is_one: bool) -> Grammar:
        marker_tokens = {marker: tokenizer.convert_tokens_to_ids(marker) for marker in self._markers}
        return Grammar(GrammarKind.LARK, forced_calls(SYNTAXES[self.markup], FUNCTIONS, is_one, marker_tokens))

    def _trained(self, texts: list[str], num_merges: int) -> PreTrainedTokenizerFast:
        """Return a byte-level tokenizer of the characters that calls may have, of longer parts of texts, and of the markers."""
        parts = [
            part for value in astuple(SYNTAXES[self.markup].writing) for part in (value if isinstance(value, tuple) else (value,))
        ]
        split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        alphabet = sorted({*split.pre_tokenize_str("".join(parts) + '{}[]":, \n' + "fgaxyz")[0][0]})
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer, inner.decoder = split, decoders.ByteLevel()
        num_tokens = len(_SPECIAL) + len(alphabet) + num_merges
        trainer = trainers.BpeTrainer(
            vocab_size=num_tokens, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
        between = re.compile("|".join(map(re.escape, self._markers)) or "(?!)")
        inner.train_from_iterator([part for text in texts for part in between.split(text)], trainer)
        inner.add_tokens([AddedToken(marker, special=True, normalized=False) for marker in self._markers])
        return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")

    def _calls(self) -> list[str]:
        """Return all texts with one call, found character by character."""
        tokenizer = self._trained([], 0)
        start = compiled(source_of(tokenizer, len(tokenizer), [EOS]).load(), self._grammar_of(tokenizer, is_one=True))
        return [*_walks(tokenizer, start)]


def _walks(tokenizer: PreTrainedTokenizerFast, start: LLMatcher) -> Iterator[str]:
    waiting: list[tuple[list[int], LLMatcher]] = [([], start)]
    while waiting:
        token_ids, matcher = waiting.pop()
        allowed = _allowed(matcher, len(tokenizer))
        if EOS in allowed:
            yield str(tokenizer.decode(token_ids))
        for token_id in set(allowed) - {EOS}:
            branch = matcher.deep_copy()
            assert branch.consume_token(token_id)
            waiting.append(([*token_ids, token_id], branch))


def _allowed(matcher: LLMatcher, num_rows: int) -> list[int]:
    words = allocate_token_bitmask(1, num_rows)
    fill_next_token_bitmask(matcher, words)
    bits = np.unpackbits(words[0].view(np.uint8), bitorder="little")[:num_rows]
    return [int(token_id) for token_id in bits.nonzero()[0]]
