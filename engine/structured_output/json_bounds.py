"""What a JSON schema asks of llguidance beside its own words: formats, and whitespace and numbers that end.

A model may write whitespace or digits until its token limit, and the answer is no JSON although a grammar allowed each token.
Knows schemas, and Lark grammars as far as schemas stand in them. Does not know llguidance.
"""

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache
from typing import Any

from engine.core.types import Grammar, GrammarKind
from engine.structured_output.string_formats import without_formats

# Between two parts: nothing, a space, or a line's end and an indent. The library takes it at most once at each place.
WHITESPACE = r" |\r?\n(?: {0,40}|\t{0,20})"
MAX_DIGITS = 24  # in a row, of a number; every 64-bit integer and every double can be written with them
_WHITESPACE_OPTIONS = frozenset({"whitespace_flexible", "whitespace_pattern"})
# The tokens of a Lark grammar in which %json could stand without meaning it, and %json itself.
_LARK = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|(?:#|//)[^\n]*|<[^<>\s]+>|(%json)\s*')
_DECODER = json.JSONDecoder()


def bounded_schema(text: str) -> str:
    """Return the text of a schema as the library is asked for it; a text that is no JSON as it is, for the library to refuse."""
    schemas = _decoded(text)
    return json.dumps(_bounded(schemas[0])) if schemas else text


def with_bounded_schemas(lark: str) -> str:
    """Return a Lark grammar with its schemas as the library is asked for them."""
    parts, end = [], 0
    for start, after, schema in _schemas_in(lark):
        parts += [lark[end:start], json.dumps(_bounded(schema))]
        end = after
    return "".join([*parts, lark[end:]])


@lru_cache(maxsize=64)
def most_digits(grammar: Grammar) -> int:
    """Return how many digits in a row a number of a grammar's JSON may have: more where a number of its schema has more."""
    if grammar.kind is GrammarKind.LARK:
        schemas = [schema for _, _, schema in _schemas_in(grammar.text)]
    else:
        schemas = _decoded(grammar.text)
    return max([MAX_DIGITS, *map(_width, _numbers(schemas))])


def _decoded(text: str) -> list[Any]:
    """Return the schema of a text, alone, or nothing if it is no JSON."""
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


def _schemas_in(lark: str) -> Iterator[tuple[int, int, Any]]:
    """Yield each schema of a Lark grammar with where it begins and ends; what is no JSON is left to the library."""
    end = 0
    while found := _LARK.search(lark, end):
        end = found.end()
        if found[1]:
            try:
                schema, end = _DECODER.raw_decode(lark, end)
            except ValueError:
                continue
            yield found.end(), end, schema


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def _width(number: int | float) -> int:
    """Return the digits of the longer side of a number's decimal point."""
    whole, _, fraction = f"{Decimal(repr(number)):f}".lstrip("-").partition(".")
    return max(len(whole), len(fraction))
