"""The data that a request's trace gets about its samples, and the context variable with the trace of the current request.

Knows no tracing library: server.http.otel uses one. Without it no request has a trace.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SampleTimes:
    """Times of one sample, in seconds of time.monotonic; None for a phase that it did not reach. `num_steps` produced tokens."""

    arrival_s: float
    admitted_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    num_prompt_tokens: int
    num_tokens: int
    num_steps: int
    finish: str


class RequestTrace(Protocol):
    """The trace of one request."""

    def generated(self, samples: Sequence[SampleTimes]) -> None:
        """Record the times of the request's samples after they have ended."""
        ...


current_trace: ContextVar[RequestTrace | None] = ContextVar("current_trace", default=None)
