"""Who chooses each sequence's expansion: the Protocol, and the choices that need no training.

Knows what a policy may see (SequenceView) and what it learns afterwards (StepFeedback). The neural selector implements
the same Protocol elsewhere; the engine never imports it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
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


_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of trees that find their own shape


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


class StepCosts:
    """What a step costs, learnt as it runs: seconds = base + slope x target tokens + level x draft levels.

    Base and slope are an exponentially forgetting least-squares line over the steps' time outside drafting.
    """

    def __init__(self, memory: float = 0.98) -> None:
        self._memory = memory
        self._sums = [0.0] * 5  # of 1, x, y, x x, x y
        self._level_s: float | None = None

    def observe(self, feedback: StepFeedback) -> None:
        """Learn from a step without prompt chunks (theirs cost otherwise: no logits) in which anything ran."""
        if feedback.has_prefill or not feedback.num_target_tokens:
            return
        x, y = float(feedback.num_target_tokens), feedback.step_s - feedback.draft_s
        self._sums = [self._memory * old + new for old, new in zip(self._sums, (1.0, x, y, x * x, x * y), strict=True)]
        levels = max((expansion.max_depth for expansion in feedback.expansions), default=0)
        if levels:
            level_s = feedback.draft_s / levels
            self._level_s = level_s if self._level_s is None else 0.9 * self._level_s + 0.1 * level_s

    def step_s(self, num_tokens: int, num_levels: int) -> float:
        """Return the seconds of a step with that many target tokens and draft levels; only ratios of it matter."""
        weight, sum_x, sum_y, sum_xx, sum_xy = self._sums
        if weight == 0.0:
            return 1.0 + 0.02 * num_tokens + 0.1 * num_levels
        mean_x, mean_y = sum_x / weight, sum_y / weight
        variance = sum_xx / weight - mean_x**2
        slope = max(0.0, (sum_xy / weight - mean_x * mean_y) / variance) if variance > 0.25 else 0.02 * mean_y
        level_s = 0.1 * mean_y if self._level_s is None else self._level_s
        return max(1e-9, mean_y + slope * (num_tokens - mean_x)) + level_s * num_levels


class AdaptiveExpansion:
    """Chooses for each sequence the shape with the most expected tokens a second, from its own acceptance so far.

    Needs no training: acceptance a is one number a sequence (a running ratio, shrunk towards everybody's), a chain of n brings
    1 + a + ... + a^n tokens, k branches are accepted with 1 - (1 - a)^k, and the step's time is StepCosts'. Where plain decoding
    is best it is chosen, and a short chain is tried now and then to see whether that still holds.
    """

    _PROBE_EVERY = 64
    _PRIOR_TRIALS = 4.0

    def __init__(self, largest: Expansion) -> None:
        self.name = f"adaptive up to {largest}"
        self._menu = _menu(largest)
        self._costs = StepCosts()
        self._accepted, self._trials = 1.2, 2.0

    def choose(self, views: Sequence[SequenceView]) -> list[Expansion]:
        """Return each view's best shape as if every sequence took the same one."""
        return [self._best(view, len(views)) for view in views]

    def observe(self, feedback: StepFeedback) -> None:
        """Learn costs and everybody's acceptance."""
        self._costs.observe(feedback)
        for outcome in feedback.outcomes:
            if outcome.drafted_depth:
                accepted, trials = _score(outcome)
                self._accepted = 0.98 * self._accepted + accepted
                self._trials = 0.98 * self._trials + trials

    def _best(self, view: SequenceView, num_rows: int) -> Expansion:
        acceptance = self._acceptance(view)
        best = max(self._menu, key=lambda e: _expected_tokens(e, acceptance) / self._seconds(e, num_rows))
        if best.is_plain and view.num_generated % self._PROBE_EVERY == self._PROBE_EVERY - 1:
            return min(self._menu, key=lambda shape: (shape.is_plain, shape.num_draft_tokens))
        return best

    def _seconds(self, expansion: Expansion, num_rows: int) -> float:
        return self._costs.step_s(num_rows * (1 + expansion.num_draft_tokens), expansion.max_depth)

    def _acceptance(self, view: SequenceView) -> float:
        prior = self._accepted / self._trials
        scores = [_score(outcome) for outcome in view.recent if outcome.drafted_depth]
        accepted = sum(score[0] for score in scores) + prior * self._PRIOR_TRIALS
        return min(0.99, accepted / (sum(score[1] for score in scores) + self._PRIOR_TRIALS))


def _menu(largest: Expansion) -> list[Expansion]:
    """Return plain decoding and what is no larger than `largest`: chains and trunks of a delayed tree, sizes of the others."""
    if not largest.is_delayed:
        return [PLAIN, *(replace(largest, max_nodes=size) for size in _SIZES if size < largest.max_nodes), largest]
    chains = [Expansion(length, 1, 0) for length in range(largest.max_depth + 1)]
    if largest.branches == 1:
        return chains
    trees = [
        Expansion(trunk, branches, depth, largest.tree)
        for trunk in range(largest.trunk + 1)
        for branches in range(2, largest.branches + 1)
        for depth in range(1, largest.depth + 1)
    ]
    return chains + trees


def _score(outcome: DraftOutcome) -> tuple[float, float]:
    """Return accepted tokens and trials: every accepted token was one, and so was the one that stopped the path."""
    return outcome.accepted_depth, outcome.accepted_depth + (outcome.accepted_depth < outcome.drafted_depth)


def _expected_tokens(expansion: Expansion, acceptance: float) -> float:
    """Return the expected tokens of a step, the extra token included, if every node is accepted with one probability."""
    if not expansion.is_delayed:
        return _expected_of_best(expansion.max_nodes, expansion.depth, expansion.branches, round(acceptance, 2))
    trunk = sum(acceptance**depth for depth in range(expansion.trunk + 1))
    fork = acceptance**expansion.trunk * (1 - (1 - acceptance) ** expansion.branches)
    return trunk + fork * sum(acceptance**depth for depth in range(expansion.depth))


@lru_cache(maxsize=4096)
def _expected_of_best(max_nodes: int, depth: int, branches: int, acceptance: float) -> float:
    """Return the same of the best tree of that size: places are filled most valuable first, a sibling's after its elder's."""
    places, expected = [(-acceptance, 1, 0)], 1.0  # (-chance to be accepted, depth, rank)
    for _ in range(max_nodes):
        if not places:
            break
        value, level, rank = heappop(places)
        expected -= value
        if level < depth:
            heappush(places, (value * acceptance, level + 1, 0))
        if rank + 1 < branches:
            heappush(places, (value * (1 - acceptance), level, rank + 1))
    return expected
