"""A policy that may fail, and what is drafted when it does: no request suffers from a choice that could not be made.

Any tree is lossless, so whatever goes wrong in choosing or learning can be answered with the fixed expansion.
"""

import logging
from collections.abc import Sequence

from engine.core.policy import ExpansionChoice, ExpansionPolicy, Reason, SequenceView, StepFeedback
from engine.core.tree import Expansion

_logger = logging.getLogger(__name__)


class GuardedPolicy:
    """Another policy's choices; `fallback` for every sequence in a step whose choice it fails to make. Says so once."""

    def __init__(self, policy: ExpansionPolicy, fallback: Expansion) -> None:
        self.name = policy.name
        self._policy = policy
        self._fallback = fallback
        self._has_failed = False

    def choose(self, views: Sequence[SequenceView]) -> ExpansionChoice:
        """Return the policy's choice, or the fixed one."""
        try:
            return self._policy.choose(views)
        except Exception:
            _logger.log(self._level(), "the policy fails to choose; %s is drafted where it does", self._fallback, exc_info=True)
            return ExpansionChoice((self._fallback,) * len(views), Reason.FALLBACK)

    def observe(self, feedback: StepFeedback) -> None:
        """Let the policy learn if it can."""
        try:
            self._policy.observe(feedback)
        except Exception:
            _logger.log(self._level(), "the policy fails to learn from a step", exc_info=True)

    def _level(self) -> int:
        """Return how loudly to say so: the first time as an error."""
        level = logging.DEBUG if self._has_failed else logging.ERROR
        self._has_failed = True
        return level
