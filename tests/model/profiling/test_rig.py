"""The step timer: it runs what its results claim, in a served engine's own caches, and changes no sequence."""

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from engine.core.config import EngineConfig, SchedulerConfig
from engine.core.policy import PassSize
from engine.core.tree import PLAIN, Expansion
from engine.draft.text.text_cache import TextCache
from engine.draft.text.text_drafter import TextDrafter
from engine.engine import Engine
from engine.model.root_features import RootFeatures
from engine.profiling.step_timer import StepTimer
from engine.testing import tiny_engine
from engine.weights import WeightsCache
from selector.build import adaptive_policy
from selector.cost import DRAFT_COEFFICIENTS, KNOTS, NUM_REST
from selector.profile import Profile, cached_profile, grid, measure
from tests.model.driving import greedy, run, sampled
from tests.model.engine.test_engine import generated, seeded_text
from tests.model.passes import CPU
from tests.model.tiny import model, pair

LIMITS = SchedulerConfig(num_slots=900, max_model_len=256, max_step_tokens=64)
PROMPT = tuple(range(5, 30))
CHEAP = Profile((1.0, *(0.001,) * (NUM_REST - 1)), (0.001,) * len(DRAFT_COEFFICIENTS))


def engine_and_rig(drafter: str = "model") -> tuple[Engine, StepTimer]:
    drafts = TextDrafter(61, CPU, TextCache(min_tokens=1)) if drafter == "ngram" else pair("llama")[1]
    engine = tiny_engine(model("llama"), drafts, config=LIMITS)
    return engine, StepTimer(engine.info, LIMITS, engine.target, engine.drafter, "weights")


class Ticking:
    """A clock that goes on by a second whenever it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


@pytest.mark.parametrize("is_drawn", [False, True])
def test_timed_pass_has_the_stated_size(is_drawn):
    _, rig = engine_and_rig()
    work, seconds = rig.time_pass(PassSize(3, 4, 100, is_drawn))
    assert seconds > 0.0
    assert (work.num_rows, work.num_tokens, work.num_drawn) == (3, 12, 12 if is_drawn else 0)
    assert (work.num_keys, work.num_scores, work.num_passes, work.num_draft_tokens) == (303, 1212, 0, 0)


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_steps_draft_as_the_script_prescribes(drafter):
    engine, rig = engine_and_rig(drafter)
    expansions = [PLAIN, Expansion(1, 1, 0), Expansion(3, 1, 0)]
    seen = rig.run_steps(2, 20, expansions)
    assert [step.outcomes[0].expansion for step in seen] == expansions
    assert seen[0].work.num_passes == 0
    if drafter == "model":
        assert [step.work.num_passes for step in seen] == [0, 1, 3]
        assert seen[2].work.num_tokens == 8
        assert not any(step.has_prefill for step in seen)
    else:
        assert {step.work.num_passes for step in seen} == {step.work.num_draft_tokens for step in seen} == {0}
    assert [step.work.num_rounds for step in seen] == [0, 1, 3]
    engine.check_integrity()


def test_nothing_is_left_behind():
    engine, rig = engine_and_rig()
    measure(rig, Ticking(), budget_s=12.0)
    engine.check_integrity()
    requests = [greedy("greedy", PROMPT), sampled("seeded", PROMPT[:5], seed=3, top_k=20)]
    assert run(engine, requests).texts() == {
        "greedy": generated("llama", PROMPT, 12),
        "seeded": seeded_text("llama", requests[1]),
    }


def test_a_profile_keeps_to_the_limits():
    sizes = grid(LIMITS)
    assert max(size.num_tokens for size in sizes) <= LIMITS.max_step_tokens
    assert max(size.num_context + size.num_nodes for size in sizes) <= LIMITS.max_model_len
    assert {size.num_tokens for size in sizes} >= {knot for knot in KNOTS if knot <= 64}
    profile = measure(engine_and_rig()[1], Ticking(), budget_s=20.0)
    assert all(0.0 < value < inf for value in profile.costs().coefficients.values())


@pytest.mark.parametrize("drafter", ["model", "ngram", None])
def test_a_measured_profile_is_kept(drafter: str | None):
    """Bug: without draft passes a coefficient was NumPy's, which could not be written: each start had generic costs."""
    engine, rig = engine_and_rig(drafter or "model")
    if drafter is None:
        rig = StepTimer(engine.info, LIMITS, engine.target, None)
    profile = measure(rig, Ticking(), budget_s=20.0)
    assert Profile.from_text(profile.as_text(rig.facts)) == profile


def test_a_sound_profile_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rig, cache = engine_and_rig()[1], WeightsCache(tmp_path)
    sound = Profile((0.1,) * NUM_REST, (0.1,) * len(DRAFT_COEFFICIENTS))
    measured: list[str] = []

    def measuring(bench):
        measured.append("once")
        return sound

    monkeypatch.setattr("selector.profile.measure", measuring)
    assert cached_profile(rig, cache) == cached_profile(rig, cache) == sound
    assert len(measured) == 1
    (entry,) = (tmp_path / "profiles").iterdir()
    entry.write_text("{}")
    assert cached_profile(rig, cache) == sound
    assert len(measured) == 2
    sound = replace(sound, is_sound=False)
    entry.unlink()
    for num_measured in (3, 4, 4):  # a machine that is never quiet is not measured at each start
        assert cached_profile(rig, cache).rest == sound.rest
        assert len(measured) == num_measured


def test_a_restart_measures_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The bug: on a busy machine no measurement is sound, and none was kept, so that each restart took six seconds more."""
    rig, cache = engine_and_rig()[1], WeightsCache(tmp_path)
    coefficients = iter([0.1, 0.2, 0.3])
    monkeypatch.setattr("selector.profile.measure", lambda bench: noisy(next(coefficients)))

    def noisy(value: float) -> Profile:
        return Profile((value,) * NUM_REST, (value,) * len(DRAFT_COEFFICIENTS), is_sound=False)

    assert cached_profile(rig, cache, is_hurried=True).rest == noisy(0.1).rest, "there is none yet"
    assert cached_profile(rig, cache, is_hurried=True).rest == noisy(0.1).rest
    assert cached_profile(rig, cache).rest == noisy(0.2).rest, "a first start has the time"
    assert cached_profile(rig, cache, is_hurried=True).rest == noisy(0.2).rest


def test_another_machine_has_another_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rig, cache = engine_and_rig()[1], WeightsCache(tmp_path)
    monkeypatch.setattr("selector.profile.measure", lambda bench: Profile((0.1,) * NUM_REST, (0.1,) * len(DRAFT_COEFFICIENTS)))
    facts = rig.facts
    cached_profile(rig, cache)
    for name in facts:
        others = {**facts, name: "other"}
        monkeypatch.setattr(StepTimer, "facts", others)
        cached_profile(rig, cache)
    assert "drafter_weights" in facts
    assert len(list((tmp_path / "profiles").iterdir())) == 1 + len(facts)
    monkeypatch.setattr(StepTimer, "limits", replace(LIMITS, max_running=2))
    cached_profile(rig, cache)
    assert len(list((tmp_path / "profiles").iterdir())) == 2 + len(facts)


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_adaptive_policy_changes_no_token(drafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The real policy on a real engine: it drafts trees of many shapes, and the texts are plain decoding's."""
    monkeypatch.setenv("LATEBRANCH_CACHE", str(tmp_path))
    monkeypatch.setattr("selector.profile.measure", lambda bench: CHEAP)
    _, rig = engine_and_rig(drafter)
    policy = adaptive_policy(
        EngineConfig("tiny", policy="adaptive", expansion=Expansion(4, 1, 0)), rig, RootFeatures(model("llama"), None)
    )
    drafts = TextDrafter(61, CPU, TextCache(min_tokens=1)) if drafter == "ngram" else pair("llama")[1]
    engine = tiny_engine(model("llama"), drafts, policy, config=LIMITS)
    requests = [
        greedy("greedy", PROMPT, max_tokens=40),
        *(sampled(f"seeded-{seed}", PROMPT[:5], seed=seed, top_k=20) for seed in range(3)),
    ]
    ran = run(engine, requests)
    wanted = {"greedy": generated("llama", PROMPT, 40), **{one.request_id: seeded_text("llama", one) for one in requests[1:]}}
    assert ran.texts() == wanted
    shapes = {event.expansion for outcome in ran.outcomes.values() for event in outcome.events}
    assert len(shapes) > 1
