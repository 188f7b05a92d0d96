"""The synchronous engine loop: takes commands, returns step results, ends each request exactly once.

Knows the interface of a stepped engine and the set of live requests. Does not know threads, processes or sockets.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from engine.core.cache_events import CacheEvent
from engine.core.config import EngineConfig
from engine.core.types import ModelInfo, Request, StepStats, TokenEvent
from engine.core.validation import refusal_event
from engine.scheduler.slot_allocator import IntegrityError
from engine.worker.messages import Abort, Add, StepResult
from engine.worker.step_log import StepNote

_logger = logging.getLogger(__name__)


class SteppedOutput(Protocol):
    """The output of one step."""

    @property
    def events(self) -> tuple[TokenEvent, ...]:
        """Events of requests: of drafting steps in a row several each, of which the last alone may have a finish."""
        ...

    @property
    def stats(self) -> StepStats:
        """The step's statistics."""
        ...

    @property
    def cache_events(self) -> tuple[CacheEvent, ...]:
        """Changes of the prefix cache since the last step."""
        ...


class SteppedEngine(Protocol):
    """An engine that advances one step a call."""

    @property
    def info(self) -> ModelInfo:
        """The loaded models."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a step would change anything or return events."""
        ...

    def add_step_listener(self, listener: Callable[[StepNote], None]) -> None:
        """Call `listener` before each step with a note of it."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it can never run (too long, an unknown option)."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request. The next step returns its ABORT event. Unknown ids are ignored."""
        ...

    def step(self) -> SteppedOutput:
        """Advance every running request."""
        ...

    def check_integrity(self) -> None:
        """Raise IntegrityError if slots and sequences are inconsistent. Valid between steps."""
        ...


EngineFactory = Callable[[EngineConfig], SteppedEngine]


class EngineLoop:
    """Steps an engine and owns the set of live requests.

    A request is live from its Add until a StepResult with its `finish` event. Later events of it are dropped, so an engine
    that ends a request twice has no effect. A request that the engine never ends is detected when the engine is idle.
    """

    def __init__(self, engine: SteppedEngine) -> None:
        self._engine = engine
        self._live: dict[str, bool] = {}  # whether the request needs each event
        self._without_token: set[str] = set()
        self._refusals: list[TokenEvent] = []
        self.is_urgent = False  # whether the last result has an event that must not come late (Request.needs_each_event)

    @property
    def has_work(self) -> bool:
        """Whether `step` would return a result."""
        return self._engine.has_work or bool(self._refusals)

    def handle(self, command: Add | Abort) -> None:
        """Execute a command. Valid between steps."""
        match command:
            case Add(request):
                self._add(request)
            case Abort(request_id):
                self._engine.abort(request_id)

    def _add(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except ValueError as refusal:
            _logger.info("request %s refused: %s", request.request_id, refusal)
            self._refusals.append(refusal_event(request.request_id, str(refusal)))
        else:
            self._live[request.request_id] = request.needs_each_event
            self._without_token.add(request.request_id)

    def step(self) -> StepResult | None:
        """Run one step if the engine has work. Return all events, or None if there is nothing to report."""
        refusals, self._refusals = self._refusals, []
        self.is_urgent = bool(refusals)
        if not self._engine.has_work:
            return StepResult(tuple(refusals)) if refusals else None
        output = self._engine.step()
        events = [event for event in output.events if event.request_id in self._live]
        for event in events:
            is_first = event.request_id in self._without_token
            self.is_urgent |= is_first or event.finish is not None or self._live[event.request_id]
            if is_first and (event.token_ids or event.finish is not None):
                self._without_token.remove(event.request_id)
        for event in events:
            if event.finish is not None:
                del self._live[event.request_id]
        return StepResult((*refusals, *events), output.stats, output.cache_events)

    def check_idle(self) -> None:
        """Raise IntegrityError if the idle engine did not end a live request or is inconsistent."""
        if self._live:
            raise IntegrityError(f"the engine is idle but never ended {', '.join(self._live)}")
        self._engine.check_integrity()
