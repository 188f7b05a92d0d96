"""A drafter that returns only NaN or infinity: all sequences are as without it, and no request fails."""

import math

import pytest

from engine.core.policy import FixedExpansion
from engine.core.tree import Expansion
from engine.core.types import FinishReason
from engine.draft.text.text_cache import TextCache
from engine.draft.text_and_model import CombinedDrafter
from engine.engine import Engine
from engine.model.causal_lm import adopt
from engine.testing import tiny_engine, tiny_module
from tests.model.driving import greedy, run, sampled
from tests.model.engine.test_engine import LONG, generated, seeded_text
from tests.model.heads import head_engine, random_head
from tests.model.passes import CPU
from tests.model.tiny import model

POLICY = FixedExpansion(Expansion(2, 2, 2))


def with_a_model(value: float) -> Engine:
    module = tiny_module("llama", 1)
    draft = adopt(module, CPU)
    module.lm_head.weight.data.fill_(value)
    return tiny_engine(model("llama"), draft, POLICY)


def with_a_head(value: float) -> Engine:
    head = random_head()
    for parameter in head.parameters():
        parameter.data.fill_(value)
    return head_engine(head, policy=POLICY)


def with_cached_text(value: float) -> Engine:
    inner = with_a_model(value).drafter
    assert inner is not None
    return tiny_engine(model("llama"), CombinedDrafter(inner, TextCache(min_tokens=1), 61, CPU), POLICY)


@pytest.mark.parametrize("make", [with_a_model, with_a_head, with_cached_text])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_drafter_ends_no_request(make, value):
    requests = [greedy("greedy", LONG), sampled("seeded", LONG, seed=3), sampled("iid", LONG, seed=4, verifier="traversal")]
    session = run(make(value), requests)
    assert session.outcomes["greedy"].ids == generated("llama", tuple(LONG), 12)
    assert session.outcomes["seeded"].ids == seeded_text("llama", requests[1])
    assert {outcome.finish for outcome in session.outcomes.values()} == {FinishReason.LENGTH}
    if make is not with_cached_text:
        assert sum(stats.num_draft_tokens for stats in session.stats) == 0
