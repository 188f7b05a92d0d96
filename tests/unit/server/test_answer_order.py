"""Texts and calls keep their order in the formats that have it, however the engine's steps group them."""

from collections.abc import Sequence

import pytest

from engine.core.types import RequestDefaults
from server.answer_formats.anthropic import MessagesFormat
from server.answer_formats.responses import ResponsesFormat
from server.generation.sample import Piece
from server.schemas.answer import Usage
from server.schemas.responses import ResponsesRequest
from server.text.parsed_text import CallPiece, ReadText, in_order

BEGIN, END = CallPiece(0, "f"), CallPiece(0, arguments='{"a": 1}')
# A token may end the arguments of a call and begin the text behind it.
PARTS = (
    ReadText("Look: ", (BEGIN,)),
    ReadText(".", (END,)),
    ReadText(" And"),
    ReadText("", (CallPiece(1, "g"), CallPiece(1, arguments="{}"))),
)
GROUPINGS = [[PARTS], [(part,) for part in PARTS], [PARTS[:1], PARTS[1:]], [PARTS[:2], PARTS[2:]]]


def piece_of(parts: Sequence[ReadText]) -> Piece:
    calls = tuple(call for part in parts for call in part.calls)
    return Piece(0, "".join(part.content for part in parts), calls=calls, parts=tuple(parts))


def test_rest_of_call_precedes_text():
    assert [*in_order(PARTS)] == ["Look: ", BEGIN, END, ". And", *PARTS[3].calls]


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_messages_keep_the_order(grouping: Sequence[Sequence[ReadText]]):
    """The bug: the end of the arguments became text where one token had both."""
    form = MessagesFormat("m", 64)
    usage = {"usage": Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2)}
    for parts in grouping:
        assert [*form.chunks(piece_of(parts), usage)]
    blocks = [(block.type, block.text) for block in form._blocks]
    assert blocks == [("text", "Look: "), ("tool_use", '{"a": 1}'), ("text", ". And"), ("tool_use", "{}")]


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_responses_keep_the_order(grouping: Sequence[Sequence[ReadText]]):
    """The bug: text behind a call came before it if one step had both, so speculation changed the order."""
    form = ResponsesFormat(ResponsesRequest.model_validate({"model": "m", "input": "x"}), RequestDefaults(), is_stored=False)
    for parts in grouping:
        assert [*form.events(piece_of(parts))]
    assert [item.type for item in form._items] == ["message", "function_call", "message", "function_call"]
    assert [getattr(item, "arguments", None) for item in form._items] == [None, '{"a": 1}', None, "{}"]
