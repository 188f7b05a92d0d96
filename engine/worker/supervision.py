"""How patient a client is with its worker, and the record of the worker's deaths from which it learns to wait.

Pure bookkeeping: no processes, no clock.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Supervision:
    """Limits of a worker's life, in seconds.

    `hang_limit_s` is generous because a long prefill is one silent step, and takes seconds on a CPU. `first_word_limit_s`
    bounds the time from launch to the first heartbeat (starting Python); loading models beats, so it may take as long as
    it takes. A worker that lived `settled_s` after it was ready died by accident; earlier deaths make the next wait longer,
    unless a signal from outside was their cause.
    After `max_deaths` workers in a row that died over a request which got nothing out, it is run alone; the next ends it.
    """

    hang_limit_s: float = 60.0
    first_word_limit_s: float = 60.0
    stop_limit_s: float = 5.0
    min_backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    settled_s: float = 30.0
    max_failed_starts: int = 3
    max_deaths: int = 3


class DeathRecord:
    """Counts deaths in a row. Owned by one client."""

    def __init__(self, limits: Supervision) -> None:
        self._limits = limits
        self._num_failed_starts = 0
        self._num_early = 0
        self._was_ever_ready = False
        self.backoff_s = 0.0  # how long to wait before the next start

    def note(self, ready_for_s: float | None, is_from_outside: bool = False) -> None:
        """Note that a worker died `ready_for_s` seconds after it was ready; None if it never was.

        `is_from_outside`: another process killed it, and no request is suspected. Such a death is counted only before a worker is
        ready: the kernel's memory killer would strike again.
        """
        self._num_failed_starts = self._num_failed_starts + 1 if ready_for_s is None else 0
        self._was_ever_ready |= ready_for_s is not None
        self.backoff_s = 0.0
        if ready_for_s is not None and ready_for_s >= self._limits.settled_s:
            self._num_early = 0
        elif ready_for_s is None or not is_from_outside:
            self._num_early += 1
            self.backoff_s = self._backoff_s(has_failed=ready_for_s is None)

    def _backoff_s(self, has_failed: bool) -> float:
        """Return a wait that doubles with each early death in a row, up to a cap; the first crash of a ready worker has none."""
        num_doublings = self._num_early - (1 if has_failed else 2)
        return min(self._limits.max_backoff_s, self._limits.min_backoff_s * 2.0**num_doublings) if num_doublings >= 0 else 0.0

    @property
    def is_hopeless(self) -> bool:
        """Whether another start is in vain: too many failed, or the very first did.

        An engine that never ran has a fault in its configuration; trying again would only keep its owner waiting.
        """
        limit = self._limits.max_failed_starts if self._was_ever_ready else 1
        return self._num_failed_starts >= limit
