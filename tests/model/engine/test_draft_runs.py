"""Several drafting steps in a row: the trees, texts, events and accounts of single steps."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from engine import engine as stepping
from engine.core.policy import ExpansionChoice, SequenceView, StepFeedback
from engine.core.tree import PLAIN, Expansion, GrowthCosts
from engine.core.types import FinishReason, Request, SamplingParams, Speculation, TokenEvent
from engine.draft.text.text_cache import TextCache
from engine.draft.trees import native_growth
from engine.draft.trees.grower import Growth
from engine.draft.trees.native_growth import NativeTreeGrower
from engine.engine import Engine
from engine.native.distributions import KeptTokens
from engine.native.draft_steps import DraftedRow
from engine.scheduler.run_pacing import RunPacing
from engine.scheduler.scheduler import MostSteps
from tests.model.draft.test_native_growth import CRAMPED, LONG, ROOMY, are_same, crowd, engine_of, plain_texts
from tests.model.driving import Session, greedy, run, run_arriving, sampled
from tests.needs import needs_library

pytestmark = needs_library
TREE = Expansion(0, 4, 5, "noise_aware", 9)
REQUESTS = [
    *crowd(),
    Request("stops", tuple(LONG), SamplingParams(seed=5, max_tokens=60, stop_token_ids=(3, 7, 9))),
    Request("greedy stops", (9, 5, 9), SamplingParams(temperature=0.0, max_tokens=60, stop_token_ids=tuple(range(20)))),
    greedy("plain", LONG, 30, is_enabled=False),
    sampled("plain of another rule", LONG, 3, 24, verifier="traversal"),
    Request("chain", tuple(LONG), SamplingParams(seed=2, max_tokens=30), Speculation(expansion=Expansion(3, 1, 0))),
]


class Steady:
    """A policy that gives every coupled or greedy sequence the same tree, for many steps."""

    name = "steady"

    def __init__(self) -> None:
        self.feedbacks: list[StepFeedback] = []

    def choose(self, views: Sequence[SequenceView]) -> ExpansionChoice:
        plain = [view.verifier == "traversal" and not view.sampling.is_greedy for view in views]
        trees = tuple(PLAIN if one else TREE for one in plain)
        return ExpansionChoice(trees, growth_costs=GrowthCosts(0.02, 0.02), keeps_up=False, num_steps=100)

    def observe(self, feedback: StepFeedback) -> None:
        self.feedbacks.append(feedback)


def drafting(most_steps: int, monkeypatch, with_texts: bool = True, **given) -> Engine:
    monkeypatch.setattr(RunPacing, "most_steps", lambda *_: MostSteps(1, most_steps))
    return engine_of(with_texts, policy=Steady(), **given)


def unlearning(monkeypatch) -> None:
    """Learn nothing about acceptance: within a run the trees' calibrations do not change."""
    monkeypatch.setattr(stepping, "learn", lambda *_: None)


def both(monkeypatch, most_steps: int, requests: Sequence[Request] = REQUESTS, **given) -> tuple[Session, Session]:
    """Return the sessions of single steps and of runs."""
    return tuple(run(drafting(most, monkeypatch, **given), requests) for most in (1, most_steps))  # type: ignore[return-value]


def longest(session: Session) -> int:
    return max(one.num_steps for one in session.stats if one.num_drafts)


def without_times(session: Session) -> dict[str, list[TokenEvent]]:
    return {name: [structs.replace(one, queued_s=None) for one in of.events] for name, of in session.outcomes.items()}


def check_events(monkeypatch, **given) -> None:
    """Each row of a step has one event, in a run as in single steps, with the same tokens, drafts and acceptance.

    Cached text of rows without drafts is learned some tokens later, so that its agreement differs by then.
    """
    unlearning(monkeypatch)
    requests = [one for one in REQUESTS if one.speculation.verifier != "traversal" or not given.get("with_texts", True)]
    single, runs = both(monkeypatch, 5, requests, **given)
    assert without_times(runs) == without_times(single)
    assert longest(single) == 1 < longest(runs) <= 5
    assert {one.finish for one in runs.outcomes.values()} == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize("with_texts", [False, True])
@pytest.mark.parametrize("precision", ["float32", "compact"])
def test_runs_give_events_of_single_steps(with_texts, precision, monkeypatch):
    check_events(monkeypatch, with_texts=with_texts, precision=precision)


@pytest.mark.parametrize("most_steps", [2, 8])
@pytest.mark.parametrize("config", [ROOMY, CRAMPED], ids=["roomy", "cramped"])
def test_runs_change_no_token(most_steps, config, monkeypatch):
    """Trees that learn from a run later are other trees, of the same texts."""
    single, runs = both(monkeypatch, most_steps, crowd(), config=config, with_texts=False)
    assert runs.texts() == single.texts() == plain_texts()
    assert longest(runs) > 1
    assert any(stats.num_preemptions for stats in runs.stats) == (config is CRAMPED)


def grown(most_steps: int, monkeypatch, request: Request) -> list[Growth]:
    """Return the trees of all steps of a request."""
    found: list[Growth] = []
    read = NativeTreeGrower._read

    def kept(*args: Any) -> Growth:
        found.append(read(*args))
        return found[-1]

    with monkeypatch.context() as patch:
        patch.setattr(NativeTreeGrower, "_read", kept)
        run(drafting(most_steps, patch), [request])
    return found


@pytest.mark.parametrize("request_id", ["greedy", "2", "truncated 2", "predicted", "(42, 3)"])
def test_runs_grow_trees_of_single_steps(request_id, monkeypatch):
    """What the head was fed, what cached text has learned and the noise are those of single steps."""
    unlearning(monkeypatch)
    request = next(one for one in crowd() if one.request_id == request_id)
    single, runs = (grown(most, monkeypatch, request) for most in (1, 6))
    assert len(single) == len(runs)
    assert all(map(are_same, single, runs))


def with_rows(monkeypatch, **changes: Callable[[Any], Any]) -> None:
    """Change fields of the sequences that the library gets."""

    def changed(**given: Any) -> DraftedRow:
        return DraftedRow(**{**given, **{name: change(given[name]) for name, change in changes.items()}})

    monkeypatch.setattr(native_growth, "DraftedRow", changed)


@pytest.mark.parametrize(
    "mutant",
    [
        {"seed": lambda seed: seed + 1},
        {"truncation": lambda _: KeptTokens()},
        {"temperature": lambda temperature: 2 * temperature},
        {"stop_ids": lambda _: ()},
        {"num_remaining": lambda _: 1000},
    ],
    ids=lambda mutant: next(iter(mutant)),
)
def test_wrong_runs_are_detected(mutant: dict[str, Callable[[Any], Any]], monkeypatch):
    with_rows(monkeypatch, **mutant)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        check_events(monkeypatch)


def test_tokens_learned_twice_are_detected(monkeypatch):
    """The mutant: the text cache does not know what the library has learned."""
    monkeypatch.setattr(TextCache, "note_learned", lambda *_: None)
    with pytest.raises(AssertionError):
        test_runs_grow_trees_of_single_steps("2", monkeypatch)


def test_rows_join_and_leave_between_runs(monkeypatch):
    """Requests that arrive and are aborted at any time change no text of others."""
    expected = run(drafting(1, monkeypatch), REQUESTS).texts()
    for seed in range(4):
        rng = random.Random(seed)
        aborted = rng.choice(REQUESTS[:4]).request_id
        session = run_arriving(drafting(4, monkeypatch), REQUESTS, rng, aborted)
        texts = session.texts()
        assert longest(session) > 1
        assert {name: text for name, text in texts.items() if name != aborted} == {
            name: text for name, text in expected.items() if name != aborted
        }


def test_accounts_are_those_of_single_steps(monkeypatch):
    unlearning(monkeypatch)
    sums = ["num_generated_tokens", "num_draft_tokens", "num_accepted_tokens", "num_drafts", "num_target_tokens", "num_row_steps"]
    sums += ["num_expected_rows", "num_realised_tokens"]
    single, runs = both(monkeypatch, 6, crowd()[:1], with_texts=False)
    totals = [{name: sum(getattr(one, name) for one in session.stats) for name in sums} for session in (single, runs)]
    assert totals[0] == totals[1]
    assert sum(one.num_steps for one in runs.stats) == len(single.stats) > 2 * len(runs.stats)
    assert sum(one.expected_tokens for one in runs.stats) == pytest.approx(sum(one.expected_tokens for one in single.stats))


def test_policy_learns_from_each_step(monkeypatch):
    """A step of a run has its own work, outcomes and seconds, and its part of the call."""
    unlearning(monkeypatch)
    policies: list[Steady] = []
    for most_steps in (1, 6):
        engine = drafting(most_steps, monkeypatch, with_texts=False)
        run(engine, [crowd()[0]])
        policies.append(engine._policy._policy)  # type: ignore[arg-type]
    single, runs = ([one for one in policy.feedbacks if one.has_drafted] for policy in policies)
    assert [one.outcomes for one in runs] == [one.outcomes for one in single]
    assert all(one.num_steps == 1 and one.draft_s > 0 and one.rest_s > 0 for one in runs)
    works, others = ([one.work for one in feedbacks] for feedbacks in (single, runs))
    names = ("num_rows", "num_tokens", "num_drawn", "num_passes", "num_draft_tokens", "num_rounds")
    assert [[getattr(work, name) for name in names] for work in works] == [[getattr(w, name) for name in names] for w in others]
    assert min(work.num_calls for work in others) < 1.0 == min(work.num_calls for work in works)


@pytest.mark.parametrize("sampling", [{"num_logprobs": 1}, {"frequency_penalty": 0.5}, {"min_tokens": 9}])
def test_rows_that_need_host_draft_singly(sampling, monkeypatch):
    needs_host = Request("r", tuple(LONG), SamplingParams(seed=1, max_tokens=12, ignore_eos=True, **sampling))
    session = run(drafting(4, monkeypatch, with_texts=False), [needs_host, greedy("other", LONG, 60)])
    steps = {one.num_steps for one in session.stats if one.num_decoding_rows == 2}
    assert steps == {1}
    assert longest(session) > 1


def test_trees_of_other_rules_draft_singly(monkeypatch):
    """The library cannot sample a tree's nodes."""
    request = sampled("r", LONG, 1, 12, verifier="traversal")
    request = replace(request, speculation=replace(request.speculation, expansion=Expansion(2, 2, 2)))
    session = run(drafting(4, monkeypatch, with_texts=False), [request, greedy("other", LONG, 60)])
    assert {one.num_steps for one in session.stats if one.num_decoding_rows == 2} == {1}
    assert longest(session) > 1
