"""Puts the conversation of a request together, from stored responses and its input, and turns it into a chat request.

Errors of the chat request are raised again under the names of the Responses API.
"""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter, ValidationError

from server.http.errors import ApiError, InvalidRequest, UnknownResponse, as_invalid_request
from server.schemas.chat import ChatRequest
from server.schemas.messages import MAX_MESSAGES
from server.schemas.responses import ResponsesRequest
from server.schemas.responses_items import (
    FunctionCallItem,
    FunctionCallOutput,
    InputMessage,
    Item,
    ItemReference,
    Part,
    ReasoningItem,
    texts_of,
)
from server.stored_responses.store import ResponseStore

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
_PREVIOUS = "previous_response_id"
_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "tool_choice.function.name": "tool_choice.name",
}


@dataclass(frozen=True, slots=True)
class _Placed:
    """An item of the conversation and the field of the request that it comes from."""

    field: str
    item: Any

    def inside(self, name: str) -> str:
        """Return the field of a part of the item."""
        return f"{self.field}.{name}" if self.field.startswith("input.") else self.field


@dataclass(frozen=True, slots=True)
class _Turn:
    """A message of the chat, and the fields of the request that its fields come from."""

    message: dict[str, Any]
    fields: dict[str, str]


@dataclass(frozen=True)
class Conversation:
    """The items from which one response is generated: items of earlier responses, then the request's."""

    request: ResponsesRequest
    earlier: Sequence[_Placed]
    own: Sequence[_Placed]

    @classmethod
    async def of(cls, request: ResponsesRequest, store: ResponseStore, owner: str) -> "Conversation":
        """Return the conversation of a request; raise an ApiError for a response or an item that is unknown to the owner."""
        earlier = [] if request.previous_response_id is None else await _earlier(request.previous_response_id, store, owner)
        if isinstance(request.input, str):
            message = InputMessage.model_validate({"role": "user", "content": request.input})
            return cls(request, earlier, [_Placed("input", message)])
        placed = [_Placed(f"input.{at}", item) for at, item in enumerate(request.input)]
        known = await store.answers_with(owner, [one.item.id for one in placed if isinstance(one.item, ItemReference)])
        return cls(request, earlier, [_dereferenced(one, known) for one in placed])

    def chat(self) -> ChatRequest:
        """Return the chat request."""
        messages = [turn.message for turn in self._turns]
        with self.own_names():
            try:
                return ChatRequest.model_validate(
                    {
                        **self.request.chat_fields,
                        "messages": messages,
                        "stream_options": {"include_usage": True} if self.request.stream else None,
                    }
                )
            except ValidationError as error:
                errors = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
                raise as_invalid_request(errors) from error

    @contextmanager
    def own_names(self) -> Iterator[None]:
        """Raise an ApiError of the chat request under the name of the field of this request."""
        try:
            yield
        except ApiError as error:
            if error.param is None:
                raise
            chats, error.param = error.param, self._own_name(error.param)
            if error.args and str(error).startswith(f"{chats}: "):
                error.args = (f"{error.param}: {str(error).removeprefix(f'{chats}: ')}",)
            raise

    def _own_name(self, param: str) -> str:
        head, *rest = param.split(".")
        if head == "messages" and rest and rest[0].isdecimal():
            return self._turns[int(rest[0])].fields.get(".".join(rest[1:2]), "input")
        if head == "tools" and rest and rest[0].isdecimal():
            return ".".join(
                ["tools", str(self.request.offered[int(rest[0])]), *(part for part in rest[1:] if part != "function")]
            )
        return next((own for chats, own in _NAMES.items() if param == chats or param.startswith(f"{chats}.")), param)

    @cached_property
    def _turns(self) -> list[_Turn]:
        instructions = self.request.instructions
        turns = [] if instructions is None else [_Turn({"role": "system", "content": instructions}, {"content": "instructions"})]
        call_ids: set[str] = set()
        for placed in (*self.earlier, *self.own):
            item = placed.item
            if isinstance(item, InputMessage):
                _add_message(turns, placed)
            elif isinstance(item, ReasoningItem):
                if text := "".join(part.text for part in item.content or item.summary or ()):
                    turns.append(_Turn({"role": "assistant", "reasoning_content": text}, {}))
            elif isinstance(item, FunctionCallItem):
                call_ids.add(item.call_id)
                _add_call(turns, placed)
            elif isinstance(item, FunctionCallOutput):
                if item.call_id not in call_ids:
                    text = "no function call of the conversation has this call_id"
                    raise InvalidRequest(f"{placed.inside('call_id')}: {text}", placed.inside("call_id"))
                message = {"role": "tool", "tool_call_id": item.call_id, "content": _chat_text(item.output)}
                turns.append(_Turn(message, {"content": placed.inside("output"), "role": placed.inside("type")}))
        return turns

    def stored_input(self) -> str:
        """Return the request's own items as JSON, each with an id that no other item of the conversation has."""
        seen = {placed.item.id for placed in self.earlier}
        items = []
        for placed in self.own:
            item = _shown(placed.item)
            if item["id"] is None or item["id"] in seen:
                item["id"] = f"{_PREFIXES[item['type']]}_{uuid.uuid4().hex}"
            seen.add(item["id"])
            items.append(item)
        return json.dumps(items, ensure_ascii=False)


async def _earlier(response_id: str, store: ResponseStore, owner: str) -> list[_Placed]:
    chain = await store.chain(owner, response_id, MAX_MESSAGES)
    if isinstance(chain, str):
        text = f"Previous response with id '{chain[:64]}' not found."
        raise InvalidRequest(text, _PREVIOUS, "previous_response_not_found")
    return [_Placed(_PREVIOUS, item) for one in chain for item in _ITEMS.validate_python(items_of(one.input, one.answer))]


def items_of(own_input: str, answer: str) -> list[dict[str, Any]]:
    """Return the items that a stored response added to its conversation."""
    return [*json.loads(own_input), *json.loads(answer)["output"]]


def _dereferenced(placed: _Placed, known: Mapping[str, str]) -> _Placed:
    if not isinstance(placed.item, ItemReference):
        return placed
    if placed.item.id not in known:
        text = f"Item with id '{placed.item.id[:64]}' not found. Items of responses with `store` set to false are not kept."
        raise UnknownResponse(text, placed.inside("id"))
    output = json.loads(known[placed.item.id])["output"]
    (item,) = _ITEMS.validate_python([item for item in output if item["id"] == placed.item.id])
    return _Placed(placed.field, item)


def _add_message(turns: list[_Turn], placed: _Placed) -> None:
    """Add a message. An assistant's message has the reasoning before it, as in a chat."""
    item: InputMessage = placed.item
    is_behind_reasoning = bool(turns) and turns[-1].message.keys() == {"role", "reasoning_content"}
    if item.role != "assistant" or not is_behind_reasoning:
        turns.append(_Turn({"role": item.role}, {}))
    turns[-1].message["content"] = _chat_text(item.content)
    turns[-1].fields["content"] = placed.inside("content")


def _add_call(turns: list[_Turn], placed: _Placed) -> None:
    """Add a call to the assistant's message before it, or to a new one: a chat has all calls of an answer in one message."""
    call: FunctionCallItem = placed.item
    if not turns or turns[-1].message["role"] != "assistant":
        turns.append(_Turn({"role": "assistant"}, {}))
    turn = turns[-1]
    turn.fields.setdefault("tool_calls", placed.inside("type"))
    function = {"name": call.name, "arguments": call.arguments}
    turn.message.setdefault("tool_calls", []).append({"id": call.call_id, "type": "function", "function": function})


_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def _shown(item: Any) -> dict[str, Any]:
    """Return an item as GET /v1/responses/{response_id}/input_items has it."""
    head = {"id": item.id, "type": item.type or "message", "status": item.status or "completed"}
    if isinstance(item, InputMessage):
        is_output = item.role == "assistant"
        texts = [item.content] if isinstance(item.content, str) else texts_of(item.content)
        content = [{"type": "output_text", "text": text, "annotations": []} if is_output else _input_text(text) for text in texts]
        return {**head, "role": item.role, "content": content}
    if isinstance(item, FunctionCallItem):
        return {**head, "call_id": item.call_id, "name": item.name, "arguments": item.arguments}
    if isinstance(item, FunctionCallOutput):
        output = item.output if isinstance(item.output, str) else [_input_text(text) for text in texts_of(item.output)]
        return {**head, "call_id": item.call_id, "output": output}
    assert isinstance(item, ReasoningItem)
    summary, content = ([part.model_dump() for part in given or ()] for given in (item.summary, item.content))
    return {**head, "summary": summary, "content": content}


def _chat_text(content: str | list[Part]) -> str | list[dict[str, str]]:
    """Return a content, or an output of a call, as that of a chat message."""
    return content if isinstance(content, str) else [{"type": "text", "text": text} for text in texts_of(content)]


def _input_text(text: str) -> dict[str, str]:
    return {"type": "input_text", "text": text}
