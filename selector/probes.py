"""When to draft otherwise than looks best: what was learnt grows old, and only drafting renews it.

A probe is one step with a tree for sequences that are due: some tree for those that decode plainly, a larger one for those that
draft. It is paid from an account into which every step puts a small share of its seconds, and charged with what the step really
took and brought. A full account buys any probe, since the belief that it is too dear may be what is wrong. A sequence whose
probes bring nothing waits twice as long for the next one; a new sequence waits as long as the last one that was probed.
Deterministic: no clock, no chance.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf

from engine.core.policy import DraftOutcome, SequenceView

_SHARE = 0.005  # of all seconds, spent on probes at most
_SHORTEST, _LONGEST = 8, 64  # tokens of a sequence between its probes
_MOST_SAVED_STEPS = 2.0  # plain steps' seconds that the account holds
_MOST_LOST_STEPS = 16.0  # that it is charged with: a step may be long because another program ran


@dataclass
class _Wait:
    """Tokens between a sequence's probes, and since which of its tokens it waits: while plain, or while drafting."""

    is_plain: bool
    interval: int
    since: int


class Probes:
    """Owns the account, which begins full, and each sequence's wait."""

    def __init__(self) -> None:
        self._saved_s = self._most_s = inf  # until the first step is known
        self._interval = _SHORTEST  # that a new sequence begins with
        self._waits: dict[str, _Wait] = {}
        self._asked: set[str] = set()  # sequences of the probe under way

    def save(self, step_s: float) -> None:
        """Put the share of a step into the account."""
        self._saved_s = min(self._saved_s + _SHARE * step_s, self._most_s)

    def resize(self, plain_s: float) -> None:
        """Have the account hold some plain steps' seconds."""
        self._most_s = _MOST_SAVED_STEPS * plain_s
        self._saved_s = min(self._saved_s, self._most_s)

    @property
    def is_full(self) -> bool:
        """Whether any probe may be made, however dear it looks."""
        return self._saved_s >= self._most_s

    def can_pay(self, loss_s: float) -> bool:
        """Return whether a probe with that expected loss may be made."""
        return loss_s <= self._saved_s

    def due(self, views: Sequence[SequenceView], is_plain: Sequence[bool]) -> tuple[list[int], int]:
        """Return the sequences that are due, the most overdue first, and the tokens until the next one is.

        Only such as the first: all plain, or none.
        """
        found: list[tuple[int, int]] = []
        waits: dict[str, _Wait] = {}
        next_due = _LONGEST
        for row, (view, plain) in enumerate(zip(views, is_plain, strict=True)):
            wait = self._waits.get(view.request_id)
            if wait is None or wait.is_plain != plain or wait.since > view.num_generated:
                interval = _LONGEST if not plain else self._interval if wait is None else _SHORTEST
                wait = _Wait(plain, interval, view.num_generated)
            waits[view.request_id] = wait
            left = wait.since + wait.interval - view.num_generated
            if left <= 0:
                found.append((left, row))
            else:
                next_due = min(next_due, left)
        self._waits = waits
        order = [row for _, row in sorted(found)]
        return [row for row in order if is_plain[row] == is_plain[order[0]]], next_due

    def steps_to_save(self, loss_s: float, step_s: float) -> int:
        """Return the steps until a probe with that expected loss can be paid."""
        missing_s = min(loss_s, self._most_s) - self._saved_s
        return max(1, int(min(float(_LONGEST), missing_s / (_SHARE * step_s))))

    def begin(self, views: Sequence[SequenceView]) -> None:
        """Note that the next step probes these sequences."""
        for view in views:
            self._asked.add(view.request_id)
            self._waits[view.request_id].since = view.num_generated

    @property
    def asked(self) -> Collection[str]:
        """Sequences of the probe under way; none where there is none."""
        return self._asked

    def end(self, outcomes: Sequence[DraftOutcome], lost_s: float) -> None:
        """Charge the probe under way with the seconds that it lost, which may be a gain, and set the waits by what it brought."""
        self._saved_s -= min(lost_s, self._most_s * _MOST_LOST_STEPS / _MOST_SAVED_STEPS)
        for outcome in outcomes:
            wait = self._waits.get(outcome.request_id)
            if outcome.request_id not in self._asked or outcome.expansion.is_plain or wait is None or not wait.is_plain:
                continue
            wait.interval = _SHORTEST if outcome.accepted_depth else min(_LONGEST, 2 * wait.interval)
            self._interval = wait.interval
        self._asked.clear()
