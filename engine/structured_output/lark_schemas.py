"""Finds the JSON schemas (`%json {...}`) in Lark grammars."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

# Lark comments, strings, patterns and special tokens, in which %json is plain text; and %json itself.
_LARK = re.compile(r"""//[^\n]*|\#[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\])+/|<[^<>\s]+>|(?P<json>%json\s*)""", re.DOTALL)


def schemas_in(lark: str, decoder: json.JSONDecoder, *, skips_invalid: bool = False) -> Iterator[tuple[int, int, Any]]:
    """Yield start, end and value of each schema in a Lark grammar; raise ValueError for invalid JSON unless it is skipped."""
    end = 0
    while found := _LARK.search(lark, end):
        end = found.end()
        if found["json"] is not None:
            try:
                schema, end = decoder.raw_decode(lark, end)
            except ValueError:
                if not skips_invalid:
                    raise
                continue
            yield found.end(), end, schema


def with_schemas_replaced(
    lark: str, replace: Callable[[Any], str], decoder: json.JSONDecoder, *, skips_invalid: bool = False
) -> str:
    """Return a Lark grammar with another text for each schema. Raises the errors of `schemas_in`."""
    parts, end = [], 0
    for start, after, schema in schemas_in(lark, decoder, skips_invalid=skips_invalid):
        parts += [lark[end:start], replace(schema)]
        end = after
    return "".join([*parts, lark[end:]])
