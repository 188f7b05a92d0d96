"""The wire format of /v1/chat/completions."""

from collections.abc import Iterator, Sequence
from typing import Any

from engine.core.types import FinishReason
from server.answer_formats.calls import call_delta, function_delta, whole_calls
from server.answer_formats.common import (
    AnswerOptions,
    InChunk,
    finish_reason,
    metrics_of,
    prompt_logprobs_of,
    stop_reason_of,
    trace_of,
    usage_of,
)
from server.generation.generation import Generation
from server.generation.sample import Piece
from server.schemas.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    TokenLogprob,
    TopLogprob,
)
from server.text.codec import TokenText
from server.text.token_entry import TokenEntry


class ChatFormat:
    """One answer. Tracks which choices of a stream have sent their role, and which have called tools.

    If an answer may consist of calls alone (`offers_tools`), missing content is null, not an empty text. With `has_functions` a
    call is a `function_call`, the form before tools.
    """

    ends_with_done = True

    def __init__(self, options: AnswerOptions, offers_tools: bool = False, has_functions: bool = False) -> None:
        self._options = options
        self._head = options.head("chatcmpl")
        self._has_logprobs = options.num_top_logprobs is not None
        self._no_content = None if offers_tools else ""
        self._has_functions = has_functions
        self._begun: set[int] = set()
        self._called: set[int] = set()

    def chunks(self, piece: Piece, usage: InChunk) -> Iterator[ChatChunk]:
        """Yield the chunks of a choice: its role first, then content, then calls, then the end in a chunk of its own."""
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            begin = self._chunk(piece.index, usage, Delta(role="assistant", content=self._no_content))
            yield begin.model_copy(update=self._options.prompt_ids_of(piece))
        rest = {"logprobs": self._logprobs(piece), **self._options.ids_of(piece), **trace_of(piece)}
        for delta in self._deltas(piece):
            yield self._chunk(piece.index, usage, delta, **rest)
            rest = {}
        if piece.finish is not None:
            yield self._chunk(piece.index, usage, Delta(), **self._end(piece, piece.index in self._called))

    def usage_chunk(self, generation: Generation) -> ChatChunk:
        """Return a stream's last chunk."""
        return ChatChunk(object="chat.completion.chunk", choices=[], **self._head, **self._numbers(generation))

    def answer(self, pieces: Sequence[Piece], generation: Generation) -> ChatCompletion:
        """Return the whole answer."""
        choices = [self._choice(piece) for piece in pieces]
        rest = {**self._numbers(generation), **prompt_logprobs_of(pieces[0]), **self._options.prompt_ids_of(pieces[0])}
        return ChatCompletion(object="chat.completion", choices=choices, **self._head, **rest)

    def _deltas(self, piece: Piece) -> Iterator[Delta]:
        """Yield the deltas of a piece. Reported tokens that add no text yet are sent with an empty text."""
        has_tokens = piece.entries or piece.trace or (self._options.gives_token_ids and piece.token_ids)
        if piece.reasoning:
            yield Delta(**_reasoning(piece))
        if piece.text or (has_tokens and not piece.calls and not piece.reasoning):
            yield Delta(content=piece.text)
        for call in piece.calls:
            self._called.add(piece.index)
            yield Delta(function_call=function_delta(call)) if self._has_functions else Delta(tool_calls=[call_delta(call)])

    def _chunk(self, index: int, usage: InChunk, delta: Delta, **rest: Any) -> ChatChunk:
        choice = ChunkChoice(**{"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **rest})
        return ChatChunk(object="chat.completion.chunk", choices=[choice], **self._head, **usage)

    def _numbers(self, generation: Generation) -> dict[str, Any]:
        return {"usage": usage_of(generation), "metrics": metrics_of(generation.acceptance)}

    def _choice(self, piece: Piece) -> ChatChoice:
        calls: dict[str, Any] = {"tool_calls": whole_calls(piece.calls)} if piece.calls else {}
        if calls and self._has_functions:
            calls = {"function_call": calls["tool_calls"][0].function}
        content = piece.text or self._no_content
        message = AssistantMessage(role="assistant", **_reasoning(piece), content=content, refusal=None, **calls)
        return ChatChoice(
            index=piece.index,
            message=message,
            logprobs=self._logprobs(piece),
            **self._end(piece, bool(piece.calls)),
            **self._options.ids_of(piece),
        )

    def _end(self, piece: Piece, has_called: bool) -> dict[str, Any]:
        """Return how a choice ended: `tool_calls` if the model ended a message that has calls."""
        is_calls = has_called and piece.finish is FinishReason.STOP
        of_calls = "function_call" if self._has_functions else "tool_calls"
        return {"finish_reason": of_calls if is_calls else finish_reason(piece.finish), **stop_reason_of(piece)}

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self._has_logprobs:
            return None
        return ChatLogprobs(content=[token_logprob(entry) for entry in piece.entries], refusal=None)


def _reasoning(piece: Piece) -> dict[str, Any]:
    """Return the reasoning under DeepSeek's name and under vLLM's."""
    return {"reasoning_content": piece.reasoning, "reasoning": piece.reasoning} if piece.reasoning else {}


def token_logprob(entry: TokenEntry) -> TokenLogprob:
    """Return a token with its log-probabilities."""
    assert entry.logprob is not None  # only a prompt's first token has None, and chats do not echo the prompt
    top = [TopLogprob(**_fields(token, logprob)) for token, logprob in entry.top]
    return TokenLogprob(**_fields(entry.token, entry.logprob), top_logprobs=top)


def _fields(token: TokenText, logprob: float) -> dict[str, Any]:
    return {"token": token.text if token.name is None else token.name, "logprob": logprob, "bytes": list(token.raw)}
