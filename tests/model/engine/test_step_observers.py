"""Each observer receives a step's plan, pass, commit and statistics; the policy and root features are observers too."""

import gc
import weakref

import pytest
from torch import Tensor

from engine.core.policy import FixedExpansion, StepFeedback
from engine.core.step_observer import StepObserver
from engine.core.tree import Expansion
from engine.engine import Engine
from engine.testing import tiny_engine
from tests.model.driving import greedy, run
from tests.model.tiny import pair


class LearningPolicy(FixedExpansion):
    """Records the steps it learns from."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__(Expansion(2, 2, 2))
        self.calls, self.feedback = calls, list[StepFeedback]()

    def observe(self, feedback: StepFeedback) -> None:
        self.calls.append("policy")
        self.feedback.append(feedback)


class Recorder(StepObserver):
    """Records which method the engine calls."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def before_step(self, plan):
        self.calls.append("plan")

    def after_forward(self, plan, trees):
        assert len(trees) == len(plan.decoding)
        self.calls.append("pass")

    def after_commit(self, step):
        assert len(step.logits_NV) >= sum(one.num_nodes + 1 for one in step.make_feedbacks[0]().outcomes)
        self.calls.append("commit")

    def after_step(self, stats, rows):
        assert stats.policy_s > 0
        self.calls.append("stats")


def observed() -> tuple[Engine, LearningPolicy, list[str]]:
    calls: list[str] = []
    policy = LearningPolicy(calls)
    engine = tiny_engine(*pair("llama"), policy)
    engine.add_observer(Recorder(calls))
    return engine, policy, calls


def test_observers_receive_each_stage_once() -> None:
    engine, policy, calls = observed()
    run(engine, [greedy("one", (5, 9, 23)), greedy("two", (7, 8))])
    assert calls == ["plan", "pass", "policy", "commit", "stats"] * len(policy.feedback)
    assert any(one.outcomes for one in policy.feedback)


def test_endings_are_of_continuing_requests() -> None:
    """The bug to avoid: a finished request keeps an ending, which a later request of the same id would read."""
    engine, _, _ = observed()
    engine.roots.watch()
    seen: list[set[str]] = []

    class Endings(StepObserver):
        def after_commit(self, step):
            seen.append(set(step.endings))

    engine.add_observer(Endings())
    run(engine, [greedy("short", (5, 9, 23), max_tokens=1), greedy("long", (7, 8))])
    assert all("short" not in names for names in seen)
    assert seen[0] == {"long"}
    assert seen[-1] == set()
    assert not engine.roots.facts(["short", "long"]).is_known_B.any()


def test_feedback_keeps_no_logits_alive() -> None:
    """The bug to avoid: a policy keeps the feedback of many steps for its next choice, and with it each step's logits."""
    engine, policy, _ = observed()
    logits: list[weakref.ref[Tensor]] = []

    class Logits(StepObserver):
        def after_commit(self, step):
            logits.append(weakref.ref(step.logits_NV))

    engine.add_observer(Logits())
    run(engine, [greedy("one", (5, 9, 23))])
    gc.collect()
    assert len(policy.feedback) == len(logits) > 2
    assert all(one() is None for one in logits[:-1])
    assert policy.feedback[0].work.num_tokens > 0


def test_observer_failure_after_commit_fails_the_step() -> None:
    engine, _, _ = observed()

    class Failing(StepObserver):
        def after_commit(self, step):
            raise RuntimeError("cannot learn")

    engine.add_observer(Failing())
    engine.add(greedy("one", (5, 9, 23)))
    with pytest.raises(RuntimeError, match="cannot learn"):
        engine.step()
