"""Grammars of texts with tool calls in the markup of Hermes and Qwen, in llguidance's dialect of Lark. Knows text only.

Whitespace is that of chat templates (transformers' `tojson`), so that a forced call looks like the calls in a model's prompts.
"""

import json
from collections.abc import Container, Mapping
from typing import Any

from server.schemas.exact_json import exactly_dumped
from server.tool_calls.hermes import CLOSE, OPEN

Schemas = Mapping[str, Mapping[str, Any]]  # the schema of each function's arguments

_AS_TOJSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def forced_calls(schemas: Schemas, is_one: bool, tokens: Container[str]) -> str:
    """Return the grammar of a text of calls alone: exactly one call, or at least one."""
    start = "call" if is_one else r'call ("\n" call)*'
    return f"start: {start}\n{_calls(schemas, tokens)}"


def free_text_with_calls(schemas: Schemas, tokens: Container[str]) -> str:
    """Return the grammar of free text with any calls in it. The opening markup must be a token, so that text cannot spell it."""
    assert OPEN in tokens
    return f"start: TEXT (call TEXT)*\nTEXT: /(?s:.*)/ & ~/(?s:.*){OPEN}(?s:.*)/\n{_calls(schemas, tokens)}"


def _calls(schemas: Schemas, tokens: Container[str]) -> str:
    """Return the rules of a call. Markup that is a single token is named as such; spelled out, it would be several tokens."""
    opening, closing = (marker if marker in tokens else json.dumps(marker) for marker in (OPEN, CLOSE))
    rules = [rf'call: {opening} "\n" ({" | ".join(f"call_{at}" for at in range(len(schemas)))}) "\n" {closing}']
    for at, (name, schema) in enumerate(schemas.items()):
        head = json.dumps(f'{{"name": "{name}", "arguments": ')
        arguments = exactly_dumped({**schema, "type": "object", "x-guidance": _AS_TOJSON})
        rules += [f'call_{at}: {head} arguments_{at} "}}"', f"arguments_{at}: %json {arguments}"]
    return "\n".join([*rules, ""])
