"""Edits of logits that may replace a predicted token."""

import pytest

from engine.core.types import Grammar, GrammarKind, SamplingParams
from engine.draft.text.edited import may_suppress

TOKENS = (5, 7)


@pytest.mark.parametrize(
    ("num_generated", "fields"),
    [
        (0, {}),
        (0, {"temperature": 0.0, "stop_token_ids": (5,)}),
        (0, {"logit_bias": ((6, -100.0), (5, 3.0), (9, 0.0))}),
        (0, {"allowed_token_ids": (5, 6, 7)}),
        (0, {"bad_words": ((5, 6), (7, 9, 8))}),
        (4, {"min_tokens": 4, "stop_token_ids": (5,)}),
        (3, {"min_tokens": 4, "stop_token_ids": (6,)}),
    ],
)
def test_harmless_edits_do_not_suppress_tokens(num_generated, fields):
    assert not may_suppress(SamplingParams(**fields), TOKENS, num_generated)


@pytest.mark.parametrize(
    ("num_generated", "fields"),
    [
        (0, {"logit_bias": ((5, -100.0),)}),
        (0, {"logit_bias": ((6, 1.0),)}),
        (0, {"allowed_token_ids": (5, 6)}),
        (0, {"bad_words": ((1, 2, 7),)}),
        (0, {"grammar": Grammar(GrammarKind.JSON_OBJECT)}),
        (0, {"repetition_penalty": 1.1}),
        (0, {"frequency_penalty": 0.1}),
        (0, {"presence_penalty": -0.1}),
        (3, {"min_tokens": 4, "stop_token_ids": (5,)}),
    ],
)
def test_suppressing_edits_are_detected(num_generated, fields):
    assert may_suppress(SamplingParams(**fields), TOKENS, num_generated)
