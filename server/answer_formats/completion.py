"""The wire format of /v1/completions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
from server.schemas.completion import Completion, CompletionChoice, CompletionLogprobs
from server.text.codec import TokenText
from server.text.token_entry import TokenEntry


class CompletionFormat:
    """One answer. Chunks and whole answers have the same shape."""

    ends_with_done = True

    def __init__(self, options: AnswerOptions) -> None:
        self._options = options
        self._head = options.head("cmpl")

    def chunks(self, piece: Piece, usage: InChunk) -> Iterator[Completion]:
        """Yield one chunk if there is text, an end, a traced step, or tokens whose ids are requested."""
        if piece.text or piece.finish is not None or piece.trace or self._options.gives_token_ids:
            yield self._completion([self._choice(piece)], usage)

    def usage_chunk(self, generation: Generation) -> Completion:
        """Return a stream's last chunk."""
        return self._completion([], self._numbers(generation))

    def answer(self, pieces: Sequence[Piece], generation: Generation) -> Completion:
        """Return the whole answer."""
        return self._completion([self._choice(piece) for piece in pieces], self._numbers(generation))

    def _completion(self, choices: list[CompletionChoice], rest: Mapping[str, Any]) -> Completion:
        return Completion(object="text_completion", choices=choices, **self._head, **rest)

    def _numbers(self, generation: Generation) -> dict[str, Any]:
        return {"usage": usage_of(generation), "metrics": metrics_of(generation.acceptance)}

    def _choice(self, piece: Piece) -> CompletionChoice:
        num_top = self._options.num_top_logprobs
        return CompletionChoice(
            index=piece.index,
            text=piece.text,
            logprobs=None if num_top is None else _logprobs(piece.entries, num_top),
            finish_reason=finish_reason(piece.finish),
            **stop_reason_of(piece),
            **prompt_logprobs_of(piece),
            **self._options.ids_of(piece),
            **self._options.prompt_ids_of(piece),
            **trace_of(piece),
        )


def _logprobs(entries: Sequence[TokenEntry], num_top: int) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[_spelled(entry.token) for entry in entries],
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=[_top(entry) for entry in entries] if num_top else None,
        text_offset=[entry.offset for entry in entries],
    )


def _top(entry: TokenEntry) -> dict[str, float] | None:
    """Return the likeliest tokens and the returned one; None for the first token of a prompt, which has no log-probability."""
    if entry.logprob is None:
        return None
    top = {_spelled(token): logprob for token, logprob in entry.top}
    return top if _spelled(entry.token) in top else {**top, _spelled(entry.token): entry.logprob}


def _spelled(token: TokenText) -> str:
    """Return a token as the format writes it. A token that is not valid UTF-8 by itself is written as `bytes:\\xNN`."""
    if token.name is not None:
        return token.name
    if token.text.encode("utf-8", "replace") == token.raw:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)
