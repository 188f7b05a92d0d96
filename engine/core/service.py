"""The door between the front end and the engine: what a server may ask of an engine, wherever it runs.

Two things implement it: the client of the worker process, and the in-process engine of tests and tools.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from engine.core.types import ModelInfo, Request, StepStats, TokenEvent

UNKNOWN_RETRY_S = 5.0  # until a refused request is tried again, where nobody knows when there will be room


class EngineState(StrEnum):
    """Life of an engine behind the door."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Where the engine stands. `heartbeat_age_s` is the time since the worker last said anything; None before it first did.

    `num_resumed` counts the requests that were taken back from dead workers to go on in the next.
    """

    state: EngineState
    heartbeat_age_s: float | None
    num_restarts: int
    detail: str = ""
    num_resumed: int = 0


class EngineError(Exception):
    """Base of what a service can raise."""


class EngineBusy(EngineError):
    """The waiting queue is full; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineUnavailable(EngineError):
    """The engine is starting, restarting, stopping or has failed for good."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineService(Protocol):
    """An engine that generates for many requests at once."""

    @property
    def model(self) -> ModelInfo:
        """The loaded models; raises EngineUnavailable before the engine is first ready."""
        ...

    @property
    def health(self) -> EngineHealth:
        """Where the engine stands now."""
        ...

    async def start(self) -> None:
        """Start and return once ready; raise EngineUnavailable with the reason if it cannot."""
        ...

    async def stop(self, drain_s: float = 0.0) -> None:
        """Admit nothing more, let running requests finish for up to `drain_s`, end the rest with ABORT, stop."""
        ...

    def submit(self, requests: Sequence[Request]) -> Sequence[AsyncIterator[TokenEvent]]:
        """Queue an answer's requests at once (raising EngineBusy or EngineUnavailable here, not later); return each one's events.

        All of them are queued, or none. Of each the last event carries `finish`; closing its iterator early aborts it.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Ask that a request end; its iterator then gives a last event with ABORT. Unknown ids are ignored."""
        ...

    def add_listener(self, listener: Callable[[StepStats], None]) -> None:
        """Have `listener` called on the event loop with the numbers of each step."""
        ...
