"""What an engine tells its policy of a step."""

from engine.policy import Choice, StepFeedback
from engine.tree import PLAIN
from tests.model.driving import run
from tests.model.heads import head_engine, learnt_head
from tests.model.mixed import mixed_requests
from tests.model.test_head_drafter import CROWDED
from tests.model.test_kv_cache import RandomExpansion


class SeldomDrafts(RandomExpansion):
    """A policy that drafts in two steps of five."""

    def choose(self, views):
        choice = super().choose(views)
        return choice if self._rng.random() < 0.4 else Choice((PLAIN,) * len(views))


def test_a_step_says_whether_it_drafted_and_the_rest_when_it_is_asked(monkeypatch):
    engine = head_engine(learnt_head(), policy=SeldomDrafts(1), config=CROWDED)
    heard: list[StepFeedback] = []
    monkeypatch.setattr(engine._policy, "observe", heard.append)
    run(engine, mixed_requests(max_tokens=16))
    assert not any("_told" in vars(one) for one in heard), "nobody has asked"
    for one in heard:
        wished = [outcome for outcome in one.outcomes if not outcome.expansion.is_plain]
        assert one.has_drafted == bool(wished)
        assert one.has_drafted or not one.work.num_rounds
        assert len(one.outcomes) <= one.work.num_rows
        assert one.draft_s >= 0.0
        assert one.rest_s > 0.0
    assert sum(one.has_drafted for one in heard) > 3
    assert sum(not one.has_drafted for one in heard) > 3
    assert any(one.has_prefill for one in heard)
