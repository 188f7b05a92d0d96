"""The background audit's books: which requests are chosen, what they said, and what the plain pass says of it.

Knows requests, tokens and logits. Does not know when passes run (engine.audit.background).

What is chosen must not depend on what is said, or the test would find its own choice:

- a request is chosen by a hash of its id, and refused a place (dropped) before its first token is drawn;
- of its text the first `num_tokens` tokens count, or all up to the token or the abort that ends it.

An abort falls between two steps, and how far a step comes depends on its tokens. Still each token counted has the target's law
given those before it. For a lossless step, completed by the target, has the target's law at every length: written for t - 1 and
for t tokens, P(at least t are said, y_1 .. y_t) = p(y_t | ..) P(at least t are said, y_1 .. y_t-1). Leaving aborted requests out
would be wrong: clients stop at certain texts.

Shape key: N tokens of a text, V vocabulary.
"""

import hashlib
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

import torch
from jaxtyping import Float
from torch import Tensor

from engine.audit.outcomes import Support, Tally, greedy_gaps, support_of, tally_gaps, tie_tolerance
from engine.audit.pit import NUM_BINS, binned, evenness, transformed
from engine.forcing import KnownText
from engine.keys import Stream, stream_key, uniform
from engine.logit_edits import edited_logits
from engine.noise import gumbels
from engine.plan import LawContext
from engine.sampling import processed_laws
from engine.types import AuditStats, FinishReason, Request, SamplingParams, TokenEvent

_logger = logging.getLogger(__name__)

_ALARM = 1e-6  # the p-value is looked at after every text: each look may raise a false alarm, so one look must hardly ever
_MAX_TEXTS = 64  # texts that are being written or wait for their pass


class Check(StrEnum):
    """What can be said of a request's tokens."""

    GREEDY = "greedy"  # each is the arg max
    COUPLED = "coupled"  # each is the arg max with the seed's noise
    SAMPLED = "sampled"  # each is a fresh draw


@dataclass
class Record:
    """A chosen request and its first tokens. Filled by the auditor until it is closed."""

    request: Request
    check: Check
    token_ids: list[int] = field(default_factory=list)

    @property
    def text(self) -> KnownText:
        """What is to be fed again."""
        return KnownText(self.request.prompt_ids, tuple(self.token_ids))


class Auditor:
    """Owns the records and the sums. `share` of the requests, at most 64 at a time; 0 audits nothing."""

    def __init__(self, share: float, num_tokens: int, dtype: str, seed: int) -> None:
        self._share = share
        self._num_tokens = num_tokens
        self._tolerance = tie_tolerance(dtype)
        self._uniforms = (uniform(stream_key(seed, 0, Stream.EXTRA), index) for index in count())
        self._open: dict[str, Record] = {}
        self._waiting: deque[Record] = deque()
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

    def first(self) -> Record:
        """Return the record that waits longest; it waits on until it is judged or dropped."""
        return self._waiting[0]

    def drop(self) -> None:
        """Give the first record up."""
        self._waiting.popleft()
        self._news.num_dropped += 1

    def judge(self, logits_NV: Float[Tensor, "N V"]) -> None:
        """Judge the first record by the raw logits before each of its tokens."""
        record = self._waiting.popleft()
        tally = self._judged(record, logits_NV)
        self._news.tallies[record.check] = self._news.tallies.get(record.check, Tally()) + tally
        if tally.num_mismatch:
            _logger.error(
                "audit: request %s: %d %s tokens are wrong", record.request.request_id, tally.num_mismatch, record.check
            )

    def _judged(self, record: Record, logits_NV: Tensor) -> Tally:
        sampling, token_ids = record.request.sampling, record.token_ids
        if not bool(torch.isfinite(logits_NV.amax(-1)).all()):
            return Tally(num_mismatch=len(token_ids))
        if record.check is Check.GREEDY:
            edited_NV = edited_logits(logits_NV, _contexts(record, sampling))
            return tally_gaps(greedy_gaps(edited_NV, token_ids), self._tolerance)

        def laws_of(params: SamplingParams) -> Tensor:
            return processed_laws(logits_NV, _contexts(record, params))

        support = support_of(laws_of, sampling, self._tolerance)
        if record.check is Check.COUPLED:
            noise_NV = _noise(record, logits_NV)
            return tally_gaps(support.coupled_gaps(noise_NV, token_ids), self._tolerance / sampling.temperature)
        self._count_draws(record, support)
        return support.tally(token_ids)

    def _count_draws(self, record: Record, support: Support) -> None:
        """Put every draw into its bin."""
        uniforms = [next(self._uniforms) for _ in record.token_ids]
        new = binned(transformed(support.laws_NV, record.token_ids, uniforms))
        self._bins = [old + more for old, more in zip(self._bins, new, strict=True)]
        self._news.bins = [old + more for old, more in zip(self._news.bins, new, strict=True)]
        p_value = evenness(self._bins).p_value
        if p_value < _ALARM and not self._is_alarmed:
            self._is_alarmed = True
            _logger.error("audit: %d sampled tokens do not have the target's law: p = %.1e", sum(self._bins), p_value)

    def taken_stats(self, num_pass_tokens: int = 0) -> AuditStats | None:
        """Return what is new since the last call, or None if nothing is."""
        news, self._news = self._news, _News()
        if news == self._news and not num_pass_tokens:
            return None
        return AuditStats(
            num_pass_tokens=num_pass_tokens,
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


def check_of(request: Request) -> Check | None:
    """Return what can be checked of a request. A seed under another rule than coupled makes neither a choice nor a fresh draw."""
    if request.sampling.is_greedy:
        return Check.GREEDY
    if request.sampling.seed is None:
        return Check.SAMPLED
    return Check.COUPLED if request.speculation.verifier in (None, "coupled") else None


def _contexts(record: Record, sampling: SamplingParams) -> list[LawContext]:
    prompt, token_ids = record.request.prompt_ids, tuple(record.token_ids)
    return [LawContext(sampling, prompt, len(prompt), token_ids[:place]) for place in range(len(token_ids))]


def _noise(record: Record, logits_NV: Tensor) -> Tensor:
    """Return the noise of each token's absolute position under the request's seed."""
    seed, first = record.request.sampling.seed, len(record.request.prompt_ids)
    assert seed is not None  # or the check would be another
    keys = [stream_key(seed, first + place, Stream.TOKEN) for place in range(len(record.token_ids))]
    return gumbels(keys, logits_NV.shape[-1], logits_NV.device)
