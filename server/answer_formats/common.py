"""Shared by the wire formats: their Protocol, the counts of a generation, finish reasons, and joining the pieces of samples."""

import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pydantic import BaseModel

from engine.core.types import FinishReason
from server.generation.generation import Generation
from server.generation.sample import AcceptanceCounts, Piece
from server.schemas.answer import CompletionTokensDetails, Metrics, PromptLogprob, PromptTokensDetails, SpeculativeDecoding, Usage
from server.schemas.common import GenerationRequest, StreamUsage
from server.text.parsed_text import merged

InChunk = Mapping[str, Any]  # the field `usage` of a chunk that has choices; empty if it has none


class Format(Protocol):
    """One answer in one of the formats. All chunks have the same id and time."""

    ends_with_done: bool  # whether [DONE] ends a stream

    def chunks(self, piece: Piece, usage: InChunk) -> Iterable[BaseModel]:
        """Return the chunks of one piece, which may be none. Every chunk has `usage` as given."""
        ...

    def usage_chunk(self, generation: Generation) -> BaseModel:
        """Return a stream's last chunk, which has the counts and no choices."""
        ...

    def answer(self, pieces: Sequence[Piece], generation: Generation) -> BaseModel:
        """Return the answer without a stream; `pieces` has one piece for each choice, in order."""
        ...


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """The options of a request that affect the form of its answer."""

    model: str
    num_top_logprobs: int | None
    request_id: str | None
    gives_token_ids: bool

    @classmethod
    def of(cls, body: GenerationRequest) -> "AnswerOptions":
        """Return the options of a request."""
        return cls(body.model, body.num_top_logprobs, body.request_id, bool(body.return_token_ids))

    def head(self, kind: str) -> dict[str, Any]:
        """Return the fields that every chunk of one answer begins with."""
        return {"id": f"{kind}-{self.request_id or uuid.uuid4().hex}", "created": int(time.time()), "model": self.model}

    def ids_of(self, piece: Piece) -> dict[str, Any]:
        """Return the field `token_ids` if it was requested."""
        return {"token_ids": list(piece.token_ids)} if self.gives_token_ids else {}

    def prompt_ids_of(self, piece: Piece) -> dict[str, Any]:
        """Return the field `prompt_token_ids` if it was requested and the piece is a choice's first."""
        is_given = self.gives_token_ids and piece.prompt_ids is not None
        return {"prompt_token_ids": list(piece.prompt_ids or ())} if is_given else {}


def finish_reason(finish: FinishReason | None) -> Literal["stop", "length"] | None:
    """Return the `finish_reason` of the wire format. Errors and aborts are error answers and have none."""
    if finish is None:
        return None
    return "length" if finish is FinishReason.LENGTH else "stop"


def stop_reason_of(piece: Piece) -> dict[str, Any]:
    """Return the field `stop_reason` of an end: the requested stop string or token that ended the text."""
    return {"stop_reason": piece.stop_reason} if piece.finish is not None else {}


def usage_of(generation: Generation) -> Usage:
    """Return the token counts."""
    num_prompt, num_completion, counts = generation.num_prompt_tokens, generation.num_completion_tokens, generation.acceptance
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_completion,
        total_tokens=num_prompt + num_completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=generation.num_cached_tokens),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=generation.num_reasoning_tokens,
            accepted_prediction_tokens=counts.num_accepted_predicted,
            rejected_prediction_tokens=counts.num_predicted - counts.num_accepted_predicted,
        ),
    )


def metrics_of(counts: AcceptanceCounts) -> Metrics:
    """Return the acceptance of drafts behind the returned tokens. The histogram has an entry for every depth, as in vLLM."""
    num_steps, num_accepted = counts.num_steps, counts.num_accepted_tokens
    speculative = SpeculativeDecoding(
        mean_acceptance_length=1 + num_accepted / num_steps if num_steps else 1.0,
        draft_acceptance_rate=num_accepted / counts.num_draft_tokens if counts.num_draft_tokens else 0.0,
        num_spec_steps=num_steps,
        num_accepted_draft_tokens=num_accepted,
        num_draft_tokens=counts.num_draft_tokens,
        num_spec_tokens=counts.deepest,
        acceptance_histogram=counts.histogram + [0] * (counts.deepest + 1 - len(counts.histogram)),
        trees=dict(counts.trees),
    )
    return Metrics(speculative_decoding=speculative)


async def joined(pieces: AsyncIterator[Piece], num_choices: int) -> list[Piece]:
    """Wait for all pieces; return one joined piece for each choice, in the order of their indices."""
    parts: list[list[Piece]] = [[] for _ in range(num_choices)]
    async for piece in pieces:
        parts[piece.index].append(piece)
    return [_joined_choice(index, of_choice) for index, of_choice in enumerate(parts)]


def _joined_choice(index: int, pieces: Sequence[Piece]) -> Piece:
    text = "".join(piece.text for piece in pieces)
    entries = tuple(entry for piece in pieces for entry in piece.entries)
    token_ids = tuple(token_id for piece in pieces for token_id in piece.token_ids)
    last = pieces[-1]
    calls = merged(call for piece in pieces for call in piece.calls)
    parts = tuple(part for piece in pieces for part in piece.parts)
    reasoning = "".join(piece.reasoning for piece in pieces)
    ends = (last.finish, last.prompt, last.stop_reason, token_ids, pieces[0].prompt_ids)
    return Piece(index, text, entries, *ends, calls=calls, reasoning=reasoning, parts=parts)


def prompt_logprobs_of(piece: Piece) -> dict[str, Any]:
    """Return the field `prompt_logprobs` if it was requested: for each token its candidates by id, null for the first token."""
    if piece.prompt is None:
        return {}
    logprobs = [
        {str(one.token_id): PromptLogprob(logprob=one.logprob, rank=one.rank, decoded_token=one.text) for one in candidates}
        for candidates in piece.prompt
    ]
    return {"prompt_logprobs": [candidates or None for candidates in logprobs]}


def trace_of(piece: Piece) -> dict[str, Any]:
    """Return the field `speculative_trace` if it was requested."""
    return {} if piece.trace is None else {"speculative_trace": piece.trace}


async def streamed(
    first: Piece, rest: AsyncIterator[Piece], form: Format, generation: Generation, usage: StreamUsage
) -> AsyncIterator[BaseModel]:
    """Yield the chunks of a whole stream."""
    for chunk in form.chunks(first, _in_chunk(generation, usage)):
        yield chunk
    async for piece in rest:
        for chunk in form.chunks(piece, _in_chunk(generation, usage)):
            yield chunk
    if usage is not StreamUsage.NOWHERE:
        yield form.usage_chunk(generation)


def _in_chunk(generation: Generation, usage: StreamUsage) -> InChunk:
    if usage is StreamUsage.NOWHERE:
        return {}
    return {"usage": usage_of(generation) if usage is StreamUsage.EVERYWHERE else None}
