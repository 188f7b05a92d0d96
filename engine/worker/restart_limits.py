"""Time limits of a worker, and the record of its deaths that sets the backoff of restarts.

Pure bookkeeping: no processes, no clock.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Supervision:
    """Limits of a worker's life, in seconds.

    `hang_limit_s` is long because a long prefill is one silent step that takes seconds on a CPU. `first_heartbeat_limit_s`
    bounds the time from launch to the first heartbeat, which covers the start of Python. Loading sends heartbeats, so its time
    is not bounded. A death within `stable_s` after the worker was ready makes the next backoff longer, unless a signal from
    outside caused it. A request is retried alone after `max_deaths` deaths in a row without any event of it.
    """

    hang_limit_s: float = 60.0
    first_heartbeat_limit_s: float = 60.0
    stop_limit_s: float = 5.0
    min_backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    stable_s: float = 30.0
    max_failed_starts: int = 3
    max_deaths: int = 3


class DeathRecord:
    """Counts consecutive deaths. Owned by one client."""

    def __init__(self, limits: Supervision) -> None:
        self._limits = limits
        self._num_failed_starts = 0
        self._num_early = 0
        self._was_ever_ready = False
        self.backoff_s = 0.0  # how long to wait before the next start

    def note(self, ready_for_s: float | None, is_from_outside: bool = False) -> None:
        """Note that a worker died `ready_for_s` seconds after it was ready; None: it never was.

        `is_from_outside`: another process killed it, and no request is quarantined. Such a death counts only if the worker was
        never ready: the kernel would kill the next one for lack of memory too.
        """
        self._num_failed_starts = self._num_failed_starts + 1 if ready_for_s is None else 0
        self._was_ever_ready |= ready_for_s is not None
        self.backoff_s = 0.0
        if ready_for_s is not None and ready_for_s >= self._limits.stable_s:
            self._num_early = 0
        elif ready_for_s is None or not is_from_outside:
            self._num_early += 1
            self.backoff_s = self._backoff_s(has_failed=ready_for_s is None)

    def _backoff_s(self, has_failed: bool) -> float:
        """Return a backoff that doubles with each consecutive early death, up to a cap. A ready worker's first crash has none."""
        num_doublings = self._num_early - (1 if has_failed else 2)
        return min(self._limits.max_backoff_s, self._limits.min_backoff_s * 2.0**num_doublings) if num_doublings >= 0 else 0.0

    @property
    def is_hopeless(self) -> bool:
        """Whether another start is useless: too many failed, or the very first did.

        An engine that never ran is misconfigured, and a second start would fail too.
        """
        limit = self._limits.max_failed_starts if self._was_ever_ready else 1
        return self._num_failed_starts >= limit
