"""Reuse of a policy's choice for a fixed number of steps, as long as the same sequences decode.

If the batch changes but does not shrink, a choice of plain decoding is still reused, but for fewer steps: drafting may pay for
new sequences.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace

from engine.core.policy import BatchViews, ExpansionChoice, ExpansionPolicy, Reason, SequenceView, composition_of
from engine.core.tree import PLAIN

_CHANGED_BATCH_STEPS = 8  # most steps of plain decoding that are reused after the batch has changed


class CachedChoice:
    """Wraps a policy and reuses its last choice while it is valid."""

    def __init__(self, policy: ExpansionPolicy) -> None:
        self.name = policy.name
        self._policy = policy
        self.observe = policy.observe  # every step: the policy learns from reused choices too
        self._choice, self._num_left = ExpansionChoice(()), 0
        self._composition: Hashable = None

    def choose(self, views: Sequence[SequenceView]) -> ExpansionChoice:
        """Return the last choice if it is still valid, else a new one."""
        composition, last = composition_of(views), self._choice
        is_same = composition is not None and composition == self._composition
        is_plain = last.reason is Reason.PLAIN_IS_BEST and len(views) >= len(last.expansions)
        self._num_left -= views.num_steps if isinstance(views, BatchViews) else 1
        if not is_same:
            self._num_left = min(self._num_left, _CHANGED_BATCH_STEPS)
        if self._num_left > 0 and (is_same or is_plain):
            if is_same:
                return replace(last, num_steps=self._num_left)
            return replace(last, expansions=(PLAIN,) * len(views), step_s=None, num_steps=self._num_left)
        self._choice = self._policy.choose(views)
        self._num_left, self._composition = self._choice.num_steps, composition
        return self._choice
