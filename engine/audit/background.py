"""An engine that audits its own output: while it is idle, it feeds generated tokens again in plain passes and checks them.

A pass runs only while the engine is idle, one small chunk a step. It frees its slots and starts again when a request arrives, so
a client waits for one chunk at most. Under constant load nothing is audited, and dropped records are counted.
"""

import logging
from collections.abc import Callable

from msgspec import structs

from engine.audit.auditor import Auditor
from engine.core.types import ModelInfo, Request, StepStats
from engine.engine import Engine, StepOutput, with_end_tokens
from engine.worker.step_log import StepNote

_logger = logging.getLogger(__name__)


class AuditedEngine:
    """An engine and the auditor of its requests, with the engine's interface. Owns the engine."""

    def __init__(self, engine: Engine, auditor: Auditor) -> None:
        self._engine = engine
        self._auditor = auditor
        self._forcing = engine.forcing()
        self._last_step = 0

    @property
    def info(self) -> ModelInfo:
        """The loaded models."""
        return self._engine.info

    @property
    def has_work(self) -> bool:
        """Whether a step would do work or return events, passes of the audit included."""
        return self._engine.has_work or self._auditor.has_pending

    def add_step_listener(self, listener: Callable[[StepNote], None]) -> None:
        """Call `listener` before each step of the engine; passes of the audit are not reported."""
        self._engine.add_step_listener(listener)

    def add(self, request: Request) -> None:
        """Queue a request in the engine; a running audit pass stops and frees its slots."""
        self._forcing.stop()
        self._engine.add(request)
        if not request.progress.token_ids:  # a resumed request's first tokens were not observed here
            self._auditor.select(with_end_tokens(request, self.info))

    def abort(self, request_id: str) -> None:
        """End a request now; the next step returns its last event. Unknown ids are ignored."""
        self._engine.abort(request_id)

    def check_integrity(self) -> None:
        """Raise IntegrityError if the engine's state is inconsistent. Valid between steps."""
        self._engine.check_integrity()

    def step(self) -> StepOutput:
        """Advance every running request or, if there is none, the audit."""
        is_idle = self._forcing.is_running or not self._engine.has_work
        if is_idle and self._auditor.has_pending:
            return self._audit()
        output = self._engine.step()
        self._last_step = output.stats.step
        self._auditor.observe(output.events)
        return structs.replace(output, stats=structs.replace(output.stats, audit=self._auditor.taken_stats()))

    def _audit(self) -> StepOutput:
        """Feed a chunk of a waiting record and check the tokens in it."""
        num_tokens = 0
        try:
            if not self._forcing.is_running:
                self._forcing.start(self._auditor.start().text)
            done = self._forcing.step()
            num_tokens = done.num_tokens
            if done.logits_NV is not None:
                self._auditor.check(done.logits_NV)
        except Exception:
            _logger.exception("audit: a record cannot be checked")  # a fault of the audit must not reach clients
            self._forcing.stop()
            self._auditor.drop()
        return StepOutput((), self._stats(num_tokens), self._engine.take_cache_events())

    def _stats(self, num_pass_tokens: int) -> StepStats:
        """Return the stats of a step of the audit, in which no request runs."""
        return StepStats(
            step=self._last_step,
            num_running=0,
            num_waiting=0,
            num_used_slots=self._forcing.num_used_slots,
            num_slots=self.info.num_slots,
            audit=self._auditor.taken_stats(num_pass_tokens),
        )
