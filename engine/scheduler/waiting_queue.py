"""A priority queue of waiting sequences with fast removal at any length.

A heap with lazy removal: the entry of a removed sequence is skipped when it reaches the front. The heap is rebuilt when most of
its entries are stale.
"""

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from engine.scheduler.sequence import Sequence

_MIN_STALE = 64  # stale entries before the heap is rebuilt


class _Place(NamedTuple):
    """The sort key: preempted sequences first, then by turn, then by arrival. `number` is unique."""

    is_new: bool
    turn: int
    number: int


class WaitingQueue:
    """Owns the order of waiting sequences."""

    def __init__(self) -> None:
        self._heap: list[tuple[_Place, Sequence]] = []
        self._places: dict[str, _Place] = {}  # of the waiting sequences, by request id
        self._num_pushed = 0
        self._num_returned = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._places

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the waiting sequences in order. Takes time linear in their number."""
        return (sequence for place, sequence in sorted(self._heap) if self._is_current(place, sequence))

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence. At most as many later sequences overtake it as their priorities differ."""
        self._num_pushed += 1
        self._enter(sequence, _Place(True, self._num_pushed + sequence.request.priority, self._num_pushed))

    def push_back(self, sequence: Sequence) -> None:
        """Queue a preempted sequence before all others."""
        self._num_returned += 1
        self._enter(sequence, _Place(False, -self._num_returned, self._num_returned))

    def _enter(self, sequence: Sequence, place: _Place) -> None:
        self._places[sequence.request_id] = place
        heapq.heappush(self._heap, (place, sequence))

    @property
    def first(self) -> Sequence | None:
        """The next sequence; None if the queue is empty."""
        while self._heap and not self._is_current(*self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence."""
        del self._places[sequence.request_id]
        if len(self._heap) > 2 * len(self._places) + _MIN_STALE:
            self._heap = [entry for entry in self._heap if self._is_current(*entry)]
            heapq.heapify(self._heap)

    def _is_current(self, place: _Place, sequence: Sequence) -> bool:
        return self._places.get(sequence.request_id) is place
