"""What both wire formats share: their Protocol, the numbers of a generation, ends, and samples put together again."""

import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from pydantic import BaseModel

from engine.types import FinishReason
from server.choice import AcceptanceCounts, Piece
from server.generation import Generation
from server.schemas.answer import CompletionTokensDetails, Metrics, PromptLogprob, PromptTokensDetails, SpeculativeDecoding, Usage
from server.schemas.common import StreamUsage

InChunk = Mapping[str, Any]  # the field `usage` of a chunk that has choices; empty if it has none


def answer_id(kind: str, request_id: str | None) -> str:
    """Return the id of an answer of that kind: the client's name of the request, or one that nobody else has."""
    return f"{kind}-{request_id or uuid.uuid4().hex}"


class Format(Protocol):
    """One answer in one of the formats: it has one id and one time, however many chunks it is sent in."""

    def chunks(self, piece: Piece, usage: InChunk) -> Iterable[BaseModel]:
        """Return what a stream says of one piece; nothing if it adds nothing. Every chunk has `usage` as given."""
        ...

    def usage_chunk(self, generation: Generation) -> BaseModel:
        """Return a stream's last chunk, which has the numbers and no choices."""
        ...

    def answer(self, pieces: Sequence[Piece], generation: Generation) -> BaseModel:
        """Return the answer that is no stream; `pieces` has one piece for each choice, in order."""
        ...


def finish_reason(finish: FinishReason | None) -> Literal["stop", "length"] | None:
    """Return what the wire calls an end. Errors and aborts never come here: they are error answers."""
    if finish is None:
        return None
    return "length" if finish is FinishReason.LENGTH else "stop"


def usage_of(generation: Generation) -> Usage:
    """Return the token counts. No prompt token is reported as cached: the engine does not tell."""
    num_prompt, num_completion, counts = generation.num_prompt_tokens, generation.num_completion_tokens, generation.acceptance
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_completion,
        total_tokens=num_prompt + num_completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=0),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=counts.num_accepted_predicted,
            rejected_prediction_tokens=counts.num_predicted - counts.num_accepted_predicted,
        ),
    )


def metrics_of(counts: AcceptanceCounts) -> Metrics:
    """Return what speculation did for the returned tokens."""
    num_steps, num_accepted = counts.num_steps, counts.num_accepted_tokens
    speculative = SpeculativeDecoding(
        mean_acceptance_length=1 + num_accepted / num_steps if num_steps else 1.0,
        draft_acceptance_rate=num_accepted / counts.num_draft_tokens if counts.num_draft_tokens else 0.0,
        num_spec_steps=num_steps,
        num_accepted_draft_tokens=num_accepted,
        num_draft_tokens=counts.num_draft_tokens,
        acceptance_histogram=counts.histogram,
    )
    return Metrics(speculative_decoding=speculative)


async def joined(pieces: AsyncIterator[Piece], num_choices: int) -> list[Piece]:
    """Return one piece for each choice, in the order of their indices, when all have come."""
    parts: list[list[Piece]] = [[] for _ in range(num_choices)]
    async for piece in pieces:
        parts[piece.index].append(piece)
    return [_joined_choice(index, of_choice) for index, of_choice in enumerate(parts)]


def _joined_choice(index: int, pieces: Sequence[Piece]) -> Piece:
    text = "".join(piece.text for piece in pieces)
    entries = tuple(entry for piece in pieces for entry in piece.entries)
    return Piece(index, text, entries, pieces[-1].finish, pieces[-1].prompt)


def prompt_logprobs_of(piece: Piece) -> dict[str, Any]:
    """Return the field `prompt_logprobs` if it was asked for: by token the candidates by id, null for the first."""
    if piece.prompt is None:
        return {}
    told = [
        {str(one.token_id): PromptLogprob(logprob=one.logprob, rank=one.rank, decoded_token=one.text) for one in candidates}
        for candidates in piece.prompt
    ]
    return {"prompt_logprobs": [candidates or None for candidates in told]}


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
