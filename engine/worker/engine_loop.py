"""The desk in front of a synchronous engine: letters in, turns out, and each request ended exactly once.

Knows what a stepped engine must offer and which requests live. Does not know threads, processes or sockets: whoever turns
the desk brings the letters and carries the turns away.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from engine.core.config import EngineConfig
from engine.core.types import ModelInfo, Request, StepStats, TokenEvent
from engine.core.validation import refused
from engine.scheduler.slot_pool import IntegrityError
from engine.worker.messages import Abort, Add, StepResult
from engine.worker.step_log import StepNote

_logger = logging.getLogger(__name__)


class StepOutput(Protocol):
    """What one step made."""

    @property
    def events(self) -> tuple[TokenEvent, ...]:
        """News of requests, at most one event each."""
        ...

    @property
    def stats(self) -> StepStats:
        """The step's numbers."""
        ...


class SteppedEngine(Protocol):
    """An engine that advances when told to."""

    @property
    def info(self) -> ModelInfo:
        """The loaded models."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a step would do or say something."""
        ...

    def announce(self, listener: Callable[[StepNote], None]) -> None:
        """Have `listener` told of each step from now on, before it runs."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request; raise ValueError if it can never run (too long, an unknown option)."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request; the next step tells of it with ABORT. Unknown ids are ignored."""
        ...

    def step(self) -> StepOutput:
        """Advance every running request."""
        ...

    def check_integrity(self) -> None:
        """Raise IntegrityError if the books do not balance. Valid between steps."""
        ...


EngineFactory = Callable[[EngineConfig], SteppedEngine]


class EngineLoop:
    """Turns an engine and keeps the set of living requests, of which it is the one owner.

    A request lives from its Add until an event with `finish` leaves in a Turn. News of a request that lives no more stops
    here, so an engine that says an end twice is heard once; one that forgets an end is found out when it falls idle.
    """

    def __init__(self, engine: SteppedEngine) -> None:
        self._engine = engine
        self._living: dict[str, None] = {}
        self._refusals: list[TokenEvent] = []

    @property
    def has_work(self) -> bool:
        """Whether a turn would bring news."""
        return self._engine.has_work or bool(self._refusals)

    def take(self, letter: Add | Abort) -> None:
        """Act on a letter. Valid between turns."""
        match letter:
            case Add(request):
                self._add(request)
            case Abort(request_id):
                self._engine.abort(request_id)

    def _add(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except ValueError as refusal:
            _logger.info("request %s refused: %s", request.request_id, refusal)
            self._refusals.append(refused(request.request_id, str(refusal)))
        else:
            self._living[request.request_id] = None

    def turn(self) -> StepResult | None:
        """Run one step if there is work; return all news, or None if there is none."""
        refusals, self._refusals = self._refusals, []
        if not self._engine.has_work:
            return StepResult(tuple(refusals)) if refusals else None
        output = self._engine.step()
        news = [event for event in output.events if event.request_id in self._living]
        for event in news:
            if event.finish is not None:
                del self._living[event.request_id]
        return StepResult((*refusals, *news), output.stats)

    def check_idle(self) -> None:
        """Raise IntegrityError if an engine without work still owes someone an end, or its own books do not balance."""
        if self._living:
            raise IntegrityError(f"the engine is idle but never ended {', '.join(self._living)}")
        self._engine.check_integrity()
