"""Adds limits to JSON schemas for llguidance: exact string formats, and bounded whitespace and numbers.

Without limits a model may write whitespace or digits until its token limit. The answer is then no JSON although the grammar
allowed each token.
"""

import json
from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache
from typing import Any

from engine.core.types import Grammar, GrammarKind
from engine.structured_output.lark_schemas import schemas_in, with_schemas_replaced
from engine.structured_output.string_formats import without_formats

# Between two parts: nothing, a space, or a line end and an indent. The library matches it at most once at each place.
WHITESPACE = r" |\r?\n(?: {0,40}|\t{0,20})"
MAX_DIGITS = 24  # consecutive digits of a number: enough for every 64-bit integer and every double
_WHITESPACE_OPTIONS = frozenset({"whitespace_flexible", "whitespace_pattern"})
_DECODER = json.JSONDecoder()


def bounded_schema(text: str) -> str:
    """Return the text of a schema with limits. A text that is no JSON is returned unchanged, and the library refuses it."""
    schemas = _decoded(text)
    return json.dumps(_bounded(schemas[0])) if schemas else text


def with_bounded_schemas(lark: str) -> str:
    """Return a Lark grammar in which the schemas have limits."""
    return with_schemas_replaced(lark, lambda schema: json.dumps(_bounded(schema)), _DECODER, skips_invalid=True)


@lru_cache(maxsize=64)
def most_digits(grammar: Grammar) -> int:
    """Return how many consecutive digits a number in a grammar's JSON may have: MAX_DIGITS, or more if its schema has more."""
    if grammar.kind is GrammarKind.LARK:
        schemas = [schema for _, _, schema in schemas_in(grammar.text, _DECODER, skips_invalid=True)]
    else:
        schemas = _decoded(grammar.text)
    return max([MAX_DIGITS, *map(_width, _numbers(schemas))])


def _decoded(text: str) -> list[Any]:
    """Return a list with the schema of a text, or an empty one if the text is no JSON."""
    try:
        return [_DECODER.decode(text)]
    except ValueError:
        return []


def _bounded(schema: Any) -> Any:
    found = without_formats(schema)
    if found is True:
        found = {}
    options = found.get("x-guidance", {}) if isinstance(found, dict) else None
    if isinstance(options, dict) and not options.keys() & _WHITESPACE_OPTIONS:
        found["x-guidance"] = {**options, "whitespace_pattern": WHITESPACE}
    return found


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def _width(number: int | float) -> int:
    """Return the number of digits on the longer side of a number's decimal point."""
    whole, _, fraction = f"{Decimal(repr(number)):f}".lstrip("-").partition(".")
    return max(len(whole), len(fraction))
