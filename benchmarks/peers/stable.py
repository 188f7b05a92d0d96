"""The peers that are loaded: as many at once as memory allows, those used longest ago make room. Owns their processes."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.peers.processes import Asked, Launch, LineProcess, start, start_client

Start = Callable[[Launch, LineProcess, Path], Asked]


class Stable:
    """Running peers by launch, and the one client that asks servers. Logs lie in a folder that is told in errors."""

    def __init__(self, memory_bytes: int, start_peer: Start = start) -> None:
        self._memory_bytes, self._start = memory_bytes, start_peer
        self._logs = Path(tempfile.mkdtemp(prefix="peers-"))
        self.client = start_client(self._logs / "client.log")
        self._running: dict[Launch, Asked] = {}  # the one used last is last
        self._needs: dict[Launch, int] = {}  # bytes, of those that ran once

    def peer(self, launch: Launch) -> tuple[Asked, bool]:
        """Return the peer, and whether it was started for this. Raises PeerDied."""
        if found := self._running.pop(launch, None):
            self._running[launch] = found
            return found, False
        self._make_room(self._need(launch))
        started = self._start(launch, self.client, self._logs / f"{len(list(self._logs.iterdir()))}.log")
        self._running[launch] = started
        return started, True

    def end(self, launch: Launch) -> None:
        """End a peer that failed; it is started anew when it is asked for again."""
        if found := self._running.pop(launch, None):
            self._needs[launch] = found.group.peak_bytes()
            found.stop()

    def _make_room(self, num_bytes: int) -> None:
        """End peers until so many bytes are free of the limit, or none runs: one peer alone may need more."""
        while self._running and sum(map(self._need, self._running)) + num_bytes > self._memory_bytes:
            self.end(next(iter(self._running)))

    def _need(self, launch: Launch) -> int:
        """Return what a peer takes now, took when it ran last, or is expected to take."""
        if running := self._running.get(launch):
            return running.group.peak_bytes()
        return self._needs.get(launch, launch.expected_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for launch in list(self._running):
            self.end(launch)
        self.client.stop()
