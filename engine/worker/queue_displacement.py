"""Who gives up a place in a full queue: keys share it evenly, and the choices of one answer go together or not at all.

Knows claims, which are numbers; whose they are the ledger knows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class QueuedShare:
    """What those requests of an answer that wait take of the queue. `has_begun`: some of the answer has been told."""

    group: str
    priority: int
    num_places: int
    num_tokens: int
    has_begun: bool = False


class _Shares:
    """What each key has of the queue, and all together; kept up to date by every claim that goes."""

    def __init__(self, claims: Sequence[QueuedShare], limits: SchedulerConfig) -> None:
        self._limits = limits
        self.num_places = self.num_tokens = 0
        self._places = {claim.group: 0 for claim in claims}
        self._tokens = dict(self._places)
        for claim in claims:
            self.add(claim)

    def __getitem__(self, group: str) -> float:
        """The part of the queue's places or of its tokens that a key has, whichever is more."""
        return max(self._places[group] / self._limits.max_waiting, self._tokens[group] / self._limits.max_waiting_tokens)

    def are_too_many(self, is_alone: bool) -> bool:
        """Whether it is more than may wait: an answer that waits alone may have any number of tokens."""
        return self.num_places > self._limits.max_waiting or (self.num_tokens > self._limits.max_waiting_tokens and not is_alone)

    def add(self, claim: QueuedShare) -> None:
        """Count a claim."""
        self._count(claim, 1)

    def remove(self, claim: QueuedShare) -> None:
        """Count a claim no more."""
        self._count(claim, -1)

    def _count(self, claim: QueuedShare, sign: int) -> None:
        self._places[claim.group] += sign * claim.num_places
        self._tokens[claim.group] += sign * claim.num_tokens
        self.num_places += sign * claim.num_places
        self.num_tokens += sign * claim.num_tokens


def displaced(queue: Sequence[QueuedShare], new_request: QueuedShare, limits: SchedulerConfig) -> list[int] | None:
    """Return which claims of a full queue, oldest first, make room for a newcomer, in turn; None if it is to be refused.

    Only keys give way that have more of the queue than the newcomer's would: the one that has most, with the last of its least
    urgent answers. An answer that has begun is somebody's half-read text: its turn comes when nothing else could go. Who can stay
    beside those whose turns came later stays. A newcomer beside whom nobody waits may have any number of tokens.
    """
    shares = _Shares([*queue, new_request], limits)
    in_turn = _in_turn(queue, new_request.group, shares)
    return None if in_turn is None else _needed(in_turn, queue, shares)


def _in_turn(queue: Sequence[QueuedShare], new_request: str, shares: _Shares) -> list[int] | None:
    """Take claims out of the shares, one after the other, until there is room for a key's newcomer; return which."""
    answers: dict[str, list[int]] = {claim.group: [] for claim in queue}  # of each key, in the order in which they are kept
    for index in sorted(range(len(queue)), key=lambda index: (not queue[index].has_begun, queue[index].priority, index)):
        answers[queue[index].group].append(index)
    victims: list[int] = []
    while shares.are_too_many(is_alone=len(victims) == len(queue)):
        greater = [group for group, theirs in answers.items() if theirs and shares[group] > shares[new_request]]
        if not greater:
            return None
        most = max(greater, key=lambda group: (not queue[answers[group][-1]].has_begun, shares[group]))
        victims.append(answers[most].pop())
        shares.remove(queue[victims[-1]])
    return victims


def _needed(victims: Sequence[int], queue: Sequence[QueuedShare], shares: _Shares) -> list[int]:
    """Return those for whom there is no room once all the others have gone; shares are without any of them."""
    needed: list[int] = []
    for victim in reversed(victims):
        shares.add(queue[victim])
        if shares.are_too_many(is_alone=False):
            shares.remove(queue[victim])
            needed.append(victim)
    return needed[::-1]
