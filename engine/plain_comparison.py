"""Comparison of a policy with plain decoding while it serves: some of the steps that would draft decode plainly.

Where drafting pays, plain decoding would never be timed. The server estimates the speed-up from these steps
(server.metrics.speedup). The text of a coupled or greedy request does not depend on them, the distribution of no request does.
"""

from collections.abc import Sequence
from dataclasses import replace

from engine.core.policy import MOST_UNOBSERVED, BatchViews, ExpansionChoice, ExpansionPolicy, Reason, SequenceView
from engine.core.tree import PLAIN

COMPARED_EVERY = 1024  # steps with drafts
_COMPARED = (Reason.SPECULATION_PAYS, Reason.COPIED_TEXT)  # a probe would be charged with the seconds of plain decoding


class PlainComparison:
    """Wraps a policy and replaces one of COMPARED_EVERY choices with drafts by plain decoding, steps in a row."""

    def __init__(self, policy: ExpansionPolicy) -> None:
        self.name = policy.name
        self._policy = policy
        self.observe = policy.observe
        self._num_drafting = 0

    def choose(self, views: Sequence[SequenceView]) -> ExpansionChoice:
        """Return the policy's choice, or plain decoding in its place."""
        choice = self._policy.choose(views)
        if choice.reason not in _COMPARED:
            return choice
        before = self._num_drafting
        self._num_drafting += views.num_steps if isinstance(views, BatchViews) else 1
        if self._num_drafting // COMPARED_EVERY == before // COMPARED_EVERY:
            return choice
        plain, num_steps = (PLAIN,) * len(views), MOST_UNOBSERVED
        return replace(choice, expansions=plain, reason=Reason.COMPARISON, speedup=1.0, step_s=None, num_steps=num_steps)
