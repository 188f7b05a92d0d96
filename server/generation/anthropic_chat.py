"""Translates a request of Anthropic's Messages API to a chat. Errors name the fields of the request, not of the chat."""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pydantic import ValidationError

from server.http.errors import ContextTooLong, InvalidRequest, as_invalid_request
from server.http.validation_messages import param_of
from server.schemas.anthropic import (
    EFFORT,
    THINKING_SWITCH,
    THREAD_REFUSED,
    Block,
    ClientTool,
    MessagesRequest,
    PromptRequest,
    TextBlock,
    ThinkingBlock,
    ToolChoiceParam,
    ToolResultBlock,
    ToolUseBlock,
)
from server.schemas.chat import ChatRequest

_CHOICES: dict[str, object] = {"auto": "auto", "any": "required", "none": "none"}
# Fields of a chat, by the fields of this API that they come from.
_NAMES = [
    (re.compile(pattern), name)
    for pattern, name in [
        (r"(tools\.\d+)\.function\.parameters.*", r"\1.input_schema"),
        (r"(tools\.\d+)\.function\.", r"\1."),
        (r"response_format.*", "output_config.format"),
    ]
]

ChatMessage = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TranslatedChat:
    """A request as a chat. `places` are the fields that its messages come from."""

    chat: ChatRequest
    places: Sequence[str]

    def named(self, error: InvalidRequest) -> InvalidRequest:
        """Return an error of the chat with the field of the request. Clients recognise a too long prompt by the error's words."""
        name = _named(error.param or "", self.places)
        words = str(error).replace(error.param, name) if error.param else str(error)
        return InvalidRequest("prompt is too long: " * isinstance(error, ContextTooLong) + words, name or None, error.code)


def translated(body: PromptRequest, variables: Collection[str]) -> TranslatedChat:
    """Return a request as a chat. Raises InvalidRequest for a field that a chat does not accept.

    `variables` are the variables that the chat template reads.
    """
    if body.thread is not None:
        raise InvalidRequest("not supported by this server; accepted: null", "thread", THREAD_REFUSED)
    placed = list(_merged(_messages(body)))
    places = [place for place, _ in placed]
    messages = [message for _, message in placed]
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "continue_final_message": messages[-1]["role"] == "assistant",
        "tools": [_function(tool) for tool in body.client_tools] or None,
        **({} if body.tool_choice is None else _choice(body.tool_choice)),
        **_thinking(body, variables),
        **(_sampling(body) if isinstance(body, MessagesRequest) else {}),
    }
    if body.output_config is not None and (form := body.output_config.format) is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema_}}
    try:
        return TranslatedChat(ChatRequest.model_validate(fields), places)
    except ValidationError as error:
        raise as_invalid_request([_renamed(dict(one), places) for one in error.errors(include_url=False)]) from error


def _thinking(body: PromptRequest, variables: Collection[str]) -> dict[str, Any]:
    """Return the fields of a chat that switch thinking, if the template has a switch, and that leave it out of the answer."""
    config = body.thinking
    is_switched = config is not None and THINKING_SWITCH in variables
    return {
        "chat_template_kwargs": {THINKING_SWITCH: config.type != "disabled"} if config and is_switched else None,
        "reasoning_effort": body.effort if EFFORT in variables else None,
        "include_reasoning": False if config and config.display == "omitted" else None,
    }


def _choice(choice: ToolChoiceParam) -> dict[str, Any]:
    named = {"type": "function", "function": {"name": choice.name}}
    return {"tool_choice": _CHOICES.get(choice.type, named), "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _sampling(body: MessagesRequest) -> dict[str, Any]:
    same = ("temperature", "top_p", "top_k", "stream", "cache_salt", "speculative", "timeout_s")
    return {
        **{name: getattr(body, name) for name in same},
        "stop": body.stop_sequences,
        "user": body.metadata and body.metadata.user_id,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True} if body.stream else None,
    }


def _function(tool: ClientTool) -> dict[str, Any]:
    schema = tool.input_schema
    if tool.input_examples:
        schema = {**schema, "examples": tool.input_examples}
    function = {"name": tool.name, "description": tool.description, "parameters": schema, "strict": tool.strict}
    return {"type": "function", "function": function}


def _messages(body: PromptRequest) -> Iterator[tuple[str, ChatMessage]]:
    """Yield the messages of the chat, each with the field that it comes from."""
    system = body.system if isinstance(body.system, str) else _lines(body.system or ())
    if system:
        yield "system", {"role": "system", "content": system}
    for at, turn in enumerate(body.messages):
        place = f"messages.{at}.content"
        if isinstance(turn.content, str):
            yield place, {"role": turn.role, "content": turn.content}
        elif turn.role == "assistant":
            yield place, _of_assistant(place, turn.content)
        else:
            yield from _of_client(place, turn.role, turn.content)


def _of_assistant(place: str, blocks: Sequence[Block]) -> ChatMessage:
    """Return an earlier answer. Its thinking is for a chat template that shows it."""
    calls = [_call(f"{place}.{at}.input", block) for at, block in enumerate(blocks) if isinstance(block, ToolUseBlock)]
    text = _lines(blocks)
    thinking = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    return (
        {"role": "assistant", "reasoning_content": thinking or None}
        | ({"content": text} if text or not calls else {})
        | ({"tool_calls": calls} if calls else {})
    )


def _call(place: str, block: ToolUseBlock) -> dict[str, Any]:
    try:
        arguments = json.dumps(block.input, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"has a number that is not supported: {error}", place) from error
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _of_client(place: str, role: str, blocks: Sequence[Block]) -> Iterator[tuple[str, ChatMessage]]:
    """Yield the messages of one turn: results of calls are messages of their own, texts between them are joined."""
    for is_result, group in groupby(enumerate(blocks), lambda numbered: isinstance(numbered[1], ToolResultBlock)):
        members = list(group)
        if not is_result:
            yield place, {"role": role, "content": _lines([block for _, block in members])}
            continue
        for at, block in members:
            assert isinstance(block, ToolResultBlock)
            text = block.content if isinstance(block.content, str) else _lines(block.content or ())
            content = f"Error: {text}" if block.is_error else text
            yield f"{place}.{at}", {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _lines(blocks: Sequence[object]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))


def _merged(placed: Iterator[tuple[str, ChatMessage]]) -> Iterator[tuple[str, ChatMessage]]:
    """Yield the messages. Consecutive messages of one role are merged to one turn, as this API defines it."""
    for role, group in groupby(placed, lambda one: one[1]["role"]):
        members = list(group)
        if role not in ("user", "assistant") or len(members) == 1:
            yield from members
            continue
        messages = [message for _, message in members]
        contents = [message["content"] for message in messages if message.get("content")]
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        thinking = "\n".join(message["reasoning_content"] for message in messages if message.get("reasoning_content"))
        content = {"content": "\n".join(contents)} if contents or not calls else {}
        rest = {"reasoning_content": thinking or None, **({"tool_calls": calls} if calls else {})}
        yield members[0][0], {"role": role, **content, **rest}


def _renamed(error: dict[str, Any], places: Sequence[str]) -> dict[str, Any]:
    """Return a validation error of the chat with the field of the request."""
    placed = {**error, "loc": ("body", *error["loc"])}
    return {**placed, "ctx": {**error.get("ctx", {}), "param": _named(param_of(placed) or "", places)}}


def _named(param: str, places: Sequence[str]) -> str:
    """Return the field of the request behind a field of the chat."""
    field, _, rest = param.partition(".")
    index, _, _ = rest.partition(".")
    if field == "messages" and index.isdecimal() and int(index) < len(places):
        return places[int(index)]
    for pattern, name in _NAMES:
        param = pattern.sub(name, param)
    return param
