"""Decides when to probe: to draft a tree that does not look best, since only drafts give evidence of acceptance.

A probe is one step with a tree for the sequences that are due: some tree for plain sequences, a larger one for drafting ones.
An account pays for it. Every step adds a small share of its seconds to the account, and a probe is charged with what it
measurably lost. A full account pays for any probe, because the estimated cost may be wrong. A sequence whose probe had no
accepted token waits twice as long for the next one. A new sequence waits as long as the last probed one, the first
not at all. There is no clock and no randomness.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from engine.core.policy import DraftOutcome, SequenceView

_SHARE = 0.004  # of all seconds, at most, for probes
REUSED_STEPS = 12  # of a choice with drafts while the batch is the same, and of a plain sequence that accepts its probes
_LONGEST = 64  # tokens of a sequence between its probes
_MOST_SAVED_STEPS = 2.0  # plain steps' seconds that the account holds
_MOST_LOST_STEPS = 16.0  # bound of a charge: a step may be long because another program ran


@dataclass
class _Wait:
    """The tokens between two probes of a sequence, and its token count at the last probe. `is_plain`: it decodes plainly."""

    is_plain: bool
    interval: int
    since: int


class Probes:
    """Keeps the account, full at first, and each sequence's interval. `probed` are the sequences of the current probe."""

    def __init__(self) -> None:
        self.probed: set[str] = set()
        self._saved_s = self._most_s = inf  # until the first step is known
        self._interval = 0  # of a new sequence
        self._waits: dict[str, _Wait] = {}

    def save(self, step_s: float) -> None:
        """Add the share of a step to the account."""
        self._saved_s = min(self._saved_s + _SHARE * step_s, self._most_s)

    def resize(self, plain_s: float) -> None:
        """Bound the account for plain steps of these seconds."""
        self._most_s = _MOST_SAVED_STEPS * plain_s
        self._saved_s = min(self._saved_s, self._most_s)

    @property
    def is_full(self) -> bool:
        """Whether the account pays for any probe."""
        return self._saved_s >= self._most_s

    def can_pay(self, loss_s: float) -> bool:
        """Return whether the account pays for a probe with this expected loss."""
        return loss_s <= self._saved_s

    def due(self, views: Sequence[SequenceView], is_plain: Sequence[bool]) -> tuple[list[int], int]:
        """Return the rows that are due, most overdue first: all plain, or all drafting. And the tokens until the next one is."""
        found: list[tuple[int, int]] = []
        waits: dict[str, _Wait] = {}
        next_due = _LONGEST
        for row, (view, plain) in enumerate(zip(views, is_plain, strict=True)):
            wait = self._waits.get(view.request_id)
            if wait is None or wait.is_plain != plain or wait.since > view.num_generated:
                interval = _LONGEST if not plain else self._interval if wait is None else REUSED_STEPS
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
        """Return the steps until the account pays for a probe with this expected loss."""
        missing_s = min(loss_s, self._most_s) - self._saved_s
        return max(1, int(min(float(_LONGEST), missing_s / (_SHARE * step_s))))

    def begin(self, views: Sequence[SequenceView]) -> None:
        """Record that the next step probes these sequences."""
        for view in views:
            self.probed.add(view.request_id)
            wait = self._waits[view.request_id]
            wait.since, wait.interval = view.num_generated, max(REUSED_STEPS, wait.interval)

    def end(self, outcomes: Sequence[DraftOutcome], lost_s: float) -> None:
        """Charge the probe under way with its loss, which may be negative, and set the waits by the accepted tokens."""
        self._saved_s -= min(lost_s, self._most_s * _MOST_LOST_STEPS / _MOST_SAVED_STEPS)
        for outcome in outcomes:
            wait = self._waits.get(outcome.request_id)
            if outcome.request_id not in self.probed or outcome.expansion.is_plain or wait is None or not wait.is_plain:
                continue
            wait.interval = REUSED_STEPS if outcome.accepted_depth else min(_LONGEST, 2 * wait.interval)
            self._interval = wait.interval
        self.probed.clear()
