"""The support of tools by a model's chat template, found by rendering a conversation with a tool and parsing the result.

A template shows tools if its output contains the tool's name, and calls if it contains the call's name. The syntax of calls is
the one whose reader parses the call that the template wrote.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from types import EllipsisType
from typing import Any

from server.text.codec import TextCodec, TextError
from server.tool_calls.markup_reader import MarkupReader
from server.tool_calls.syntaxes import SYNTAXES, CallSyntax, ToolCallParser

_TOOL, _CALL, _ANSWER = "probed_tool", "probed_call", "probed answer"
_SCHEMA = {"type": "object", "properties": {"place": {"type": "string", "description": "A place."}}, "required": ["place"]}
_FUNCTION = {"type": "function", "function": {"name": _TOOL, "description": "Looks.", "parameters": _SCHEMA}}
_USER_MESSAGE = {"role": "user", "content": "Look there."}
_ANSWER_MESSAGE = {"role": "assistant", "content": _ANSWER}
_CALL_MESSAGE = {
    "role": "assistant",
    "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": _CALL, "arguments": {"place": "there"}}}],
}
_NUM_ID_CHARS = 9


@dataclass(frozen=True, slots=True)
class CallShape:
    """How a template takes calls of earlier turns, where it differs from transformers' format.

    DeepSeek's take arguments as JSON text, and some of them the content beside calls as null. Mistral's refuse ids that are not
    nine letters or digits. Some templates refuse a message without content.
    """

    content: str | EllipsisType | None = ...  # beside calls, in place of missing content; `...` leaves it missing
    has_text_arguments: bool = False
    has_short_ids: bool = False

    def shaped(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages as the template takes them."""
        return list(messages) if self == CallShape() else [self._message(message) for message in messages]

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        shaped = dict(message)
        if "tool_calls" in message:
            shaped["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
            if self.content is not ... and not message.get("content"):
                shaped["content"] = self.content
        if "tool_call_id" in message:
            shaped["tool_call_id"] = self._id(message["tool_call_id"])
        return shaped

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        if self.has_text_arguments and not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "id": self._id(call["id"]), "function": function}

    def _id(self, call_id: str) -> str:
        is_fit = not self.has_short_ids or (len(call_id) == _NUM_ID_CHARS and call_id.isascii() and call_id.isalnum())
        return call_id if is_fit else hashlib.sha256(call_id.encode()).hexdigest()[:_NUM_ID_CHARS]


_SHAPES = [CallShape(*shape) for shape in product((..., "", None), (False, True), (False, True))]


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """Whether the template shows tools and calls of earlier turns, and the syntax of calls, if it is known.

    `marker_tokens` are the parts of the markup that are single tokens, with their ids.
    """

    shows_tools: bool = False
    shows_calls: bool = False
    syntax: CallSyntax | None = None
    marker_tokens: Mapping[str, int] = field(default_factory=dict)
    shape: CallShape = CallShape()


def tool_support(codec: TextCodec, parser: ToolCallParser) -> ToolSupport:
    """Return the support of the model's template. `parser` names the syntax, or is `auto` to detect it, or `none`."""
    shows_tools = _TOOL in _rendered(codec, [_USER_MESSAGE], [_FUNCTION])
    shape, written = _shape_and_text(codec)
    syntax = _syntax_of(_answer(codec, written)) if parser == "auto" else SYNTAXES.get(parser)
    markers = codec.added_tokens.intersection(syntax.markers if syntax else ())
    return ToolSupport(shows_tools, bool(written), syntax, {marker: codec.encode_more(marker)[0] for marker in markers}, shape)


def _rendered(codec: TextCodec, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
    try:
        return codec.rendered(messages, tools)
    except TextError:
        return ""


def _shape_and_text(codec: TextCodec) -> tuple[CallShape, str]:
    """Return the first shape in which the template shows a call, and the conversation that it writes; else an empty text."""
    for shape in _SHAPES:
        written = _rendered(codec, shape.shaped([_USER_MESSAGE, _CALL_MESSAGE]), [_FUNCTION])
        if _CALL in written:
            return shape, written
    return CallShape(), ""


def _answer(codec: TextCodec, written: str) -> str:
    """Return the assistant's part of a conversation, found by another answer in its place; all of it if they differ earlier."""
    before, answer, _ = _rendered(codec, [_USER_MESSAGE, _ANSWER_MESSAGE], [_FUNCTION]).partition(_ANSWER)
    return written.removeprefix(before) if answer else written


def _syntax_of(answer: str) -> CallSyntax | None:
    for syntax in SYNTAXES.values():
        reader = MarkupReader(syntax.forced_forms, {_CALL: _SCHEMA})
        if [piece.name for piece in (*reader.feed(answer).calls, *reader.close().calls) if piece.name] == [_CALL]:
            return syntax
    return None
