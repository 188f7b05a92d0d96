"""The wire format of /v1/responses: output items that grow with the pieces of one sample, and the events that describe it."""

import time
import uuid
from collections.abc import Iterator
from typing import Any, Literal

from engine.core.types import FinishReason, RequestDefaults
from server.answer_formats.calls import new_call_id
from server.answer_formats.chat import token_logprob
from server.answer_formats.common import metrics_of, usage_of
from server.generation.generation import Generation
from server.generation.sample import Piece
from server.generation.sampling_fields import chosen
from server.http.errors import ApiError
from server.schemas.chat import TokenLogprob
from server.schemas.responses import ResponsesRequest
from server.schemas.responses_answer import (
    OutputCall,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    ResponseFailure,
    ResponsesAnswer,
    ResponsesEvent,
    ResponsesUsage,
)
from server.schemas.responses_items import Status
from server.text.parsed_text import CallPiece, in_order


class ResponsesFormat:
    """One response. `events` must get every piece, also where no stream is sent: the answer is made of the items.

    Items follow one another: reasoning, a message, calls. Only the last one is open.
    """

    def __init__(self, body: ResponsesRequest, defaults: RequestDefaults, is_stored: bool) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self._body = body
        self._defaults = defaults
        self._is_stored = is_stored
        self._created_s = int(time.time())
        self._items: list[OutputMessage | OutputCall | OutputReasoning] = []
        self._open: OutputMessage | OutputCall | OutputReasoning | None = None  # the last item, until it ends
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text is not sent yet
        self._status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
        self._num_events = 0

    def events(self, piece: Piece) -> Iterator[ResponsesEvent]:
        """Yield the events of a piece, and before the first piece the events of the beginning."""
        if not self._num_events:
            for name in ("created", "in_progress"):
                yield self._event(name, response=self._answer())
        if self._body.has_logprobs:
            self._logprobs += map(token_logprob, piece.entries)
        yield from self._reasoning(piece.reasoning)
        for one in in_order(piece.parts):
            yield from self._text(one) if isinstance(one, str) else self._call(one)
        if piece.finish is not None:
            if not self._items or (self._logprobs and isinstance(self._open, OutputMessage)):
                yield from self._text("")
            status: Status = "incomplete" if piece.finish is FinishReason.LENGTH else "completed"
            self._status = status
            yield from self._close(status)

    def last_event(self, generation: Generation) -> ResponsesEvent:
        """Return a stream's last event: the whole answer."""
        return self._event(self._status, response=self.answer(generation))

    def failure(self, error: ApiError) -> Iterator[ResponsesEvent]:
        """Yield the events of a failure. The first one has OpenAI's flat form, and the form that clients raise as an error."""
        detail = error.body.error
        self._status = "failed"
        if self._open is not None:
            self._open.status = "incomplete"
        flat = {"code": detail.code, "message": detail.message, "param": detail.param, "error": detail.model_dump()}
        yield ResponsesEvent.model_validate({"type": "error", "sequence_number": self._next_number(), **flat})
        yield self._event("failed", response=self._answer(error=ResponseFailure(code="server_error", message=detail.message)))

    def answer(self, generation: Generation) -> ResponsesAnswer:
        """Return the whole answer with every field set, so that all of them are written."""
        usage = usage_of(generation)
        responses_usage = ResponsesUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details={"cached_tokens": generation.num_cached_tokens, "cache_write_tokens": 0},
            output_tokens=usage.completion_tokens,
            output_tokens_details={"reasoning_tokens": generation.num_reasoning_tokens},
            total_tokens=usage.total_tokens,
        )
        ended_s = int(time.time()) if self._status == "completed" else None
        answer = self._answer(usage=responses_usage, metrics=metrics_of(generation.acceptance), completed_at=ended_s)
        return ResponsesAnswer(**answer.model_dump())

    @property
    def item_ids(self) -> list[str]:
        """The ids of the output items."""
        return [item.id for item in self._items]

    def _answer(self, **rest: Any) -> ResponsesAnswer:
        body = self._body
        choice = body.tool_choice
        text = body.text.model_dump(exclude_unset=True, by_alias=True) if body.text else {}
        return ResponsesAnswer(
            id=self.id,
            created_at=self._created_s,
            status=self._status,
            incomplete_details={"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=body.model,
            output=self._items,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning={"effort": body.reasoning and body.reasoning.effort, "summary": None},
            store=self._is_stored,
            temperature=chosen(body.temperature, self._defaults.temperature, 1.0),
            text={**text, "format": text.get("format") or {"type": "text"}},
            tool_choice=choice if isinstance(choice, str) else choice.model_dump() if choice is not None else "auto",
            tools=[{"type": "function", **tool.model_dump(exclude_unset=True)} for tool in body.functions],
            top_logprobs=body.top_logprobs or 0,
            top_p=chosen(body.top_p, self._defaults.top_p, 1.0),
            truncation=body.truncation or "disabled",
            user=body.user,
            **rest,
        )

    def _reasoning(self, text: str) -> Iterator[ResponsesEvent]:
        if not text:
            return
        item = self._open
        if not isinstance(item, OutputReasoning):
            item = OutputReasoning(id=f"rs_{uuid.uuid4().hex}", status="in_progress", content=[])
            yield from self._begin(item)
            item.content.append(ReasoningText(text=""))
            yield self._event("content_part.added", **self._place(0), part=item.content[0])
        item.content[0].text += text
        yield self._event("reasoning_text.delta", **self._place(0), delta=text)

    def _text(self, text: str) -> Iterator[ResponsesEvent]:
        """Yield the events of a text. An empty one is sent only for a message without text, or with log-probabilities."""
        item = self._open
        if not isinstance(item, OutputMessage):
            item = OutputMessage(id=f"msg_{uuid.uuid4().hex}", status="in_progress", content=[])
            yield from self._begin(item)
            item.content.append(OutputText(text=""))
            yield self._event("content_part.added", **self._place(0), part=item.content[0])
        if text or self._logprobs:
            logprobs, self._logprobs = self._logprobs, []
            item.content[0].text += text
            item.content[0].logprobs += logprobs
            yield self._event("output_text.delta", **self._place(0), delta=text, logprobs=logprobs)

    def _call(self, call: CallPiece) -> Iterator[ResponsesEvent]:
        if call.name is not None:
            item_id, call_id = f"fc_{uuid.uuid4().hex}", new_call_id()
            yield from self._begin(OutputCall(id=item_id, status="in_progress", call_id=call_id, name=call.name, arguments=""))
        assert isinstance(self._open, OutputCall)  # arguments follow the name of their call
        if call.arguments:
            self._open.arguments += call.arguments
            yield self._event("function_call_arguments.delta", **self._place(), delta=call.arguments)

    def _begin(self, item: OutputMessage | OutputCall | OutputReasoning) -> Iterator[ResponsesEvent]:
        yield from self._close("completed")
        self._items.append(item)
        self._open = item
        yield self._event("output_item.added", output_index=len(self._items) - 1, item=item)

    def _close(self, status: Status) -> Iterator[ResponsesEvent]:
        """Yield the events of the end of the open item."""
        if self._open is None:
            return
        item, self._open = self._open, None
        item.status = status
        if isinstance(item, OutputCall):
            yield self._event("function_call_arguments.done", **self._place(), name=item.name, arguments=item.arguments)
        else:
            (part,) = item.content
            logprobs = {"logprobs": part.logprobs} if isinstance(part, OutputText) else {}
            yield self._event(f"{part.type}.done", **self._place(0), text=part.text, **logprobs)
            yield self._event("content_part.done", **self._place(0), part=part)
        yield self._event("output_item.done", output_index=len(self._items) - 1, item=item)

    def _place(self, content_index: int | None = None) -> dict[str, Any]:
        """Return the fields that place an event in the last item."""
        part = {} if content_index is None else {"content_index": content_index}
        return {"item_id": self._items[-1].id, "output_index": len(self._items) - 1, **part}

    def _event(self, kind: str, /, **fields: Any) -> ResponsesEvent:
        return ResponsesEvent(
            type=f"response.{kind}",
            sequence_number=self._next_number(),
            **{key: _dumped(value) for key, value in fields.items()},
        )

    def _next_number(self) -> int:
        number, self._num_events = self._num_events, self._num_events + 1
        return number


def _dumped(value: Any) -> Any:
    """Return a value as it is now: items grow."""
    if isinstance(value, list):
        return [_dumped(item) for item in value]
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value
