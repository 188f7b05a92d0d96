"""The observers of an engine's steps, and their view of a committed step. Free of torch."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine.core.policy import MOST_UNOBSERVED, BatchViews, ExpansionChoice, ExpansionPolicy, Reason, StepFeedback
from engine.core.row_trace import TracedRow
from engine.core.step_plan import StepPlan
from engine.core.tree import TokenTree
from engine.core.types import SamplingParams, StepStats

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ending:
    """A row's last node in a step: packed index, row of its children's draft distribution, slot, and the token after it."""

    node: int
    probs_row: int | None
    slot: int
    root_id: int
    sampling: SamplingParams


class CommittedStep(Protocol):
    """A step whose accepted paths are committed. Parts that not every observer needs are computed on access."""

    @property
    def num_steps(self) -> int:
        """The steps that ran in a row."""
        ...

    @property
    def has_drafted(self) -> bool:
        """Whether a tree was to grow."""
        ...

    @property
    def make_feedbacks(self) -> Sequence[Callable[[], StepFeedback]]:
        """Return the costs and outcomes of the step, also after later steps: of each step with drafts, of the first plain one."""
        ...

    @property
    def endings(self) -> Mapping[str, Ending]:
        """Where the step ended for each request that continues."""
        ...

    @property
    def logits_NV(self) -> "Float[Tensor, 'N V']":
        """The target's logits at the nodes of all trees."""
        ...

    @property
    def draft_probs_RV(self) -> "Float[Tensor, 'R V']":
        """The distributions from which drafted tokens were sampled."""
        ...


class StepObserver:
    """Receives each step of an engine. Subclasses override the methods that they need.

    `wants_rows`: all rows are traced, not only the rows of requests that enable it.
    """

    wants_rows = False

    def before_step(self, plan: StepPlan) -> None:
        """Receive the plan of a step before it runs. An exception fails the step."""

    def after_forward(self, plan: StepPlan, trees: Sequence[TokenTree]) -> None:
        """Receive the trees of the decoding rows after the target's pass, before any slot is freed.

        Not called for drafting steps in a row. They run only if no observer watches slots.
        """

    def after_commit(self, step: CommittedStep) -> None:
        """Learn from a step, in time that counts as the policy's. An exception fails the step."""

    def after_step(self, stats: StepStats, rows: Sequence[TracedRow]) -> None:
        """Receive the statistics and the traced rows of a finished step. Must not raise."""


class PolicySteps(StepObserver):
    """Has a policy choose trees and learn from steps. A choice is reused without the policy while the same sequences decode.

    Plain decoding is reused as without a policy. Drafts are reused until cached text may predict the next tokens of a sequence.
    """

    def __init__(self, policy: ExpansionPolicy) -> None:
        self._policy = policy
        self._choice = ExpansionChoice(())
        self._composition: Hashable = None
        self._is_plain = False  # steps of plain decoding pass without the policy
        self._num_left = self._num_passed = 0  # steps without the policy, until and since its last step
        self._unobserved: list[Callable[[], StepFeedback]] = []  # since that step; of plain decoding that step alone
        self.most_steps = 1  # in a row, by the latest choice

    def reused(self, views: BatchViews) -> ExpansionChoice | None:
        """Return the last choice if all sequences decode plainly without the policy, else None: the policy must choose."""
        if not (self._is_plain and self._num_left) or views.composition != self._composition:
            return None
        self.most_steps = MOST_UNOBSERVED  # the last run may pass the next look at cached text: two short ones take longer
        return self._passed()

    def choose(self, views: BatchViews) -> ExpansionChoice:
        """Return the policy's choice, or its last one while that is reused."""
        if self._num_left and not (self._is_plain or views.has_news) and views.composition == self._composition:
            self.most_steps = min(self._num_left, MOST_UNOBSERVED)
            return self._passed()
        views.num_steps = 1 + self._num_passed
        self._observe()
        self._is_plain, self._num_left, self._num_passed = False, 0, 0
        self._choice, self._composition = self._policy.choose(views), views.composition
        self.most_steps = min(self._choice.num_steps, MOST_UNOBSERVED) if self._composition is not None else 1
        return self._choice

    def after_commit(self, step: CommittedStep) -> None:
        """Keep the feedback of a step until the policy chooses, or give it to the policy now if its next step needs it.

        The feedback of plain decoding is that of the first step, for all steps until the policy's next one.
        """
        num_later, choice = step.num_steps - 1, self._choice
        if self._is_plain:
            self._num_passed += num_later
            self._num_left = max(0, self._num_left - num_later)
            return
        if not self._num_passed and self._composition is not None:
            if choice.reason is Reason.SPECULATION_PAYS:
                self._num_left = choice.num_steps - step.num_steps
            elif choice.reason is Reason.PLAIN_IS_BEST and not step.has_drafted:
                self._is_plain, self._num_left = True, min(choice.num_steps, MOST_UNOBSERVED) - step.num_steps
        else:
            self._num_left = max(0, self._num_left - num_later)
        self._num_passed += num_later
        self._unobserved += step.make_feedbacks
        if not self._num_left:
            self._observe()

    def _passed(self) -> ExpansionChoice:
        self._num_left -= 1
        self._num_passed += 1
        return self._choice

    def _observe(self) -> None:
        """Give the policy the feedback that is kept: of plain decoding for all steps that passed."""
        unobserved, self._unobserved = self._unobserved, []
        for make_feedback in unobserved:
            feedback = make_feedback()
            if self._is_plain:
                feedback.num_steps = 1 + self._num_passed
            self._policy.observe(feedback)
