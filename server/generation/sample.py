"""One sample's way from token events to pieces of text, log-probabilities and counts.

Knows ids, text and the engine's records. Does not know the wire format, and gets the same result however tokens are
spread over events: it looks at one token at a time.
"""

import math
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from engine.core.types import FinishReason, TokenEvent
from server.generation.prompt_echo import Candidate, ToldPrompt
from server.generation.step_trace import step_trace_of
from server.schemas.trace import StepTrace
from server.text.codec import TokenText
from server.text.detokenizer import Detokenizer
from server.text.stop_strings import StopFinder
from server.text.token_entry import TokenEntry, entry_of
from server.tool_calls.reader import CallPiece, CallReader, PlainReader, Said, merged


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event adds to one choice.

    The first one has the prompt's ids, the last one what is told of the prompt, by its tokens, and which stop string or token
    ended the text, None for the model's own end. `token_ids` are those that count, `text` and `calls` may lag behind them;
    `trace` tells of their step.
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


@dataclass(slots=True)
class AcceptanceCounts:
    """What became of the drafts of the returned tokens; `histogram[j]` counts steps of which j drafted tokens were returned.

    `trees` counts these steps by the name of the tree, `deepest` is the most tokens that one of them could have accepted.
    `num_predicted` of the drafted tokens were foretold by the request's prediction, `num_accepted_predicted` of them returned.
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
    """Owns the text state of one sample. `finish` is set once, by a stop string, the last call that may come, or the engine.

    With `keeps_stop` the stop string that ends it, or the text of the stop token, is part of its text. `prompt` is what it is to
    tell of its own. `named_stop_ids` are the stop tokens that are told as the reason of an end. One that `is_traced` tells of the
    engine's steps. No stop string ends in the text of its first `min_tokens` tokens.
    `reader` tells calls of tools from content, in what stop strings leave of the text.
    """

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        token_text: Callable[[int], TokenText],
        num_top_logprobs: int | None = None,
        keeps_stop: bool = False,
        prompt: ToldPrompt | None = None,
        named_stop_ids: Container[int] = (),
        is_traced: bool = False,
        reader: CallReader | None = None,
        min_tokens: int = 0,
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_cached_tokens = 0  # of its prompt, known with the first token
        self._sum_logprobs = 0.0  # of the tokens counted, as far as the engine tells them
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
        self._min_tokens = min_tokens
        self._num_chars = 0
        self._entries: list[TokenEntry] = []
        self._calls: list[CallPiece] = []

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of its tokens, where the engine tells them; nothing is worse than no tokens."""
        return self._sum_logprobs / self.num_tokens if self.num_tokens else -math.inf

    @property
    def is_cut(self) -> bool:
        """Whether a stop string or its last call ended it, so that the engine need not go on."""
        return self._stops.is_hit or self._reader.is_done

    def take(self, event: TokenEvent) -> Piece:
        """Add an event's tokens up to the one that completes a stop string, or the last call; return what they add."""
        num_before = self.num_tokens
        self.num_cached_tokens += event.num_cached_tokens
        text = self._echoed(event) + "".join(self._text_of(event, at) for at in range(len(event.token_ids)))
        if event.finish is not None and not self.is_cut:
            text += self._close()
        if event.finish is not None or self.is_cut:
            text += self._content_of(self._reader.close())
        calls, self._calls = merged(self._calls), []
        if self.finish is None:
            self.finish = FinishReason.STOP if self.is_cut else event.finish
            self._count_drafts(event, self.num_tokens - num_before)
        return Piece(
            self.index,
            text,
            self._ready_entries(bool(text or calls)),
            self.finish,
            self._prompt.candidates() if self._prompt and self.finish is not None else None,
            self._stop_reason(event),
            event.token_ids[: self.num_tokens - num_before],
            self._prompt.ids if self._prompt and not num_before else None,
            step_trace_of(event.trace, self._token_text) if self._is_traced and event.trace else None,
            calls,
        )

    def _stop_reason(self, event: TokenEvent) -> str | int | None:
        if self.is_cut:
            return self._stops.hit
        return event.stop_token_id if event.stop_token_id in self._named_stop_ids else None

    def _echoed(self, event: TokenEvent) -> str:
        """Return the prompt's text with the first token, or the end if there is none; no stop string is looked for in it."""
        if self._prompt is None or self.num_tokens:
            return ""
        self._prompt.hear(event.prompt_logprobs)
        if not event.token_ids and event.finish is None:
            return ""
        text, entries = self._prompt.echo(self._detokenizer)
        self._num_chars += len(text)
        self._entries += entries
        return text

    def _text_of(self, event: TokenEvent, at: int) -> str:
        """Return the content that token `at` of the event lets out; nothing once the text is cut."""
        token_id = event.token_ids[at]
        text = "" if self.is_cut else self._let_out(self._detokenizer.settle(token_id))
        if self.is_cut:
            return text
        self.num_tokens += 1
        self._sum_logprobs += event.logprobs[at].logprob if event.logprobs else 0.0
        if self._num_top_logprobs is not None and event.logprobs:
            self._entries.append(
                entry_of(self._token_text, token_id, event.logprobs[at], self._num_top_logprobs, self._num_chars)
            )
        is_stop_token = token_id == event.stop_token_id and at == len(event.token_ids) - 1
        return text if is_stop_token and not self._keeps_stop else text + self._let_out(self._detokenizer.push(token_id))

    def _let_out(self, text: str) -> str:
        self._num_chars += len(text)
        return self._read(self._stops.feed(text, self.num_tokens > self._min_tokens)) if text else ""

    def _read(self, text: str) -> str:
        return self._content_of(self._reader.feed(text)) if text else ""

    def _content_of(self, said: Said) -> str:
        self._calls += said.calls
        return said.content

    def _close(self) -> str:
        text = self._let_out(self._detokenizer.close())
        return text + self._read(self._stops.close())

    def _count_drafts(self, event: TokenEvent, num_kept: int) -> None:
        if event.num_draft_tokens and num_kept:
            self.acceptance.add_step(event, num_kept)

    def _ready_entries(self, is_anything_said: bool) -> tuple[TokenEntry, ...]:
        """Return the entries that wait for a chunk: they travel with content, calls or the finish, never alone."""
        if not is_anything_said and self.finish is None:
            return ()
        ready, self._entries = tuple(self._entries), []
        return ready
