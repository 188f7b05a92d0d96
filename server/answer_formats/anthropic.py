"""The wire format of /v1/messages: an answer is a list of blocks; a stream begins, fills and ends one block after another."""

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from engine.core.types import FinishReason
from server.answer_formats.common import InChunk, usage_of
from server.generation.generation import Generation
from server.generation.sample import Piece
from server.schemas.answer import Usage
from server.schemas.anthropic import AnswerBlock, MessagesAnswer, MessagesEvent, MessagesUsage, StopReason
from server.text.parsed_text import in_order

_SIGNATURE = "unsigned"  # clients give thinking back only with a signature; this server verifies none
_INVALID = "INVALID_JSON"  # Anthropic's name for arguments that are no JSON object
# By type of a block: the field that deltas add to, the type of a delta, and the field of a delta.
_DELTAS = {
    "text": ("text", "text_delta", "text"),
    "thinking": ("thinking", "thinking_delta", "thinking"),
    "tool_use": ("input", "input_json_delta", "partial_json"),
}


@dataclass(slots=True)
class OpenBlock:
    """A block of an answer: the fields that it begins with, and the text that its deltas add."""

    type: str
    fields: dict[str, Any]
    text: str = ""

    @property
    def start(self) -> dict[str, Any]:
        """The block as its stream begins."""
        field, _, _ = _DELTAS[self.type]
        return {"type": self.type, **self.fields, field: {} if self.type == "tool_use" else ""}

    @property
    def whole(self) -> AnswerBlock:
        """The whole block. Arguments that were cut off keep their complete part, as the official client reads a stream."""
        field, _, _ = _DELTAS[self.type]
        value: object = self.text
        if self.type == "tool_use" and (value := _object_of(self.text, is_cut=True)) is None:
            value = {_INVALID: self.text}
        signature = {"signature": _SIGNATURE} if self.type == "thinking" else {}
        return AnswerBlock.model_validate({"type": self.type, **self.fields, field: value, **signature})


class MessagesFormat:
    """One answer. Collects its blocks. An answer that is cut off with fewer tokens than `token_limit` had no more room."""

    ends_with_done = False

    def __init__(self, model: str, token_limit: int) -> None:
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}
        self._token_limit = token_limit
        self._blocks: list[OpenBlock] = []
        self._is_begun = False

    def chunks(self, piece: Piece, usage: InChunk) -> Iterator[MessagesEvent]:
        """Yield the start of the message before the first block, then the blocks, then their end with the usage so far."""
        counts: Usage = usage["usage"]
        if not self._is_begun:
            self._is_begun = True
            yield _event("message_start", message=self._message(counts, [], None, None).model_dump(mode="json"))
            yield _event("ping")
        yield from self._block_events(piece)
        if piece.finish is not None:
            yield from self._end_of_block()
            stop_reason, stop_sequence = self._end(piece, counts)
            delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
            yield _event("message_delta", delta=delta, usage=_messages_usage(counts).model_dump())

    def usage_chunk(self, _generation: Generation) -> MessagesEvent:
        """Return a stream's last event. The one before has the counts."""
        return _event("message_stop")

    def answer(self, pieces: Sequence[Piece], generation: Generation) -> MessagesAnswer:
        """Return the whole answer, with the blocks of its stream."""
        (piece,) = pieces
        counts = usage_of(generation)
        for _ in self._block_events(piece):
            pass
        return self._message(counts, [block.whole for block in self._blocks], *self._end(piece, counts))

    def _message(
        self, counts: Usage, blocks: list[AnswerBlock], stop_reason: StopReason | None, stop_sequence: str | None
    ) -> MessagesAnswer:
        end = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        return MessagesAnswer.model_validate({**self._head, "content": blocks, **end, "usage": _messages_usage(counts)})

    def _block_events(self, piece: Piece) -> Iterator[MessagesEvent]:
        yield from self._text_events("thinking", piece.reasoning)
        for one in in_order(piece.parts):
            if isinstance(one, str):
                yield from self._text_events("text", one)
                continue
            if one.name is not None:
                yield from self._begin(OpenBlock("tool_use", {"id": f"toolu_{uuid.uuid4().hex[:24]}", "name": one.name}))
            yield from self._add(one.arguments)

    def _text_events(self, kind: str, text: str) -> Iterator[MessagesEvent]:
        """Yield the events of text of a kind; a new block begins if the last one is of another kind."""
        if text and not (self._blocks and self._blocks[-1].type == kind):
            yield from self._begin(OpenBlock(kind, {"signature": ""} if kind == "thinking" else {}))
        yield from self._add(text)

    def _begin(self, block: OpenBlock) -> Iterator[MessagesEvent]:
        yield from self._end_of_block()
        self._blocks.append(block)
        yield self._block_event("content_block_start", content_block=block.start)

    def _add(self, text: str) -> Iterator[MessagesEvent]:
        if text:
            block = self._blocks[-1]
            block.text += text
            _, kind, field = _DELTAS[block.type]
            yield self._block_event("content_block_delta", delta={"type": kind, field: text})

    def _end_of_block(self) -> Iterator[MessagesEvent]:
        if not self._blocks:
            return
        if self._blocks[-1].type == "thinking":
            yield self._block_event("content_block_delta", delta={"type": "signature_delta", "signature": _SIGNATURE})
        yield self._block_event("content_block_stop")

    def _block_event(self, kind: str, **fields: Any) -> MessagesEvent:
        return _event(kind, index=len(self._blocks) - 1, **fields)

    def _end(self, piece: Piece, counts: Usage) -> tuple[StopReason, str | None]:
        """Return the reason and the stop string. The reason `tool_use` promises that the arguments of the calls are complete."""
        if isinstance(piece.stop_reason, str):
            return "stop_sequence", piece.stop_reason
        if piece.finish is FinishReason.LENGTH:
            return "max_tokens" if counts.completion_tokens >= self._token_limit else "model_context_window_exceeded", None
        calls = [block for block in self._blocks if block.type == "tool_use"]
        return "tool_use" if calls and not _is_cut(calls[-1].text) else "end_turn", None


def _event(kind: str, **fields: Any) -> MessagesEvent:
    return MessagesEvent.model_validate({"type": kind, **fields})


def _messages_usage(counts: Usage) -> MessagesUsage:
    num_cached = counts.prompt_tokens_details.cached_tokens if counts.prompt_tokens_details else 0
    num_thinking = counts.completion_tokens_details.reasoning_tokens if counts.completion_tokens_details else 0
    return MessagesUsage(
        input_tokens=counts.prompt_tokens - num_cached,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=num_cached,
        output_tokens=counts.completion_tokens,
        output_tokens_details={"thinking_tokens": num_thinking},
    )


def _is_cut(arguments: str) -> bool:
    """Return whether arguments are the beginning of a JSON object, but not a whole one."""
    return _object_of(arguments, is_cut=False) is None and _object_of(arguments, is_cut=True) is not None


def _object_of(arguments: str, is_cut: bool) -> dict[str, Any] | None:
    """Return the JSON object of a text, or with `is_cut` its complete part; None if the text is none."""
    try:
        value = from_json(arguments or "{" * is_cut, allow_inf_nan=False, allow_partial=is_cut)
        json.dumps(value, allow_nan=False)  # an answer cannot have a number without limits
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
