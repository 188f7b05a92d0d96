"""The wire format of tool calls, whole and in a stream."""

import uuid
from collections.abc import Sequence

from server.schemas.tools import AnswerCall, AnswerFunction, CallDelta, FunctionDelta
from server.text.parsed_text import CallPiece


def call_delta(piece: CallPiece) -> CallDelta:
    """Return a stream's delta of a piece: a call begins with its id and name, then its arguments follow."""
    if piece.name is None:
        return CallDelta(index=piece.index, function=FunctionDelta(arguments=piece.arguments))
    function = FunctionDelta(name=piece.name, arguments=piece.arguments)
    return CallDelta(index=piece.index, id=new_call_id(), type="function", function=function)


def function_delta(piece: CallPiece) -> FunctionDelta:
    """Return a stream's delta of a piece in the form before tools: a call begins with its name."""
    named = {} if piece.name is None else {"name": piece.name}
    return FunctionDelta(arguments=piece.arguments, **named)


def whole_calls(pieces: Sequence[CallPiece]) -> list[AnswerCall]:
    """Return the calls that the pieces make up."""
    calls: list[AnswerCall] = []
    for piece in pieces:
        if piece.name is not None:
            function = AnswerFunction(name=piece.name, arguments=piece.arguments)
            calls.append(AnswerCall(id=new_call_id(), type="function", function=function))
        else:
            calls[piece.index].function.arguments += piece.arguments
    return calls


def new_call_id() -> str:
    """Return a unique id for a call."""
    return f"call_{uuid.uuid4().hex[:24]}"
