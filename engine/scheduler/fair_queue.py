"""The fair queue of waiting sequences: the group that was served the fewest tokens is next.

The virtual token counter of Sheng et al. (Fairness in Serving Large Language Models, OSDI 2024). Each group of tenants is charged
for its tokens: prompts when they start to run, outputs as they are generated. The group with the smallest count is next. A group
that was idle gets no credit for that time: its count is raised to that of the group served last.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.scheduler.sequence import Sequence
from engine.scheduler.waiting_queue import WaitingQueue


@dataclass(slots=True)
class _Group:
    """The waiting sequences of one group and the tokens that it was served."""

    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    num_served: int = 0


class FairQueue:
    """Owns the waiting sequences. Preempted sequences come first, then the first sequence of the least served group."""

    def __init__(self) -> None:
        self._returned = WaitingQueue()
        self._groups: dict[str, _Group] = {}  # one for each API key, never removed
        self._num_served_last = 0  # the count of the group served last, at that time
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the waiting sequences, in order within each group."""
        yield from self._returned
        for group in self._groups.values():
            yield from group.waiting

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence in its group."""
        group = self._groups.setdefault(sequence.group, _Group())
        if not group.waiting:
            group.num_served = max(group.num_served, self._num_served_last)
        group.waiting.push(sequence)
        self._num_waiting += 1

    def push_back(self, sequence: Sequence) -> None:
        """Queue a preempted sequence before all others."""
        self._returned.push_back(sequence)
        self._num_waiting += 1

    @property
    def first(self) -> Sequence | None:
        """The next sequence; None if the queue is empty."""
        group = self._next
        return self._returned.first or (group.waiting.first if group else None)

    @property
    def _next(self) -> _Group | None:
        return min((group for group in self._groups.values() if group.waiting), key=lambda one: one.num_served, default=None)

    def pop(self) -> Sequence:
        """Remove the next sequence and charge its group for its uncached tokens. A preempted one was charged before."""
        sequence, group = self.first, self._next
        assert sequence is not None, "the queue is empty"
        if not self._returned and group is not None:
            self._num_served_last = group.num_served
            group.num_served += sequence.num_uncached
        self.remove(sequence)
        return sequence

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Charge the group of a sequence for generated tokens."""
        self._groups[sequence.group].num_served += num_tokens

    def remove(self, sequence: Sequence) -> bool:
        """Remove a sequence. Return whether it was in the queue."""
        queues = (self._returned, self._groups[sequence.group].waiting)
        waiting = next((queue for queue in queues if sequence.request_id in queue), None)
        if waiting is not None:
            waiting.remove(sequence)
            self._num_waiting -= 1
        return waiting is not None
