"""Sequences that wait to be run, in the order of their turns; none of what is done with them takes longer because many wait.

A heap whose entries outlive their sequences: one that was taken out is passed over when its entry comes up, and swept out when
most entries are such.
"""

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from engine.scheduler.sequence import Sequence

_FEW = 64  # entries that are not worth sweeping


class _Place(NamedTuple):
    """Who comes first: those who have run before, then by turn, then by arrival. `number` is nobody else's."""

    is_new: bool
    turn: int
    number: int


class WaitingQueue:
    """Owns the order of those that wait. Turns only grow, whatever is wished for: see `push`."""

    def __init__(self) -> None:
        self._heap: list[tuple[_Place, Sequence]] = []
        self._places: dict[str, _Place] = {}  # of those that wait
        self._num_pushed = 0
        self._num_returned = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._places

    def __iter__(self) -> Iterator[Sequence]:
        """Yield those that wait, in order; takes as long as there are many."""
        return (sequence for place, sequence in sorted(self._heap) if self._is_current(place, sequence))

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn: it is passed by no more later ones than the priorities differ by."""
        self._num_pushed += 1
        self._enter(sequence, _Place(True, self._num_pushed + sequence.request.priority, self._num_pushed))

    def push_back(self, sequence: Sequence) -> None:
        """Let a sequence that was running wait before all others."""
        self._num_returned += 1
        self._enter(sequence, _Place(False, -self._num_returned, self._num_returned))

    def _enter(self, sequence: Sequence, place: _Place) -> None:
        self._places[sequence.request_id] = place
        heapq.heappush(self._heap, (place, sequence))

    @property
    def first(self) -> Sequence | None:
        """Whose turn it is; None if nobody waits."""
        while self._heap and not self._is_current(*self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out that waits, wherever it stands."""
        del self._places[sequence.request_id]
        if len(self._heap) > 2 * len(self._places) + _FEW:
            self._heap = [entry for entry in self._heap if self._is_current(*entry)]
            heapq.heapify(self._heap)

    def _is_current(self, place: _Place, sequence: Sequence) -> bool:
        return self._places.get(sequence.request_id) is place
