"""Encodes the texts of requests off the event loop. API keys take turns; errors name the field."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import starmap
from typing import TypeVar

from engine.core.service import EngineUnavailable
from engine.core.types import ModelInfo
from server.http.errors import ContextTooLong, InvalidRequest, Overloaded, UnknownModel
from server.runtime import Runtime
from server.schemas.completion import CompletionRequest, Prompt
from server.schemas.infill import InfillRequest
from server.schemas.messages import Message, templated
from server.schemas.tools import Tool, templated_tools
from server.text.chat_text import strings_of
from server.text.codec import ChatForm, TextError
from server.text.infill import Infill
from server.text.tokenizer_thread import TokenizerBusy, TokenizerClosed

_TOKENIZER_RETRY_S = 2.0

PromptIds = tuple[int, ...]
T = TypeVar("T")


def require_served(runtime: Runtime, name: str) -> None:
    """Raise UnknownModel unless the model or adapter of that name is served."""
    if name not in runtime.settings.served_names and name not in runtime.settings.adapters:
        raise UnknownModel(name)


def require_infill(runtime: Runtime, param: str) -> Infill:
    """Return the infill prompts of the model; raise InvalidRequest if it has no tokens for them."""
    infill = runtime.codec.infill
    if infill is None or max(infill.end_ids) >= runtime.engine.model.vocab_size:
        raise InvalidRequest("this model's tokenizer has no fill-in-the-middle tokens", param)
    return infill


def longest_text(model: ModelInfo) -> int:
    """Return the most tokens that prompt and answer can have together."""
    return min(model.max_model_len, model.num_slots)


async def encoded_text(
    runtime: Runtime, key: str, text: str, param: str, adds_special_tokens: bool = True, begins: bool = True
) -> PromptIds:
    """Return the ids of a bare text, or of one without special tokens that may continue another."""
    codec = runtime.codec
    encode = codec.encode if adds_special_tokens else partial(codec.encode_more, begins=begins)
    return await encoded(runtime, key, len(text.encode()), lambda: encode(text), param)


async def encoded_prompt(runtime: Runtime, key: str, body: CompletionRequest, prompt: Prompt) -> PromptIds:
    """Return the ids of one prompt of a completion request, before its suffix if it has one."""
    suffix, adds_special = body.suffix, body.add_special_tokens is not False
    if not isinstance(prompt, str):
        return tuple(prompt)
    if suffix is None:
        return await encoded_text(runtime, key, prompt, "prompt", adds_special)
    infill, num_bytes = require_infill(runtime, "suffix"), len(prompt.encode()) + len(suffix.encode())
    return await encoded(runtime, key, num_bytes, lambda: infill.prompt(prompt, suffix, adds_special), "prompt")


async def encoded_infill(runtime: Runtime, key: str, body: InfillRequest, most: int) -> tuple[PromptIds, bool]:
    """Return the ids of an infill request's prompt, at most `most`, and whether anything was left out to make it fit."""
    infill = require_infill(runtime, "input_suffix")
    texts = (body.prefix, body.input_suffix, *(part for file in body.files for part in file))
    num_bytes = sum(len(text.encode()) for text in texts)
    work = partial(infill.prompt_of_files, body.prefix, body.input_suffix, body.files, most)
    return await encoded(runtime, key, num_bytes, work, "input_prefix")


async def encoded_chat(
    runtime: Runtime, key: str, messages: Sequence[Message], tools: Sequence[Tool], form: ChatForm, param: str = "messages"
) -> PromptIds:
    """Return the ids of a conversation with its tools."""
    codec = runtime.codec
    shown, shown_tools = runtime.tool_support.shape.shaped(templated(messages)), templated_tools(tools)
    contents = [[message.get(field) for field in ("content", "tool_calls", "name", "reasoning_content")] for message in shown]
    num_bytes = sum(len(text.encode()) for text in strings_of([contents, shown_tools, form.variables]))
    return await encoded(runtime, key, num_bytes, lambda: codec.encode_chat(shown, form, shown_tools), param)


async def encoded_words(runtime: Runtime, key: str, words: Sequence[str], param: str) -> tuple[PromptIds, ...]:
    """Return the ids of words as they are spelled at the start of a text, inside one and after a space, each spelling once."""
    codec, bare = runtime.codec, [word.lstrip() for word in words]
    spellings = [(space + word, begins) for word in bare for space, begins in (("", True), ("", False), (" ", True))]
    num_bytes = sum(len(spelling.encode()) for spelling, _ in spellings)
    return await encoded(runtime, key, num_bytes, lambda: tuple(dict.fromkeys(starmap(codec.encode_more, spellings))), param)


async def encoded(runtime: Runtime, key: str, num_bytes: int, work: Callable[[], T], param: str) -> T:
    """Run `work` on `num_bytes` of a key's text off the event loop; return its result. Refuse a text that cannot fit first."""
    codec, longest = runtime.codec, longest_text(runtime.engine.model)
    if num_bytes > longest * codec.longest_token_bytes:
        raise ContextTooLong(f"prompt and answer together have at most {longest} tokens; {param} has {num_bytes} bytes", param)
    try:
        return await codec.thread.run(num_bytes, work, key)
    except TokenizerBusy as error:
        raise Overloaded(str(error), "tokenizer_busy", _TOKENIZER_RETRY_S) from error
    except TokenizerClosed as error:
        raise EngineUnavailable("the server is shutting down") from error
    except TextError as error:
        raise InvalidRequest(str(error), param) from error
