"""A policy that falls back to the fixed expansion if the wrapped policy fails. Any tree is lossless, so no text changes."""

import logging
from collections.abc import Sequence

from engine.core.policy import ExpansionChoice, ExpansionPolicy, Reason, SequenceView, StepFeedback
from engine.core.tree import Expansion

_logger = logging.getLogger(__name__)


class GuardedPolicy:
    """Returns the wrapped policy's choices, or `fallback` for every sequence of a step whose choice fails. Logs one error."""

    def __init__(self, policy: ExpansionPolicy, fallback: Expansion) -> None:
        self.name = policy.name
        self._policy, self._fallback, self._has_failed = policy, fallback, False

    def choose(self, views: Sequence[SequenceView]) -> ExpansionChoice:
        """Return the policy's choice, or the fixed expansion."""
        try:
            return self._policy.choose(views)
        except Exception:
            _logger.log(self._level(), "the policy fails to choose; %s is drafted in such steps", self._fallback, exc_info=True)
            return ExpansionChoice((self._fallback,) * len(views), Reason.FALLBACK)

    def observe(self, feedback: StepFeedback) -> None:
        """Pass the feedback on; an error is logged."""
        try:
            self._policy.observe(feedback)
        except Exception:
            _logger.log(self._level(), "the policy fails to learn from a step", exc_info=True)

    def _level(self) -> int:
        """Return the log level: an error for the first failure, debugging for later failures."""
        level, self._has_failed = logging.DEBUG if self._has_failed else logging.ERROR, True
        return level
