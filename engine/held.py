"""A policy's choice while it holds, and what the policy is told of its steps afterwards.

While it holds, nothing that the policy is told could change anything, and what telling takes has left the processor's caches
after each step: it is brought there once for several.
"""

from collections.abc import Callable

from engine.policy import BatchViews, Choice, ExpansionPolicy, StepFeedback, StepWork

MOST_UNTOLD = 16  # steps of which a policy is told later: each keeps what it was made of


class HeldChoice:
    """A policy's choice, for as long as it holds; then the policy is told what became of it, and asked again."""

    def __init__(self, policy: ExpansionPolicy) -> None:
        self.policy = policy
        self._choice, self._num_left = Choice(()), 0
        self._composition: int | None = None
        self._untold: list[tuple[Callable[[int], StepFeedback], int]] = []
        self._num_plain = self._num_counted = 0  # steps of the choice in which nobody drafted, and the last that are only counted

    def choose(self, views: BatchViews, has_news: bool) -> Choice:
        """Return the choice for a step; it holds no longer where there is news of cached text."""
        composition = views.composition
        if self._num_left > 0 and composition == self._composition and composition is not None and not has_news:
            self._num_left -= 1
            return self._choice
        self.tell()
        self._choice = choice = self.policy.choose(views)
        self._num_left, self._composition, self._num_plain = choice.num_steps - 1, composition, 0
        return choice

    def observe(self, feedback_for: Callable[[int], StepFeedback], has_drafted: bool) -> None:
        """Have the policy learn from a step that ran, before it is asked again.

        `feedback_for` is asked with the steps that the feedback stands for: this one, and those before it that were counted.
        """
        if has_drafted:
            self._keep_count()
            self._untold.append((feedback_for, 1))
        else:
            self._num_counted += 1
            if self._num_plain in self._choice.plain_told:
                self._untold.append((feedback_for, self._num_counted))
                self._num_counted = 0
            self._num_plain += 1
        if len(self._untold) >= MOST_UNTOLD:
            self.tell()

    def tell(self) -> None:
        """Tell the policy of all steps that it has not been told of."""
        self._keep_count()
        while self._untold:
            feedback_for, num_steps = self._untold.pop(0)
            self.policy.observe(feedback_for(num_steps))

    def _keep_count(self) -> None:
        """Have steps that are only counted wait to be told."""
        if self._num_counted:
            self._untold.append((_counted, self._num_counted))
            self._num_counted = 0


def _counted(num_steps: int) -> StepFeedback:
    """Return what is told of plain steps that are only counted."""
    return StepFeedback(
        draft_s=0.0,
        rest_s=0.0,
        has_prefill=False,
        num_rows=0,
        num_rounds=0,
        num_passes=0,
        tell_work=lambda: StepWork(0, 0, 0, 0, 0, 0, 0.0, 0),
        tell_outcomes=tuple,
        num_steps=num_steps,
    )
