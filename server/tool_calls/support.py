"""What a model's chat template supports of tools, found by rendering a conversation with a tool and parsing the result.

A template shows tools if its output contains the tool's name, and calls if it contains the call's name. The syntax of calls is
the one whose reader parses the call that the template wrote.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from server.text.codec import TextCodec, TextError
from server.tool_calls.syntaxes import SYNTAXES, CallSyntax, ToolCallParser

_TOOL, _CALL = "probed_tool", "probed_call"
_SCHEMA = {"type": "object", "properties": {"place": {"type": "string", "description": "A place."}}, "required": ["place"]}
_FUNCTION = {"type": "function", "function": {"name": _TOOL, "description": "Looks.", "parameters": _SCHEMA}}
_USER_MESSAGE = {"role": "user", "content": "Look there."}
_CALL_MESSAGE = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": _CALL, "arguments": {"place": "there"}}}],
}


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """Whether the template shows tools and calls of earlier turns, and the syntax of calls, if it is known.

    `marker_tokens` are the parts of the markup that are single tokens.
    """

    shows_tools: bool = False
    shows_calls: bool = False
    syntax: CallSyntax | None = None
    marker_tokens: frozenset[str] = frozenset()


def tool_support(codec: TextCodec, parser: ToolCallParser) -> ToolSupport:
    """Return what the model's template supports. `parser` names the syntax, or is `auto` to detect it, or `none`."""
    shows_tools = _TOOL in _rendered(codec, [_USER_MESSAGE], [_FUNCTION])
    written = _rendered(codec, [_USER_MESSAGE, _CALL_MESSAGE], [_FUNCTION])
    syntax = _syntax_of(written) if parser == "auto" else SYNTAXES.get(parser)
    marker_tokens = codec.added_tokens.intersection(syntax.markers if syntax else ())
    return ToolSupport(shows_tools, _CALL in written, syntax, marker_tokens)


def _rendered(codec: TextCodec, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
    try:
        return codec.rendered(messages, tools)
    except TextError:
        return ""


def _syntax_of(written: str) -> CallSyntax | None:
    for syntax in SYNTAXES.values():
        reader = syntax.reader([_CALL], None)
        if [piece.name for piece in (*reader.feed(written).calls, *reader.close().calls) if piece.name] == [_CALL]:
            return syntax
    return None
