"""What cannot be kept beside a grammar is refused by the field's name."""

from dataclasses import replace

import pytest

from engine.core.sampling_limits import MAX_GRAMMAR_CHARS, NoDistribution, require_probs
from engine.core.types import Grammar, GrammarKind, SamplingParams

HELD = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "a*"))


def test_grammar_with_other_edits_has_distribution():
    for fields in (
        {},
        {"allowed_token_ids": (1, 7)},
        {"bad_words": ((3,), (7, 7))},
        {"temperature": 0.0},
        {"stop_token_ids": (4,)},
    ):
        require_probs(replace(HELD, **fields), 10, (7, 8))


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("ignore_eos", {"ignore_eos": True}),
        ("min_tokens", {"min_tokens": 1}),
        ("grammar", {"allowed_token_ids": (1, 2)}),
        ("grammar", {"bad_words": ((7,), (8,))}),
        ("grammar", {"grammar": Grammar(GrammarKind.LARK, "a" * (MAX_GRAMMAR_CHARS + 1))}),
    ],
)
def test_unsatisfiable_limits_are_refused(param, fields):
    with pytest.raises(NoDistribution) as refused:
        require_probs(replace(HELD, **fields), 10, (7, 8))
    assert refused.value.param == param


def test_model_without_end_token_is_refused():
    with pytest.raises(NoDistribution, match="no end token is possible"):
        require_probs(HELD, 10, ())
