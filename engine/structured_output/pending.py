"""Compiles grammars on a background thread, so that a slow compilation does not delay the engine's steps.

A request waits here until its grammar is ready. The engine then queues it in the scheduler.
"""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from llguidance import LLMatcher

from engine.core.types import Request
from engine.structured_output.grammars import BadGrammar, CompiledGrammars


@dataclass(frozen=True, slots=True)
class Admission:
    """A request whose compilation has ended, with the reason if its grammar is refused."""

    request: Request
    refusal: str | None


class PendingGrammars:
    """Owns the waiting requests and the one thread that compiles. Not thread-safe."""

    def __init__(self, grammars: CompiledGrammars) -> None:
        self._grammars = grammars
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._waiting: dict[str, tuple[Request, Future[LLMatcher]]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The waiting requests, in the order of submission."""
        return tuple(self._waiting)

    @property
    def is_empty(self) -> bool:
        """Whether no request waits."""
        return not self._waiting

    def submit(self, request: Request) -> None:
        """Add a request with a grammar and begin to compile the grammar."""
        assert request.sampling.grammar is not None
        self._waiting[request.request_id] = (request, self._thread.submit(self._grammars.matcher, request.sampling.grammar))

    def remove(self, request_id: str) -> bool:
        """Remove a request; return whether it was waiting."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting[1].cancel()
        return waiting is not None

    def ready(self, timeout_s: float = 0.0) -> list[Admission]:
        """Remove and return the requests that are ready, in the order of submission; wait up to `timeout_s` for the first."""
        if not self._waiting:
            return []
        wait([future for _, future in self._waiting.values()], timeout_s, return_when="FIRST_COMPLETED")
        ready = [(request, future) for request, future in self._waiting.values() if future.done()]
        for request, _ in ready:
            del self._waiting[request.request_id]
        return [Admission(request, _refusal(future)) for request, future in ready]


def _refusal(future: "Future[LLMatcher]") -> str | None:
    error = future.exception()
    if error is None or isinstance(error, BadGrammar):
        return None if error is None else str(error)
    raise error
