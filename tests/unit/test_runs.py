"""Runs of cached text: taken where they are longer than the policy's trees, and kept out of what it learns."""

from collections.abc import Sequence

import pytest

from engine.draft.runs import RunningPolicy
from engine.draft.texts import TextCache
from engine.policy import Choice, DraftOutcome, FixedExpansion, SequenceView, StepFeedback, StepWork
from engine.tree import Expansion
from engine.types import SamplingParams, Speculation

TREE = Expansion(2, 2, 3)


class Sure(TextCache):
    """A cache that is sure of so many tokens of each request."""

    def __init__(self, lengths: dict[str, int]) -> None:
        super().__init__()
        self._lengths = lengths

    def run(self, request_id: str, most_tokens: int) -> int:
        return min(self._lengths[request_id], most_tokens)


class Listening(FixedExpansion):
    """A fixed policy that remembers what it was told."""

    def __init__(self) -> None:
        super().__init__(TREE)
        self.told: list[StepFeedback] = []

    def choose(self, views: Sequence[SequenceView]) -> Choice:
        return Choice((TREE,) * len(views), step_s=0.5)

    def observe(self, feedback: StepFeedback) -> None:
        self.told.append(feedback)


def view(request_id: str, num_remaining: int = 100) -> SequenceView:
    return SequenceView(request_id, 50, 10, num_remaining, 1, 1, SamplingParams(), Speculation(), "traversal")


@pytest.mark.parametrize(
    ("length", "num_remaining", "expected"),
    [
        (5, 100, TREE),
        (6, 100, Expansion(6, 1, 0)),
        (11, 100, Expansion(8, 1, 0)),
        (40, 100, Expansion(16, 1, 0)),
        (40, 9, Expansion(8, 1, 0)),
    ],
)
def test_the_longest_chain_that_is_sure_replaces_a_tree_that_is_less_deep(length, num_remaining, expected):
    choice = RunningPolicy(Listening(), Sure({"r": length})).choose([view("r", num_remaining)])
    assert choice.expansions == (expected,)
    assert (choice.step_s is None) == (expected is not TREE)


def test_the_longest_is_bounded():
    assert RunningPolicy(Listening(), Sure({"r": 40}), 12).choose([view("r")]).expansions == (Expansion(12, 1, 0),)


def test_the_policy_learns_from_its_own_trees_and_from_passes_that_were_made():
    inner = Listening()
    policy = RunningPolicy(inner, Sure({"run": 16, "tree": 0}))
    policy.choose([view("run"), view("tree")])
    outcomes = (DraftOutcome("run", Expansion(16, 1, 0), 16, 16, 16), DraftOutcome("tree", TREE, 8, 5, 2))
    work = StepWork(2, 26, 26, 100, 1000, 16, 15 + 8 + 2)
    policy.observe(StepFeedback(work, outcomes, 0.1, 0.2, has_prefill=False))
    (told,) = inner.told
    assert told.outcomes == outcomes[1:]
    assert (told.work.num_passes, told.work.num_draft_tokens) == (5, 9)
    assert told.work.num_tokens == 26
    policy.choose([view("tree")])
    feedback = StepFeedback(work, outcomes[1:], 0.1, 0.2, has_prefill=False)
    policy.observe(feedback)
    assert inner.told[1] is feedback
