"""Schemas as serving compiles them, over a tokenizer in which every byte is a token."""

import json
from functools import cache
from typing import Any

from llguidance import LLMatcher

from engine.core.types import Grammar, GrammarKind
from engine.structured_output.grammars import Vocabulary, compiled, source_of
from tests.tokenizers_for_tests import byte_level


@cache
def byte_vocabulary() -> Vocabulary:
    return source_of(byte_level(), len(byte_level()), [byte_level().eos_token_id]).load()


def matcher_of(schema: Any) -> LLMatcher:
    """Return a matcher of a schema, or of its text; raises BadGrammar."""
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return compiled(byte_vocabulary(), Grammar(GrammarKind.JSON_SCHEMA, text))


def accepts(matcher: LLMatcher, text: str) -> bool:
    """Return whether the tokens of the text can come, one after another, and the text can end there."""
    tried = matcher.deep_copy()
    tokens = byte_vocabulary().tokenize_str(text)
    return tried.try_consume_tokens(tokens) == len(tokens) and tried.is_accepting()


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
