"""How much of the processors others used while something was measured."""

import os
import time
from collections.abc import Callable
from pathlib import Path

MAX_FOREIGN_CPUS = 0.2  # above which a measurement is unreliable
_STAT = Path("/proc/stat")
_IDLE, _IOWAIT, _GUEST = 3, 4, 8  # places in the line; what guests use is counted in user time already


class ForeignCpu:
    """Begins with the object; `cpus` reads the mean number of processors that others kept busy since.

    `own_s` returns processor seconds that are not others': of this process, unless something else is measured.
    """

    def __init__(self, own_s: Callable[[], float] | None = None) -> None:
        self._own_s = own_s or time.process_time
        self._begin = self._reading()

    def cpus(self) -> float | None:
        """Return processors of others, the system's own work and stolen time included; None where it is unknown."""
        if self._begin is None:
            return None
        now = self._reading()
        assert now is not None  # it was reported before
        wall_s, busy_s, own_s = (end - begin for end, begin in zip(now, self._begin, strict=True))
        return max(0.0, busy_s - own_s) / wall_s if wall_s > 0 else 0.0

    def _reading(self) -> tuple[float, float, float] | None:
        """Return the clock, busy seconds of all processors and our own."""
        if not _STAT.exists():
            return None
        ticks = [int(field) for field in _STAT.read_text().split("\n", 1)[0].split()[1:]]
        busy = sum(ticks[:_GUEST]) - ticks[_IDLE] - ticks[_IOWAIT]
        return time.perf_counter(), busy / os.sysconf("SC_CLK_TCK"), self._own_s()
