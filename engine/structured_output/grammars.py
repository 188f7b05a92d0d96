"""Compiles grammars for one tokenizer with llguidance, within limits, or refuses them.

The HTTP server compiles grammars here too, so that it refuses the same grammars as the engine. docs/structured.md describes the
library's behaviour for each kind of grammar.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from engine.core.types import FreeBlock, Grammar, GrammarKind
from engine.structured_output.exact_schemas import exact_lark, exact_schema
from engine.structured_output.json_bounds import bounded_schema, with_bounded_schemas
from engine.structured_output.number_lengths import TokenDigits
from engine.weights import UnsupportedModel, WeightsError
from engine.weights.stored_tokenizer import load_tokenizer

_MAX_REASON_CHARS = 500
_MAX_COMPILED = 32
_INNER = "constrained"  # the name of a grammar inside another
# Bounds of memory (for lexer states) and of the time of one mask. A text that exceeds a limit ends with an error.
_LIMITS = LLParserLimits(max_lexer_states=20_000, max_grammar_size=100_000, step_lexer_fuel=100_000, verbose_errors=False)
# A rule's attribute that the library parses and ignores. Brackets in strings and patterns before it do not end the list.
_IGNORED_ATTRIBUTE = re.compile(
    r"""^[^#\n"/\[]*\[(?:"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)*/|[^\]\n"/])*?\b(temperature)\b""", re.MULTILINE
)


class BadGrammar(ValueError):
    """The grammar cannot be used; the message is the reason."""


Vocabulary = LLTokenizer  # the bytes of every token, as a trie


@dataclass(frozen=True, slots=True)
class VocabularySource:
    """The source of a vocabulary: the tokenizers library's JSON, the number of logits, the model's end tokens."""

    tokenizer_json: str
    num_rows: int
    eos_token_ids: tuple[int, ...]

    def load(self) -> Vocabulary:
        """Return the vocabulary. Takes seconds. Raises BadGrammar if the tokenizer cannot be read."""
        try:
            return LLTokenizer(self.tokenizer_json, n_vocab=self.num_rows, eos_token=list(self.eos_token_ids))
        except ValueError as error:
            raise BadGrammar(_bounded(f"this model's tokenizer does not support grammars: {error}")) from error


def source_of(tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> VocabularySource:
    """Return the source of a tokenizer for a model with `vocab_size` logits.

    A grammar never allows ids beyond the tokenizer's tokens. Raises BadGrammar for a tokenizer of another library.
    """
    inner = copy(getattr(tokenizer, "backend_tokenizer", None))
    if inner is None:
        raise BadGrammar("this model's tokenizer does not support grammars: it is not a fast tokenizer")
    inner.no_padding()
    inner.no_truncation()
    return VocabularySource(inner.to_str(), max(vocab_size, len(tokenizer)), tuple(eos_token_ids))


def vocabulary_loader(folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Callable[[], Vocabulary]:
    """Return a function that loads the vocabulary from a model's folder; it raises BadGrammar if that fails."""

    def load() -> Vocabulary:
        try:
            tokenizer = load_tokenizer(folder)
        except (WeightsError, UnsupportedModel) as error:
            raise BadGrammar(_bounded(f"{error}")) from error
        return source_of(tokenizer, vocab_size, eos_token_ids).load()

    return load


class CompiledGrammars:
    """Owns the most recently used grammars. Thread-safe."""

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        """`load` is called for the first grammar and returns the vocabulary."""
        self._load = load
        self._vocabulary: Vocabulary | None = None
        self._token_digits: TokenDigits | None = None
        self._matchers: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = Lock()

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary; raises BadGrammar if it cannot be loaded."""
        if self._vocabulary is None:
            self._vocabulary = self._load()
        return self._vocabulary

    @property
    def token_digits(self) -> TokenDigits:
        """The digits of the vocabulary's tokens; raises BadGrammar as `vocabulary` does."""
        if self._token_digits is None:
            self._token_digits = TokenDigits(self.vocabulary)
        return self._token_digits

    def matcher(self, grammar: Grammar, *, is_new: bool = False) -> LLMatcher:
        """Return a matcher before the first token, with the grammar's shared lexer, or a new one if `is_new`.

        Raises BadGrammar.
        """
        with self._lock:
            found = None if is_new else self._matchers.get(grammar)
        if found is None:
            found = compiled(self.vocabulary, grammar)  # outside the lock, because it is slow
        with self._lock:
            self._matchers[grammar] = found
            self._matchers.move_to_end(grammar)
            if len(self._matchers) > _MAX_COMPILED:
                self._matchers.popitem(last=False)
        return found.deep_copy()


def no_grammars() -> CompiledGrammars:
    """Return an object that refuses every grammar, for an engine without a tokenizer."""

    def load() -> Vocabulary:
        raise BadGrammar("this engine has no tokenizer, so grammars are not supported")

    return CompiledGrammars(load)


def compiled(vocabulary: Vocabulary, grammar: Grammar) -> LLMatcher:
    """Return a matcher before the first token; raise BadGrammar with the library's reason."""
    try:
        matcher = LLMatcher(vocabulary, _source(grammar), log_level=0, limits=_LIMITS)
    except (ValueError, RecursionError) as error:
        raise BadGrammar(_bounded(str(error))) from error
    problems = [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings()
    if problems:
        raise BadGrammar(_bounded("; ".join(map(_plain, problems))))
    return matcher


def require_first_mask(matcher: LLMatcher) -> None:
    """Raise BadGrammar if the library fails to compute the mask of the first token."""
    matcher.compute_bitmask()
    if matcher.is_error():
        raise BadGrammar(_bounded(matcher.get_error()))


def _source(grammar: Grammar) -> str:
    """Return the grammar in llguidance's format."""
    source = _source_without_block(grammar)
    if grammar.block is None:
        return source
    inner = [{"lark_grammar": source}] if grammar.kind is GrammarKind.LARK else json.loads(source)["grammars"]
    first, *others = inner
    outer = {"name": "outer", "lark_grammar": _with_block(grammar.block)}
    return json.dumps({"grammars": [outer, {**first, "name": _INNER}, *others]})


def _with_block(block: FreeBlock) -> str:
    """Return the Lark grammar of a free block and the constrained text, which is a grammar of its own. The block cannot spell its
    end, so a reader of the text finds the same end.
    """
    free = f'{block.opening or ""} FREE {block.closing} "\\n\\n" @{_INNER}'
    start = free if block.opening is None else f"@{_INNER} | {free}"
    return f"start: {start}\nFREE: /(?s:.*)/ & ~/(?s:.*){_literal(block.closing)}(?s:.*)/\n"


def _source_without_block(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema(bounded_schema('{"type": "object"}'))
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(bounded_schema(exact_schema(grammar.text)), overrides={"lenient": False})
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.CHOICE:
            return LLMatcher.grammar_from_regex("|".join(map(_literal, json.loads(grammar.text))))
        case GrammarKind.LARK:
            if found := _IGNORED_ATTRIBUTE.search(grammar.text):
                raise ValueError(f"the attribute {found[1]} of a rule is not supported")
            return LLMatcher.grammar_from_lark(with_bounded_schemas(exact_lark(_as_lark(grammar.text))))


def _as_lark(text: str) -> str:
    """Return a grammar that may be GBNF as Lark; raise ValueError if it is neither."""
    try:
        return any_to_lark(text)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(str(error)) from error


def _literal(text: str) -> str:
    """Return a regular expression that matches only this text."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _plain(problem: str) -> str:
    """Return one of the library's reasons without the library's internal expressions."""
    if problem.startswith("Unable to determine if regex is empty"):
        return "the pattern, format, minLength and maxLength of a string are too complex in combination"
    return problem.partition(":  (And ")[0]


def _bounded(reason: str) -> str:
    return reason if len(reason) <= _MAX_REASON_CHARS else f"{reason[:_MAX_REASON_CHARS]}..."
