"""The background audit's books: which requests are chosen, what they said, and what the plain pass says of it.

Knows requests and tokens. Does not know how a token is judged (engine.audit.judgement) nor when passes run
(engine.audit.background).

What is chosen must not depend on what is said, or the test would find its own choice:

- a request is chosen by a hash of its id, and refused a place (dropped) before its first token is drawn;
- of its text the first `num_tokens` tokens count, or all up to the token or the abort that ends it.

An abort falls between two steps, and how far a step comes depends on its tokens. Still each token counted has the target's law
given those before it. For a lossless step, completed by the target, has the target's law at every length: written for t - 1 and
for t tokens, P(at least t are said, y_1 .. y_t) = p(y_t | ..) P(at least t are said, y_1 .. y_t-1). Leaving aborted requests out
would be wrong: clients stop at certain texts.

Shape key: N neighbouring tokens of a text, V vocabulary.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from jaxtyping import Float
from torch import Tensor

from engine.audit.judgement import Judgement, Record, check_of
from engine.audit.outcomes import Tally
from engine.audit.pit import NUM_BINS, evenness
from engine.core.rng_keys import Stream, stream_key, uniform
from engine.core.types import AuditStats, FinishReason, Request, TokenEvent
from engine.structured_output.masks import GrammarMasks

_logger = logging.getLogger(__name__)

_ALARM = 1e-6  # the p-value is looked at after every text: each look may raise a false alarm, so one look must hardly ever
_MAX_TEXTS = 64  # texts that are being written or wait for their pass


class Auditor:
    """Owns the records and the sums. `share` of the requests, at most 64 at a time; 0 audits nothing.

    `tolerance` as engine.audit.outcomes has it. Requests that have a grammar need `grammars`.
    """

    def __init__(self, share: float, num_tokens: int, tolerance: float, seed: int, grammars: GrammarMasks | None = None) -> None:
        self._share = share
        self._num_tokens = num_tokens
        self._grammars = grammars
        self._tolerance = tolerance
        self._uniforms = (uniform(stream_key(seed, 0, Stream.EXTRA), index) for index in count())
        self._open: dict[str, Record] = {}
        self._waiting: list[Record] = []
        self._judgement: Judgement | None = None
        self._bins = [0] * NUM_BINS
        self._is_alarmed = False
        self._news = _News()

    @property
    def has_texts(self) -> bool:
        """Whether a text waits for its pass."""
        return bool(self._waiting)

    def enlist(self, request: Request) -> None:
        """Choose the request, or not; to be told before its first step."""
        check = check_of(request)
        if check is None or not is_chosen(request.request_id, self._share):
            return
        if len(self._open) + len(self._waiting) >= _MAX_TEXTS:
            self._news.num_dropped += 1
        else:
            self._open[request.request_id] = Record(request, check)

    def hear(self, events: Sequence[TokenEvent]) -> None:
        """Write down what chosen requests say."""
        for event in events:
            if (record := self._open.get(event.request_id)) is not None:
                self._write(record, event)

    def _write(self, record: Record, event: TokenEvent) -> None:
        wanted = min(self._num_tokens, record.request.sampling.max_tokens)
        record.token_ids += event.token_ids[: wanted - len(record.token_ids)]
        if event.finish is None and len(record.token_ids) < wanted:
            return
        del self._open[event.request_id]
        if record.token_ids and event.finish is not FinishReason.ERROR:
            self._waiting.append(record)

    def start(self) -> Record:
        """Return the record whose pass is to begin; it waits on until it is judged or dropped.

        That of the shortest prompt: where idle moments are short, a long pass would hold up all others for ever. A prompt's
        length is independent of what was said after it, so the choice cannot be seen in the tests.
        """
        record = min(self._waiting, key=lambda one: len(one.request.prompt_ids))
        self._judgement = Judgement(record, self._tolerance, self._uniforms, self._grammars)
        return record

    def drop(self) -> None:
        """Give the record up whose pass was begun last, if it still waits."""
        judgement, self._judgement = self._judgement, None
        if judgement is not None:
            self._waiting.remove(judgement.record)
            self._news.num_dropped += 1

    def judge(self, logits_NV: Float[Tensor, "N V"]) -> None:
        """Judge the next N tokens of the record whose pass was begun, by the raw logits before each; after the last it counts."""
        if self._judgement is None:
            raise RuntimeError("no pass was begun")
        self._judgement.add(logits_NV)
        if self._judgement.is_done:
            judgement, self._judgement = self._judgement, None
            self._waiting.remove(judgement.record)
            self._count(judgement)

    def _count(self, judgement: Judgement) -> None:
        record, tally = judgement.record, judgement.tally
        self._news.tallies[record.check] = self._news.tallies.get(record.check, Tally()) + tally
        if tally.num_mismatch:
            _logger.error(
                "audit: request %s: %d %s tokens are wrong", record.request.request_id, tally.num_mismatch, record.check
            )
        self._bins = [old + more for old, more in zip(self._bins, judgement.bins, strict=True)]
        self._news.bins = [old + more for old, more in zip(self._news.bins, judgement.bins, strict=True)]
        p_value = evenness(self._bins).p_value
        if p_value < _ALARM and not self._is_alarmed:
            self._is_alarmed = True
            _logger.error("audit: %d sampled tokens do not have the target's law: p = %.1e", sum(self._bins), p_value)

    def taken_stats(self, num_pass_tokens: int | None = None) -> AuditStats | None:
        """Return what is new since the last call, or None if nothing is. A pass of the audit always is, if it failed too."""
        news, self._news = self._news, _News()
        if news == self._news and num_pass_tokens is None:
            return None
        return AuditStats(
            is_pass=num_pass_tokens is not None,
            num_pass_tokens=num_pass_tokens or 0,
            outcomes={check: tally.counts() for check, tally in news.tallies.items()},
            pit_bins=tuple(news.bins),
            num_dropped=news.num_dropped,
            p_value=evenness(self._bins).p_value,
        )


@dataclass
class _News:
    """What has not been told yet."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    bins: list[int] = field(default_factory=lambda: [0] * NUM_BINS)
    num_dropped: int = 0


def is_chosen(request_id: str, share: float) -> bool:
    """Return whether a request is one of the share that is audited: a matter of its name alone."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2.0**64
