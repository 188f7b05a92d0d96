"""Who gives up a place in a full queue: keys share it evenly, and the choices of one answer go together or not at all.

Knows claims, which are numbers; whose they are the ledger knows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class Claim:
    """What those requests of an answer that wait take of the queue. `has_begun`: some of the answer has been told."""

    group: str
    priority: int
    num_places: int
    num_tokens: int
    has_begun: bool = False


class _Shares:
    """What each key has of the queue, and all together; kept up to date by every claim that goes."""

    def __init__(self, claims: Sequence[Claim], limits: SchedulerConfig) -> None:
        self._limits = limits
        self.num_places = self.num_tokens = 0
        self._places = {claim.group: 0 for claim in claims}
        self._tokens = dict(self._places)
        for claim in claims:
            self._count(claim, 1)

    def __getitem__(self, group: str) -> float:
        """The part of the queue's places or of its tokens that a key has, whichever is more."""
        return max(self._places[group] / self._limits.max_waiting, self._tokens[group] / self._limits.max_waiting_tokens)

    def remove(self, claim: Claim) -> None:
        """Count a claim no more."""
        self._count(claim, -1)

    def _count(self, claim: Claim, sign: int) -> None:
        self._places[claim.group] += sign * claim.num_places
        self._tokens[claim.group] += sign * claim.num_tokens
        self.num_places += sign * claim.num_places
        self.num_tokens += sign * claim.num_tokens


def displaced(queue: Sequence[Claim], newcomer: Claim, limits: SchedulerConfig) -> list[int] | None:
    """Return which claims of a full queue, oldest first, make room for a newcomer, in turn; None if it is to be refused.

    Only keys give way that have more of the queue than the newcomer's would: the one that has most, with the last of its least
    urgent answers. An answer that has begun is somebody's half-read text: it goes only where nothing else could. A newcomer
    beside whom nobody waits may have any number of tokens.
    """
    shares = _Shares([*queue, newcomer], limits)
    answers: dict[str, list[int]] = {claim.group: [] for claim in queue}  # of each key, in the order in which they are kept
    for index in sorted(range(len(queue)), key=lambda index: (not queue[index].has_begun, queue[index].priority, index)):
        answers[queue[index].group].append(index)
    victims: list[int] = []
    while shares.num_places > limits.max_waiting or (shares.num_tokens > limits.max_waiting_tokens and len(victims) < len(queue)):
        greater = [group for group, theirs in answers.items() if theirs and shares[group] > shares[newcomer.group]]
        if not greater:
            return None
        most = max(greater, key=lambda group: (not queue[answers[group][-1]].has_begun, shares[group]))
        victims.append(answers[most].pop())
        shares.remove(queue[victims[-1]])
    return victims
