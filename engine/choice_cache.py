"""Reuse of a policy's choice for a fixed number of steps, as long as the same sequences decode and cached text has no news."""

from engine.policy import BatchViews, Choice, ExpansionPolicy


class CachedChoice:
    """A policy's last choice, reused while it holds."""

    def __init__(self, policy: ExpansionPolicy) -> None:
        self.policy = policy
        self._choice, self._num_left = Choice(()), 0
        self._composition: int | None = None

    def choose(self, views: BatchViews, has_news: bool) -> Choice:
        """Return the choice for a step, the policy's last one where it still holds."""
        composition = views.composition
        if self._num_left > 0 and composition is not None and composition == self._composition and not has_news:
            self._num_left -= 1
        else:
            self._choice = self.policy.choose(views)
            self._num_left, self._composition = self._choice.num_steps - 1, composition
        return self._choice
