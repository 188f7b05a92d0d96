"""Where requests wait whose grammar is being compiled, beside the steps: hundreds of milliseconds of it hold up nobody else.

Knows requests and grammars. Does not know the scheduler: whoever empties the room queues what comes out.
"""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from llguidance import LLMatcher

from engine.core.types import Request
from engine.structured_output.grammars import BadGrammar, CompiledGrammars


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that leaves the room, and why it cannot run if it cannot."""

    request: Request
    refusal: str | None


class PendingGrammars:
    """Owns the requests in it and the one thread that compiles. Not thread-safe: the engine's caller alone uses it."""

    def __init__(self, grammars: CompiledGrammars) -> None:
        self._grammars = grammars
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._waiting: dict[str, tuple[Request, Future[LLMatcher]]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Who waits, in the order in which they came."""
        return tuple(self._waiting)

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits."""
        return not self._waiting

    def enter(self, request: Request) -> None:
        """Take a request with a grammar in and begin to compile it."""
        assert request.sampling.grammar is not None
        self._waiting[request.request_id] = (request, self._thread.submit(self._grammars.matcher, request.sampling.grammar))

    def remove(self, request_id: str) -> bool:
        """Forget a request; return whether it was there."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting[1].cancel()
        return waiting is not None

    def leave(self, patience_s: float = 0.0) -> list[Admission]:
        """Return those that are ready, in the order in which they came; wait up to `patience_s` for one if there is none."""
        if not self._waiting:
            return []
        wait([future for _, future in self._waiting.values()], patience_s, return_when="FIRST_COMPLETED")
        ready = [(request, future) for request, future in self._waiting.values() if future.done()]
        for request, _ in ready:
            del self._waiting[request.request_id]
        return [Admission(request, _refusal(future)) for request, future in ready]


def _refusal(future: "Future[LLMatcher]") -> str | None:
    error = future.exception()
    if error is None or isinstance(error, BadGrammar):
        return None if error is None else str(error)
    raise error
