"""What a request's trace is told of its samples, and where the request that is being answered finds its trace.

Knows no tracing library: server.http.otel has one. Without it no request has a trace.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SampleTimes:
    """One sample's life: seconds of time.monotonic, None where it did not come so far. `num_steps` brought it tokens."""

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
        """Take what became of the request's samples, once they have ended."""
        ...


current_trace: ContextVar[RequestTrace | None] = ContextVar("current_trace", default=None)
