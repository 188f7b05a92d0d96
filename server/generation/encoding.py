"""Encodes the texts of requests off the event loop. API keys take turns; errors name the field."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from engine.core.service import EngineUnavailable
from engine.core.types import ModelInfo
from server.http.errors import ContextTooLong, InvalidRequest, Overloaded, UnknownModel
from server.runtime import Runtime
from server.schemas.messages import Message, templated
from server.schemas.tools import Tool, templated_tools
from server.text.chat_text import strings_of
from server.text.codec import ChatForm, TextError
from server.text.tokenizer_thread import TokenizerBusy, TokenizerClosed
from server.tool_calls.use import require_shown

_TOKENIZER_RETRY_S = 2.0

PromptIds = tuple[int, ...]
T = TypeVar("T")


def require_served(runtime: Runtime, name: str) -> None:
    """Raise UnknownModel unless the model of that name is served."""
    if name != runtime.settings.served_name:
        raise UnknownModel(name)


def longest_text(model: ModelInfo) -> int:
    """Return the most tokens that prompt and answer can have together."""
    return min(model.max_model_len, model.num_slots)


async def encoded_text(runtime: Runtime, key: str, text: str, param: str, adds_special_tokens: bool = True) -> PromptIds:
    """Return the ids of a bare text."""
    codec = runtime.codec
    encode = codec.encode if adds_special_tokens else codec.encode_more
    return await encoded(runtime, key, len(text.encode()), lambda: encode(text), param)


async def encoded_chat(
    runtime: Runtime, key: str, messages: Sequence[Message], tools: Sequence[Tool], form: ChatForm, param: str = "messages"
) -> PromptIds:
    """Return the ids of a conversation with its tools; refuse parts that the model's template would leave out."""
    codec = runtime.codec
    require_shown(runtime.tool_support, messages, tools)
    shown, shown_tools = runtime.tool_support.shape.shaped(templated(messages)), templated_tools(tools)
    contents = [[message.get("content"), message.get("tool_calls")] for message in shown]
    num_bytes = sum(len(text.encode()) for text in strings_of([contents, shown_tools]))
    return await encoded(runtime, key, num_bytes, lambda: codec.encode_chat(shown, form, shown_tools), param)


async def encoded_words(runtime: Runtime, key: str, words: Sequence[str], param: str) -> tuple[PromptIds, ...]:
    """Return the ids of words as they are spelled at the start of a text and after a space, each spelling once."""
    codec = runtime.codec
    spellings = [space + word.lstrip() for word in words for space in ("", " ")]
    num_bytes = sum(len(spelling.encode()) for spelling in spellings)
    return await encoded(runtime, key, num_bytes, lambda: tuple(dict.fromkeys(map(codec.encode_more, spellings))), param)


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
