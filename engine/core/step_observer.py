"""The observers of an engine's steps, and their view of a committed step. Free of torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine.core.policy import ExpansionPolicy, StepFeedback
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
    def feedback(self) -> StepFeedback:
        """The costs and outcomes of the step."""
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
        """Receive the trees of the decoding rows after the target's pass, before any slot is freed."""

    def after_commit(self, step: CommittedStep) -> None:
        """Learn from a step, in time that counts as the policy's. An exception fails the step."""

    def after_step(self, stats: StepStats, rows: Sequence[TracedRow]) -> None:
        """Receive the statistics and the traced rows of a finished step. Must not raise."""


class PolicyFeedback(StepObserver):
    """Has a policy learn from each step."""

    def __init__(self, policy: ExpansionPolicy) -> None:
        self._policy = policy

    def after_commit(self, step: CommittedStep) -> None:
        """Give the policy its feedback."""
        self._policy.observe(step.feedback)
