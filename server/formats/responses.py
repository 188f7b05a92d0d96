"""The wire format of /v1/responses: one message; a stream has a fixed order of events around its text."""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from engine.core.types import FinishReason, RequestDefaults
from server.formats.common import InChunk, metrics_of, usage_of
from server.generation.generation import Generation
from server.generation.sample import Piece
from server.generation.sampling import chosen
from server.schemas.responses import OutputMessage, OutputText, ResponsesAnswer, ResponsesEvent, ResponsesRequest, ResponsesUsage

Status = Literal["in_progress", "completed", "incomplete"]


class ResponsesFormat:
    """One answer. Numbers the events of its stream and collects the text, which the last events repeat."""

    def __init__(self, body: ResponsesRequest, defaults: RequestDefaults) -> None:
        self._body = body
        self._defaults = defaults
        self._id = f"resp_{uuid.uuid4().hex}"
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._created_s = int(time.time())
        self._text = ""
        self._finish: FinishReason | None = None
        self._num_events = 0

    def chunks(self, piece: Piece, _usage: InChunk) -> Iterator[ResponsesEvent]:
        """Yield the opening events before the first text, then the text, then the closing events of the message."""
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        if not self._num_events:
            for name in ("created", "in_progress"):
                yield self._event(name, response=self._answer([]))
            yield self._event("output_item.added", output_index=0, item=self._message("in_progress", []))
            yield self._event("content_part.added", **place, part=OutputText(text=""))
        if piece.text:
            self._text += piece.text
            yield self._event("output_text.delta", **place, delta=piece.text, logprobs=[])
        if piece.finish is not None:
            self._finish = piece.finish
            yield self._event("output_text.done", **place, text=self._text, logprobs=[])
            yield self._event("content_part.done", **place, part=OutputText(text=self._text))
            yield self._event("output_item.done", output_index=0, item=self._whole_message())

    def usage_chunk(self, generation: Generation) -> ResponsesEvent:
        """Return a stream's last event: the whole answer."""
        return self._event(self._status, response=self._whole(generation))

    def answer(self, pieces: Sequence[Piece], generation: Generation) -> ResponsesAnswer:
        """Return the whole answer with every field set, so that all of them are written."""
        (piece,) = pieces
        self._text, self._finish = piece.text, piece.finish
        return ResponsesAnswer(**self._whole(generation).model_dump())

    @property
    def _status(self) -> Status:
        if self._finish is None:
            return "in_progress"
        return "incomplete" if self._finish is FinishReason.LENGTH else "completed"

    def _whole(self, generation: Generation) -> ResponsesAnswer:
        usage = usage_of(generation)
        responses_usage = ResponsesUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details={"cached_tokens": generation.num_cached_tokens, "cache_write_tokens": 0},
            output_tokens=usage.completion_tokens,
            output_tokens_details={"reasoning_tokens": generation.num_reasoning_tokens},
            total_tokens=usage.total_tokens,
        )
        return self._answer([self._whole_message()], usage=responses_usage, metrics=metrics_of(generation.acceptance))

    def _answer(self, output: list[OutputMessage], **rest: Any) -> ResponsesAnswer:
        body = self._body
        return ResponsesAnswer(
            id=self._id,
            created_at=self._created_s,
            status=self._status,
            incomplete_details={"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=body.model,
            output=output,
            temperature=chosen(body.temperature, self._defaults.temperature, 1.0),
            top_p=chosen(body.top_p, self._defaults.top_p, 1.0),
            user=body.user,
            **rest,
        )

    def _whole_message(self) -> OutputMessage:
        return self._message(self._status, [OutputText(text=self._text)])

    def _message(self, status: Status, content: list[OutputText]) -> OutputMessage:
        return OutputMessage(id=self._item_id, status=status, content=content)

    def _event(self, name: str, **fields: Any) -> ResponsesEvent:
        number, self._num_events = self._num_events, self._num_events + 1
        shown = {key: value.model_dump(mode="json") if hasattr(value, "model_dump") else value for key, value in fields.items()}
        return ResponsesEvent(type=f"response.{name}", sequence_number=number, **shown)
