"""The feedback of an engine to its policy about a step."""

from engine.core.config import SchedulerConfig
from engine.core.policy import ExpansionChoice, FixedExpansion, StepFeedback
from engine.core.tree import PLAIN, Expansion
from engine.testing import tiny_engine
from tests.model.draft.test_head_drafter import CROWDED
from tests.model.driving import run
from tests.model.heads import head_engine, learnt_head
from tests.model.kv_cache.test_kv_cache import RandomExpansion
from tests.model.mixed import mixed_requests
from tests.model.tiny import pair
from tests.model.verify.test_expected_tokens import requests_of


class SeldomDrafts(RandomExpansion):
    """A policy that drafts in two steps of five."""

    def choose(self, views):
        choice = super().choose(views)
        return choice if self._rng.random() < 0.4 else ExpansionChoice((PLAIN,) * len(views))


def test_tokens_after_stop_are_no_gain(monkeypatch):
    """Stop tokens soon cut long accepted paths. A policy observes only the kept tokens."""
    config = SchedulerConfig(max_running=1, max_step_tokens=128, num_slots=512, max_model_len=64)
    engine = tiny_engine(*pair("llama"), FixedExpansion(Expansion(6, 1, 0)), config=config)
    observed: list[StepFeedback] = []
    monkeypatch.setattr(engine._policy._policy, "observe", observed.append)
    stats = run(engine, requests_of("traversal", num=60, stop_token_ids=tuple(range(30)))).stats
    assert len(observed) == len(stats), "the last of them too"
    num_kept = sum(one.num_accepted_tokens for one in stats)
    assert sum(outcome.accepted_depth for one in observed for outcome in one.outcomes) == num_kept
    assert num_kept < sum(one.num_realised_tokens - one.num_expected_rows for one in stats)  # whole paths


def test_step_reports_drafting_and_details_on_request(monkeypatch):
    engine = head_engine(learnt_head(), policy=SeldomDrafts(1), config=CROWDED)
    observed: list[StepFeedback] = []
    monkeypatch.setattr(engine._policy._policy, "observe", observed.append)
    run(engine, mixed_requests(max_tokens=16))
    assert not any(one._outcomes or one._work for one in observed), "no detail was requested"
    for one in observed:
        wished = [outcome for outcome in one.outcomes if not outcome.expansion.is_plain]
        assert one.has_drafted == bool(wished)
        assert one.has_drafted or not one.work.num_rounds
        assert len(one.outcomes) <= one.work.num_rows
        work = one.work
        assert (one.num_rows, one.num_rounds, one.num_passes) == (work.num_rows, work.num_rounds, work.num_passes)
        assert one.draft_s >= 0.0
        assert one.rest_s > 0.0
    assert sum(one.has_drafted for one in observed) > 3
    assert sum(not one.has_drafted for one in observed) > 3
    assert any(one.has_prefill for one in observed)
