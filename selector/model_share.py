"""How many of the rounds in which trees grow run the model that drafts: where cached text is sure of a level, none does.

Counted by rounds of the whole batch, which is what passes are paid for. Owns two sums.
"""

from engine.policy import StepFeedback

_MEMORY = 0.98  # of a step, at each later one that drafts
_ROUNDS = 16.0  # with the model, that are believed at first


class ModelShare:
    """The share of rounds that take a pass of the model, and of expected tokens that are fed to it."""

    def __init__(self) -> None:
        self._num_passes = self._num_rounds = _ROUNDS

    @property
    def share(self) -> float:
        """Passes a round, above 0; at most 1 but where a late start takes a pass more."""
        return self._num_passes / self._num_rounds

    def observe(self, feedback: StepFeedback) -> None:
        """Count a step. One in which some row's outcome is kept from the policy says nothing of the policy's own trees."""
        if not feedback.num_rounds or len(feedback.outcomes) < feedback.num_rows:
            return
        self._num_passes = _MEMORY * self._num_passes + feedback.num_passes
        self._num_rounds = _MEMORY * self._num_rounds + feedback.num_rounds
