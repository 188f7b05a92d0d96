"""Who chooses each sequence's expansion: the Protocol, and the choices that need no training.

Knows what a policy may see (SequenceView) and what it learns afterwards (StepFeedback). The neural selector implements
the same Protocol elsewhere; the engine never imports it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.tree import PLAIN, Expansion
from engine.types import SamplingParams


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """What became of one drafted tree: the depth it reached and the depth of it that was accepted."""

    drafted_depth: int
    accepted_depth: int


@dataclass(frozen=True, slots=True)
class SequenceView:
    """What a policy may see of a sequence before drafting. `recent` is newest last and bounded."""

    request_id: str
    num_committed: int
    num_generated: int
    sampling: SamplingParams
    verifier: str
    recent: tuple[DraftOutcome, ...] = ()


@dataclass(frozen=True, slots=True)
class StepFeedback:
    """What a step cost and brought. Seconds; tokens are packed rows of the target's one forward."""

    expansions: tuple[Expansion, ...]
    outcomes: tuple[DraftOutcome, ...]
    num_target_tokens: int
    num_emitted: int
    draft_s: float
    verify_s: float
    step_s: float
    has_prefill: bool


class ExpansionPolicy(Protocol):
    """Chooses one expansion for every decoding sequence, each step. It changes speed, never the law."""

    name: str

    def choose(self, views: Sequence[SequenceView]) -> list[Expansion]:
        """Return one expansion for each view, in order."""
        ...

    def observe(self, feedback: StepFeedback) -> None:
        """Learn from the step that ran."""
        ...


class FixedExpansion:
    """Always the same shape."""

    def __init__(self, expansion: Expansion) -> None:
        self.name = f"fixed {expansion}"
        self._expansion = expansion

    def choose(self, views: Sequence[SequenceView]) -> list[Expansion]:
        """Return the fixed shape for every view."""
        return [self._expansion] * len(views)

    def observe(self, feedback: StepFeedback) -> None:
        """Learn nothing."""


class PlainDecoding(FixedExpansion):
    """Speculation switched off: the trivial policy."""

    def __init__(self) -> None:
        super().__init__(PLAIN)
        self.name = "plain"
