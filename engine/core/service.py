"""The interface between the front end and the engine.

Two classes implement it: the client of the worker process, and the in-process engine of tests and tools.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from engine.core.refusal import Refusal
from engine.core.types import ModelInfo, Request, StepStats, TokenEvent

UNKNOWN_RETRY_S = 5.0  # Retry-After of a refused request if the finish rate is unknown


class EngineState(StrEnum):
    """Life cycle of an engine."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """The engine's state. `heartbeat_age_s` is the time since the worker's last event; None before the first.

    `num_resumed` counts requests of dead workers that were requeued.
    """

    state: EngineState
    heartbeat_age_s: float | None
    num_restarts: int
    detail: str = ""
    num_resumed: int = 0


class EngineError(Exception):
    """Base of the exceptions of a service."""


class EngineBusy(EngineError):
    """The waiting queue is full. Retry after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineUnavailable(EngineError):
    """The engine is starting, restarting, stopping or has failed for good."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineRefused(EngineUnavailable, Refusal):
    """The engine cannot be started with its configuration."""


def loaded(model: ModelInfo | None) -> ModelInfo:
    """Return the loaded models; raise EngineUnavailable if there are none yet."""
    if model is None:
        raise EngineUnavailable("the engine has not been ready yet")
    return model


class EngineService(Protocol):
    """An engine that generates for many requests at once."""

    @property
    def model(self) -> ModelInfo:
        """The loaded models; raises EngineUnavailable before the engine is first ready."""
        ...

    @property
    def health(self) -> EngineHealth:
        """The engine's current state."""
        ...

    async def start(self) -> None:
        """Start and return once ready. Raises EngineUnavailable with the reason if the start fails.

        Raises EngineRefused if the configuration cannot be served.
        """
        ...

    async def stop(self, drain_s: float = 0.0) -> None:
        """Admit no more requests, drain for up to `drain_s`, end the rest with ABORT, stop."""
        ...

    def submit(self, requests: Sequence[Request]) -> Sequence[AsyncIterator[TokenEvent]]:
        """Queue requests that belong together, all or none. Return one event stream for each.

        The last event of each stream carries `finish`. Closing a stream early aborts its request. EngineBusy and
        EngineUnavailable are raised by this call, not by the streams.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Abort a request. Its stream then yields a last event with ABORT. Unknown ids are ignored."""
        ...

    def add_listener(self, listener: Callable[[StepStats], None]) -> None:
        """Call `listener` on the event loop with the statistics of each step."""
        ...
