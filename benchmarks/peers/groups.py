"""A process group as /proc tells of it: what it has used of the processors, and its peak of memory. Linux alone."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_STATE, _GROUP = 0, 2  # places behind the name in /proc/PID/stat
_TIMES = slice(11, 15)  # user and system, own and of children that were waited for
_PATIENCE_S = 20.0


class ProcessGroup:
    """All processes of one group: a peer's own and those it starts."""

    def __init__(self, number: int) -> None:
        self._number = number

    def cpu_s(self) -> float:
        """Return processor seconds since its processes began."""
        ticks = sum(sum(map(int, fields[_TIMES])) for _, fields in self._members())
        return ticks / os.sysconf("SC_CLK_TCK")

    def peak_bytes(self) -> int:
        """Return the sum of what each process held at most in memory since it began; what they share counts in each."""
        return sum(_kib(folder / "status", "VmHWM:") for folder, _ in self._members()) * 1024

    def stop(self) -> None:
        """End the group, with force if it does not go."""
        for force, patience_s in ((signal.SIGTERM, _PATIENCE_S), (signal.SIGKILL, _PATIENCE_S)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._number, force)
            end_s = time.monotonic() + patience_s
            while self._is_alive() and time.monotonic() < end_s:
                time.sleep(0.05)

    def _is_alive(self) -> bool:
        return any(fields[_STATE] != "Z" for _, fields in self._members())

    def _members(self) -> Iterator[tuple[Path, list[str]]]:
        """Yield each process's folder and its fields behind the name, which may hold anything."""
        for folder in _PROC.glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[_GROUP]) == self._number:
                    yield folder, fields


def _kib(status: Path, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in status.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    return 0  # it has ended, or holds nothing
