"""Converts one sample's token events to pieces of text, log-probabilities and counts.

Knows ids, text and the engine's records. Does not know the wire format. The result does not depend on how tokens are grouped into
events: tokens are processed one at a time.
"""

import math
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

import msgspec

from engine.core.types import FinishReason, TokenEvent
from server.generation.prompt_echo import Candidate, PromptEcho
from server.generation.step_trace import step_trace_of
from server.reasoning.reader import ReasoningReader
from server.schemas.trace import StepTrace
from server.text.codec import TokenText
from server.text.detokenizer import Detokenizer
from server.text.parsed_text import CallPiece, CallReader, PlainReader, ReadText, merged
from server.text.stop_strings import StopFinder
from server.text.token_entry import TokenEntry, entry_of


class Piece(msgspec.Struct, frozen=True):
    """The part of one choice that one event adds.

    The first piece has the prompt's ids. The last piece has the candidates of the prompt's tokens, and the stop string or token
    that ended the text, None for the model's own end. `token_ids` are the counted tokens; the texts and `calls` may lag behind.
    `trace` describes their step. `parts` are content and calls in the order of the text.
    """

    index: int
    text: str = ""
    entries: tuple[TokenEntry, ...] = ()
    finish: FinishReason | None = None
    prompt: tuple[tuple[Candidate, ...], ...] | None = None
    stop_reason: str | int | None = None
    token_ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] | None = None
    trace: StepTrace | None = None
    calls: tuple[CallPiece, ...] = ()
    reasoning: str = ""  # text of the model's reasoning block, which is not part of `text`
    parts: tuple[ReadText, ...] = ()


@dataclass(slots=True)
class AcceptanceCounts:
    """Acceptance of the drafts behind the returned tokens; `histogram[j]` counts steps of which j drafted tokens were returned.

    `trees` counts these steps by the name of the tree. `deepest` is the most tokens that one of them could have accepted.
    `num_predicted` drafted tokens came from the request's prediction; `num_accepted_predicted` of them were returned.
    """

    num_draft_tokens: int = 0
    num_predicted: int = 0
    num_accepted_predicted: int = 0
    histogram: list[int] = field(default_factory=list)
    trees: Counter[str] = field(default_factory=Counter)
    deepest: int = 0

    def add_step(self, event: TokenEvent, num_kept: int) -> None:
        """Count one step that drafted; the first `num_kept` of its tokens were returned."""
        self.num_draft_tokens += event.num_draft_tokens
        self.num_predicted += event.num_predicted_tokens
        self.num_accepted_predicted += sum(place < num_kept for place in event.predicted_places)
        self._count(min(event.num_accepted_tokens, num_kept), 1)
        if event.expansion is not None:
            self.trees[event.expansion.label] += 1
            self.deepest = max(self.deepest, event.expansion.max_depth)

    def add(self, other: "AcceptanceCounts") -> None:
        """Count another sample's steps too."""
        self.num_draft_tokens += other.num_draft_tokens
        self.num_predicted += other.num_predicted
        self.num_accepted_predicted += other.num_accepted_predicted
        self.trees += other.trees
        self.deepest = max(self.deepest, other.deepest)
        for accepted, steps in enumerate(other.histogram):
            self._count(accepted, steps)

    def _count(self, num_accepted: int, num_steps: int) -> None:
        self.histogram.extend([0] * (num_accepted + 1 - len(self.histogram)))
        self.histogram[num_accepted] += num_steps

    @property
    def num_steps(self) -> int:
        """Steps that drafted."""
        return sum(self.histogram)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafted tokens that were returned."""
        return sum(accepted * steps for accepted, steps in enumerate(self.histogram))


class Choice:
    """Owns the text state of one sample. `finish` is set once, by a stop string, the last allowed call, or the engine.

    With `keeps_stop` the stop string that ends it, or the text of the stop token, is part of its text. `prompt` returns the text
    and candidates of the prompt. `named_stop_ids` are the stop tokens that are reported as the reason of an end. With `is_traced`
    its pieces describe the engine's steps. No stop string ends in the text of the first `min_tokens` tokens. `reader` separates
    reasoning and tool calls from content, in the text up to a stop string.
    """

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        token_text: Callable[[int], TokenText],
        num_top_logprobs: int | None = None,
        keeps_stop: bool = False,
        prompt: PromptEcho | None = None,
        named_stop_ids: Container[int] = (),
        is_traced: bool = False,
        reader: CallReader | None = None,
        min_tokens: int = 0,
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_reasoning_tokens = 0  # of the reasoning block, without its markers
        self.num_cached_tokens = 0  # of its prompt; reported with the first token
        self._sum_logprobs = 0.0  # of the counted tokens, if the engine reports log-probabilities
        self.finish: FinishReason | None = None
        self.acceptance = AcceptanceCounts()
        self._detokenizer = detokenizer
        self._stops = StopFinder(stops, keeps_stop)
        self._keeps_stop = keeps_stop
        self._token_text = token_text
        self._num_top_logprobs = num_top_logprobs
        self._prompt = prompt
        self._named_stop_ids = named_stop_ids
        self._is_traced = is_traced
        self._reader = reader or PlainReader()
        self._reasoning_reader = reader if isinstance(reader, ReasoningReader) else None
        self._min_tokens = min_tokens
        self._num_barred = 0  # characters of the prompt and of the first `min_tokens` tokens
        self._num_chars = 0
        self._entries: list[TokenEntry] = []
        self._calls: list[CallPiece] = []
        self._reasoning = ""
        self._parts: list[ReadText] = []

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of its tokens, if the engine reports it; minus infinity without tokens."""
        return self._sum_logprobs / self.num_tokens if self.num_tokens else -math.inf

    @property
    def is_cut(self) -> bool:
        """Whether a stop string or its last call ended it, so that the engine can stop."""
        return self._stops.is_hit or self._reader.is_done

    def take(self, event: TokenEvent) -> Piece:
        """Add an event's tokens up to the end of a stop string or of the last call; return the new piece."""
        num_before, was_finished = self.num_tokens, self.finish is not None
        self.num_cached_tokens += event.num_cached_tokens
        text = self._echoed(event)
        for at in range(len(event.token_ids)):
            text += self._text_of(event, at)
        if event.finish is not None or self.is_cut:
            text += self._end(event.finish)
        calls, self._calls = merged(self._calls) if self._calls else (), []
        reasoning, self._reasoning = self._reasoning, ""
        parts, self._parts = tuple(self._parts), []
        if event.num_draft_tokens and not was_finished:
            self._count_drafts(event, self.num_tokens - num_before)
        return Piece(
            self.index,
            text,
            self._ready_entries(bool(text or calls or reasoning)) if self._entries else (),
            self.finish,
            self._prompt.candidates() if self._prompt and self.finish is not None else None,
            self._stop_reason(event) if self.finish is not None else None,
            event.token_ids[: self.num_tokens - num_before],
            self._prompt.ids if self._prompt and not num_before else None,
            step_trace_of(event.trace, self._token_text) if self._is_traced and event.trace else None,
            calls,
            reasoning,
            parts,
        )

    def _end(self, finish: FinishReason | None) -> str:
        """Return the rest of the text, which the engine's `finish` ends, or else a cut."""
        text = "" if self.is_cut else self._close()
        text += self._content_of(self._reader.close(finish is FinishReason.LENGTH and not self.is_cut))
        self.finish = self.finish or (FinishReason.STOP if self.is_cut else finish)
        return text

    def _stop_reason(self, event: TokenEvent) -> str | int | None:
        if self.is_cut:
            return self._stops.hit
        return event.stop_token_id if event.stop_token_id in self._named_stop_ids else None

    def _echoed(self, event: TokenEvent) -> str:
        """Return the prompt's text at the first token, or at the end without tokens. Stop strings are not searched in it."""
        if self._prompt is None or self.num_tokens:
            return ""
        self._prompt.add_logprobs(event.prompt_logprobs)
        if not event.token_ids and event.finish is None:
            return ""
        text, entries = self._prompt.echo(self._detokenizer)
        self._num_chars += len(text)
        self._num_barred = self._num_chars + self._detokenizer.num_held
        self._entries += entries
        return text

    def _text_of(self, event: TokenEvent, at: int) -> str:
        """Return the content that becomes certain with token `at` of the event; empty once the text is cut."""
        token_id, was_inside = event.token_ids[at], self._is_inside_reasoning
        text = "" if self.is_cut else self._pass_on(self._detokenizer.settle(token_id))
        if self.is_cut:
            return text
        self.num_tokens += 1
        self._sum_logprobs += event.logprobs[at].logprob if event.logprobs else 0.0
        if self._num_top_logprobs is not None and event.logprobs:
            offset = self._num_chars + self._detokenizer.num_held
            self._entries.append(entry_of(self._token_text, token_id, event.logprobs[at], self._num_top_logprobs, offset))
        is_stop_token = token_id == event.stop_token_id and at == len(event.token_ids) - 1
        if not is_stop_token or self._keeps_stop:
            text += self._pass_on(self._detokenizer.push(token_id))
        if self.num_tokens == self._min_tokens:
            self._num_barred = self._num_chars + self._detokenizer.num_held
        if was_inside:
            self.num_reasoning_tokens += self._is_inside_reasoning
        return text

    @property
    def _is_inside_reasoning(self) -> bool:
        return self._reasoning_reader is not None and self._reasoning_reader.is_inside

    def _pass_on(self, text: str) -> str:
        if not text:
            return ""
        num_barred = len(text) if self.num_tokens <= self._min_tokens else max(0, self._num_barred - self._num_chars)
        self._num_chars += len(text)
        return self._read(self._stops.feed(text, num_barred))

    def _read(self, text: str) -> str:
        return self._content_of(self._reader.feed(text)) if text else ""

    def _content_of(self, read: ReadText) -> str:
        if read.calls:
            self._calls += read.calls
        if read.reasoning:
            self._reasoning += read.reasoning
        if read.content or read.calls:
            self._parts.append(read)
        return read.content

    def _close(self) -> str:
        text = self._pass_on(self._detokenizer.close())
        return text + self._read(self._stops.close())

    def _count_drafts(self, event: TokenEvent, num_kept: int) -> None:
        if num_kept:
            self.acceptance.add_step(event, num_kept)

    def _ready_entries(self, has_output: bool) -> tuple[TokenEntry, ...]:
        """Return the pending entries. They are sent with content, calls or the finish, never alone."""
        if not has_output and self.finish is None:
            return ()
        ready, self._entries = tuple(self._entries), []
        return ready
