"""Displacement from a full queue: API keys share the queue evenly.

Requests that were submitted together are displaced together. Knows queue shares only; the request table owns the requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class QueuedShare:
    """The waiting requests of one submission: their places and prompt tokens in the queue.

    `has_begun`: a request of the submission has had an event.
    """

    group: str
    priority: int
    num_places: int
    num_tokens: int
    has_begun: bool = False


class _QueueUsage:
    """The queue's usage by key and in total."""

    def __init__(self, shares: Sequence[QueuedShare], limits: SchedulerConfig) -> None:
        self._limits = limits
        self.num_places = self.num_tokens = 0
        self._places = {share.group: 0 for share in shares}
        self._tokens = dict(self._places)
        for share in shares:
            self.add(share)

    def __getitem__(self, group: str) -> float:
        """The key's fraction of the queue's places or of its tokens, whichever is larger."""
        return max(self._places[group] / self._limits.max_waiting, self._tokens[group] / self._limits.max_waiting_tokens)

    def exceeds_limits(self, is_alone: bool) -> bool:
        """Whether the queue is over its limits. A submission that waits alone may have any number of tokens."""
        return self.num_places > self._limits.max_waiting or (self.num_tokens > self._limits.max_waiting_tokens and not is_alone)

    def add(self, share: QueuedShare) -> None:
        """Add a share to the usage."""
        self._count(share, 1)

    def remove(self, share: QueuedShare) -> None:
        """Subtract a share from the usage."""
        self._count(share, -1)

    def _count(self, share: QueuedShare, sign: int) -> None:
        self._places[share.group] += sign * share.num_places
        self._tokens[share.group] += sign * share.num_tokens
        self.num_places += sign * share.num_places
        self.num_tokens += sign * share.num_tokens


def displaced_shares(queue: Sequence[QueuedShare], new_share: QueuedShare, limits: SchedulerConfig) -> list[int] | None:
    """Return the indices of the shares to displace for a new one; None if the new one must be refused.

    `queue` is ordered by age, oldest first. Only keys with a larger fraction of the queue than the new share's key are
    displaced. The key with the largest fraction loses its least urgent and youngest submission first. Submissions that have
    begun are displaced last. A candidate stays if there is room for it after later candidates were taken. A share that waits
    alone may have any number of tokens.
    """
    usage = _QueueUsage([*queue, new_share], limits)
    candidates = _candidates(queue, new_share.group, usage)
    return None if candidates is None else _needed(candidates, queue, usage)


def _candidates(queue: Sequence[QueuedShare], new_group: str, usage: _QueueUsage) -> list[int] | None:
    """Remove shares from the usage, one after the other, until there is room. Return their indices in this order."""
    by_group: dict[str, list[int]] = {share.group: [] for share in queue}  # the last is displaced first
    for index in sorted(range(len(queue)), key=lambda index: (not queue[index].has_begun, queue[index].priority, index)):
        by_group[queue[index].group].append(index)
    candidates: list[int] = []
    while usage.exceeds_limits(is_alone=len(candidates) == len(queue)):
        greater = [group for group, indices in by_group.items() if indices and usage[group] > usage[new_group]]
        if not greater:
            return None
        most = max(greater, key=lambda group: (not queue[by_group[group][-1]].has_begun, usage[group]))
        candidates.append(by_group[most].pop())
        usage.remove(queue[candidates[-1]])
    return candidates


def _needed(candidates: Sequence[int], queue: Sequence[QueuedShare], usage: _QueueUsage) -> list[int]:
    """Return the candidates for which there is no room once all others are gone. `usage` counts none of them."""
    needed: list[int] = []
    for index in reversed(candidates):
        usage.add(queue[index])
        if usage.exceeds_limits(is_alone=False):
            usage.remove(queue[index])
            needed.append(index)
    return needed[::-1]
