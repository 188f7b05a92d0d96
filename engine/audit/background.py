"""An engine that audits itself: when clients have nothing for it to do, what it said is fed again by a plain pass and judged.

A pass runs in idle moments only, a small chunk a step, and gives its slots back the moment a request comes; it then begins anew.
So no client waits longer than for the chunk that was under way; under unbroken load nothing is audited, and what is dropped is
counted.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

from engine.audit.auditor import Auditor
from engine.core.types import ModelInfo, Request, StepStats
from engine.engine import Engine, StepOutput, with_end_tokens
from engine.worker.step_log import StepNote

_logger = logging.getLogger(__name__)


class AuditedEngine:
    """An engine and the auditor of its requests; steps like the engine it wraps, and owns it."""

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
        """Whether a step would do or say something, passes of the audit included."""
        return self._engine.has_work or self._auditor.has_texts

    def add_step_listener(self, listener: Callable[[StepNote], None]) -> None:
        """Call `listener` before each step of the engine; passes of the audit are not reported."""
        self._engine.add_step_listener(listener)

    def add(self, request: Request) -> None:
        """Queue a request, as the engine does; an audit that is under way makes room."""
        self._forcing.stop()
        self._engine.add(request)
        if not request.progress.token_ids:  # what was said first is known to no audit of this engine
            self._auditor.enlist(with_end_tokens(request, self.info))

    def abort(self, request_id: str) -> None:
        """End a request now; the next step tells of it. Unknown ids are ignored."""
        self._engine.abort(request_id)

    def check_integrity(self) -> None:
        """Raise IntegrityError if the books do not balance. Valid between steps."""
        self._engine.check_integrity()

    def step(self) -> StepOutput:
        """Advance every running request; or, if there is none, the audit."""
        is_idle = self._forcing.is_running or not self._engine.has_work
        if is_idle and self._auditor.has_texts:
            return self._audit()
        output = self._engine.step()
        self._last_step = output.stats.step
        self._auditor.hear(output.events)
        return replace(output, stats=replace(output.stats, audit=self._auditor.taken_stats()))

    def _audit(self) -> StepOutput:
        """Feed a chunk of a text that waits and judge the tokens it reached."""
        num_tokens = 0
        try:
            if not self._forcing.is_running:
                self._forcing.start(self._auditor.start().text)
            done = self._forcing.step()
            num_tokens = done.num_tokens
            if done.logits_NV is not None:
                self._auditor.judge(done.logits_NV)
        except Exception:
            _logger.exception("audit: a text cannot be judged")  # clients are not to suffer for it
            self._forcing.stop()
            self._auditor.drop()
        return StepOutput((), self._stats(num_tokens))

    def _stats(self, num_pass_tokens: int) -> StepStats:
        """Return the numbers of a step that was the audit's: no request runs in it."""
        return StepStats(
            step=self._last_step,
            num_running=0,
            num_waiting=0,
            num_used_slots=self._forcing.num_used_slots,
            num_slots=self.info.num_slots,
            audit=self._auditor.taken_stats(num_pass_tokens),
        )
