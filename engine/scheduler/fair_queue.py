"""The sequences that wait for a place, and whose turn it is: the key's that was served least, and of its own the first.

The virtual token counter of Sheng et al. (Fairness in Serving Large Language Models, OSDI 2024): each group of tenants is
charged for the tokens that it is served, prompts when they begin and answers as they are written. The group with the smallest
count is next. One that comes anew has no credit for the time in which it asked for nothing: it begins where the last one served
stood.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.scheduler.sequence import Sequence
from engine.scheduler.waiting_queue import WaitingQueue


@dataclass(slots=True)
class _Group:
    """Those of one key that wait, and the tokens that it was served."""

    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    num_served: int = 0


class FairQueue:
    """Owns who waits. Those that held a place before come first; then groups take turns, each with the first of its own."""

    def __init__(self) -> None:
        self._returned = WaitingQueue()
        self._groups: dict[str, _Group] = {}  # a key each: few, and kept
        self._num_served_last = 0  # the count of the group that was last next, when it was

    def __len__(self) -> int:
        return len(self._returned) + sum(len(group.waiting) for group in self._groups.values())

    def __iter__(self) -> Iterator[Sequence]:
        """Yield those that wait, in order within each group."""
        yield from self._returned
        for group in self._groups.values():
            yield from group.waiting

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn among those of its group."""
        group = self._groups.setdefault(sequence.request.group, _Group())
        if not group.waiting:
            group.num_served = max(group.num_served, self._num_served_last)
        group.waiting.push(sequence)

    def push_back(self, sequence: Sequence) -> None:
        """Let a sequence that was running wait before all others."""
        self._returned.push_back(sequence)

    @property
    def first(self) -> Sequence | None:
        """Whose turn it is; None if nobody waits."""
        group = self._next
        return self._returned.first or (group.waiting.first if group else None)

    @property
    def _next(self) -> _Group | None:
        return min((group for group in self._groups.values() if group.waiting), key=lambda one: one.num_served, default=None)

    def pop(self) -> Sequence:
        """Take the first out, and charge its group for what it must be fed; who returns has been charged."""
        sequence, group = self.first, self._next
        assert sequence is not None, "nobody waits"
        if not self._returned and group is not None:
            self._num_served_last = group.num_served
            group.num_served += sequence.num_uncached
        self.remove(sequence)
        return sequence

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Charge the group of a sequence for tokens that were written for it."""
        self._groups[sequence.request.group].num_served += num_tokens

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence out, wherever it stands; return whether it was there."""
        queues = (self._returned, self._groups[sequence.request.group].waiting)
        waiting = next((queue for queue in queues if sequence.request_id in queue), None)
        if waiting is not None:
            waiting.remove(sequence)
        return waiting is not None
