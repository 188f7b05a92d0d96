"""The engine's own policies: the same wish for every sequence, and nothing expected of it."""

from hypothesis import given
from hypothesis import strategies as st

from engine.core.policy import MOST_UNOBSERVED, ExpansionChoice, FixedExpansion, PlainDecoding, Reason, SequenceView
from engine.core.tree import PLAIN
from engine.core.types import SamplingParams, Speculation
from tests.strategies import expansions

VIEW = SequenceView("r", 50, 10, 6, 1, SamplingParams(), Speculation(), "traversal")


@given(expansions(), st.integers(0, 5))
def test_fixed_and_plain_choose_uniformly(expansion, num_views):
    assert FixedExpansion(expansion).choose([VIEW] * num_views) == ExpansionChoice(
        (expansion,) * num_views, Reason.FIXED, 1.0, None, num_steps=MOST_UNOBSERVED
    )
    assert PlainDecoding().choose([VIEW] * num_views).expansions == (PLAIN,) * num_views
