"""The wire format of /infill: llama.cpp's answer, of which a request may name the only fields to return."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from engine.core.types import FinishReason
from server.answer_formats.common import InChunk
from server.generation.generation import Generation
from server.generation.line_limits import LineLimits
from server.generation.sample import Piece
from server.schemas.infill import InfillAnswer, InfillRequest, InfillTimings

_SETTINGS = {"n_predict", "temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop", "ignore_eos", "n_indent"}


class InfillFormat:
    """One answer. `limits` may have ended its text; `decode` returns the text of the prompt."""

    ends_with_done = False

    def __init__(self, body: InfillRequest, model: str, limits: LineLimits, decode: Callable[[Sequence[int]], str]) -> None:
        self._body = body
        self._model = model
        self._limits = limits
        self._decode = decode
        self._prompt_ids: tuple[int, ...] = ()
        self._num_tokens = 0
        self._has_new_line = False
        self._end = Piece(0)

    def chunks(self, piece: Piece, _usage: InChunk) -> Iterator[InfillAnswer]:
        """Yield one chunk if there is text, or token ids are requested."""
        self._take(piece)
        if piece.text or (piece.token_ids and self._body.return_tokens):
            yield InfillAnswer(content=piece.text, tokens=self._tokens_of(piece), stop=False, **self._counts())

    def usage_chunk(self, generation: Generation) -> InfillAnswer:
        """Return a stream's last chunk, which has no text."""
        return self._last("", [], generation)

    def answer(self, pieces: Sequence[Piece], generation: Generation) -> InfillAnswer:
        """Return the whole answer."""
        (piece,) = pieces
        self._take(piece)
        return self._last(piece.text, self._tokens_of(piece), generation)

    def _take(self, piece: Piece) -> None:
        self._prompt_ids = piece.prompt_ids or self._prompt_ids
        self._num_tokens += len(piece.token_ids)
        self._has_new_line |= "\n" in piece.text
        self._end = piece

    def _tokens_of(self, piece: Piece) -> list[int]:
        return list(piece.token_ids) if self._body.return_tokens else []

    def _counts(self) -> dict[str, Any]:
        return {"index": 0, "id_slot": -1, "tokens_predicted": self._num_tokens, "tokens_evaluated": len(self._prompt_ids)}

    def _last(self, content: str, tokens: list[int], generation: Generation) -> InfillAnswer:
        stopping_word = self._end.stop_reason if isinstance(self._end.stop_reason, str) else ""
        is_limit = self._end.finish is FinishReason.LENGTH or self._limits.is_done
        answer = InfillAnswer(
            content=content,
            tokens=tokens,
            stop=True,
            model=self._model,
            **self._counts(),
            tokens_cached=generation.num_cached_tokens,
            truncated=generation.is_prompt_cut,
            has_new_line=self._has_new_line,
            prompt=self._decode(self._prompt_ids),
            generation_settings=self._body.model_dump(include=_SETTINGS, exclude_none=True),
            stop_type="word" if stopping_word else "limit" if is_limit else "eos",
            stopping_word=stopping_word,
            timings=_timings_of(generation),
        )
        if not self._body.response_fields:
            return answer
        values = answer.model_dump()
        return InfillAnswer(**{path: value for path in self._body.response_fields for value in _found(values, path)})


def _found(values: Any, path: str) -> Iterator[Any]:
    """Yield the value of a field, or of a field inside another (`timings/prompt_n`), if there is one."""
    for name in path.split("/"):
        if not isinstance(values, dict) or name not in values:
            return
        values = values[name]
    yield values


def _timings_of(generation: Generation) -> InfillTimings:
    (times,) = generation.times
    admitted_s, first_s = times.admitted_s or times.arrival_s, times.first_token_s or times.arrival_s
    num_prompt, num_predicted = times.num_prompt_tokens - generation.num_cached_tokens, times.num_tokens
    prompt_ms, predicted_ms = 1e3 * (first_s - admitted_s), 1e3 * ((times.last_token_s or first_s) - first_s)
    return InfillTimings(
        prompt_n=num_prompt,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=prompt_ms / max(1, num_prompt),
        prompt_per_second=1e3 * num_prompt / prompt_ms if prompt_ms > 0 else 0.0,
        predicted_n=num_predicted,
        predicted_ms=predicted_ms,
        predicted_per_token_ms=predicted_ms / max(1, num_predicted),
        predicted_per_second=1e3 * num_predicted / predicted_ms if predicted_ms > 0 else 0.0,
    )
