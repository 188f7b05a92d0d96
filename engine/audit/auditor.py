"""The state of the background audit: the selected requests, their tokens, and the test statistics.

Tokens are checked in engine.audit.record_check. engine.audit.background decides when passes run.

The selection must not depend on the generated tokens, or the test would measure its own selection:

- a request is selected by a hash of its id, and dropped for lack of capacity before its first token is drawn;
- the first `num_tokens` tokens count, or all up to the token or the abort that ends the request.

An abort falls between two steps, and the length of a step depends on its tokens. Still each counted token has the target's
distribution given the earlier tokens: a lossless step, completed by the target, has the target's distribution at every length.
For t - 1 and t tokens: P(at least t tokens, y_1 .. y_t) = p(y_t | ..) P(at least t tokens, y_1 .. y_t-1). Excluding aborted
requests would bias the test, because clients abort after certain tokens.

Shape key: N consecutive tokens of a sequence, V vocabulary.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from jaxtyping import Float
from torch import Tensor

from engine.audit.outcomes import Tally
from engine.audit.pit import NUM_BINS, uniformity_test
from engine.audit.record_check import AuditRecord, RecordCheck, check_of
from engine.core.rng_keys import Stream, stream_key, uniform
from engine.core.types import AuditStats, FinishReason, Request, TokenEvent
from engine.structured_output.masks import GrammarMasks

_logger = logging.getLogger(__name__)

_ALARM = 1e-6  # low, because the p-value is tested again after every sequence
_MAX_RECORDS = 64  # records that are being filled or wait for their pass


class Auditor:
    """Owns the records and the statistics. Audits a `share` of the requests, at most 64 at a time; 0 audits nothing.

    `tolerance` is defined in engine.audit.outcomes. Requests with a grammar need `grammars`.
    """

    def __init__(self, share: float, num_tokens: int, tolerance: float, seed: int, grammars: GrammarMasks | None = None) -> None:
        self._share = share
        self._num_tokens = num_tokens
        self._grammars = grammars
        self._tolerance = tolerance
        self._uniforms = (uniform(stream_key(seed, 0, Stream.EXTRA), index) for index in count())
        self._open: dict[str, AuditRecord] = {}
        self._waiting: list[AuditRecord] = []
        self._running: RecordCheck | None = None
        self._bins = [0] * NUM_BINS
        self._is_alarmed = False
        self._unreported = _Unreported()

    @property
    def has_pending(self) -> bool:
        """Whether a record waits for its pass."""
        return bool(self._waiting)

    def select(self, request: Request) -> None:
        """Audit the request if it is selected. Call this before its first step."""
        check = check_of(request)
        if check is None or not is_selected(request.request_id, self._share):
            return
        if len(self._open) + len(self._waiting) >= _MAX_RECORDS:
            self._unreported.num_dropped += 1
        else:
            self._open[request.request_id] = AuditRecord(request, check)

    def observe(self, events: Sequence[TokenEvent]) -> None:
        """Record the tokens of selected requests."""
        for event in events:
            if (record := self._open.get(event.request_id)) is not None:
                self._append(record, event)

    def _append(self, record: AuditRecord, event: TokenEvent) -> None:
        wanted = min(self._num_tokens, record.request.sampling.max_tokens)
        record.token_ids += event.token_ids[: wanted - len(record.token_ids)]
        if event.finish is None and len(record.token_ids) < wanted:
            return
        del self._open[event.request_id]
        if record.token_ids and event.finish is not FinishReason.ERROR:
            self._waiting.append(record)

    def start(self) -> AuditRecord:
        """Begin to check a record and return it; it keeps waiting until it is checked or dropped.

        The record with the shortest prompt comes first, or a long pass could block all others where idle periods are short. A
        prompt's length is independent of the tokens generated after it, so this order does not bias the tests.
        """
        record = min(self._waiting, key=lambda one: len(one.request.prompt_ids))
        self._running = RecordCheck(record, self._tolerance, self._uniforms, self._grammars)
        return record

    def drop(self) -> None:
        """Drop the record of the current pass, if there is one."""
        running, self._running = self._running, None
        if running is not None:
            self._waiting.remove(running.record)
            self._unreported.num_dropped += 1

    def check(self, logits_NV: Float[Tensor, "N V"]) -> None:
        """Check the next N tokens of the current record by the raw logits before each; count the record after its last token."""
        if self._running is None:
            raise RuntimeError("no pass has begun")
        self._running.add(logits_NV)
        if self._running.is_done:
            done, self._running = self._running, None
            self._waiting.remove(done.record)
            self._count(done)

    def _count(self, done: RecordCheck) -> None:
        record, tally, unreported = done.record, done.tally, self._unreported
        unreported.tallies[record.check] = unreported.tallies.get(record.check, Tally()) + tally
        if tally.num_mismatch:
            _logger.error(
                "audit: request %s: %d %s tokens are wrong", record.request.request_id, tally.num_mismatch, record.check
            )
        self._bins = [old + more for old, more in zip(self._bins, done.bins, strict=True)]
        unreported.bins = [old + more for old, more in zip(unreported.bins, done.bins, strict=True)]
        p_value = uniformity_test(self._bins).p_value
        if p_value < _ALARM and not self._is_alarmed:
            self._is_alarmed = True
            _logger.error("audit: %d sampled tokens do not have the target's distribution: p = %.1e", sum(self._bins), p_value)

    def taken_stats(self, num_pass_tokens: int | None = None) -> AuditStats | None:
        """Return the results since the last call, or None if there are none; a pass of the audit is one, even if it failed."""
        found, self._unreported = self._unreported, _Unreported()
        if found == self._unreported and num_pass_tokens is None:
            return None
        return AuditStats(
            is_pass=num_pass_tokens is not None,
            num_pass_tokens=num_pass_tokens or 0,
            outcomes={check: tally.counts() for check, tally in found.tallies.items()},
            pit_bins=tuple(found.bins),
            num_dropped=found.num_dropped,
            p_value=uniformity_test(self._bins).p_value,
        )


@dataclass
class _Unreported:
    """Results since the last report."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    bins: list[int] = field(default_factory=lambda: [0] * NUM_BINS)
    num_dropped: int = 0


def is_selected(request_id: str, share: float) -> bool:
    """Return whether a request is in the audited share, which depends on its id alone."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2.0**64
