"""What cannot be kept beside a grammar is refused by the field's name."""

from dataclasses import replace

import pytest

from engine.core.sampling_limits import MAX_GRAMMAR_CHARS, NoLaw, require_law
from engine.core.types import Grammar, GrammarKind, SamplingParams

HELD = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "a*"))


def test_a_grammar_makes_a_law_beside_other_edits():
    for fields in (
        {},
        {"allowed_token_ids": (1, 7)},
        {"bad_words": ((3,), (7, 7))},
        {"temperature": 0.0},
        {"stop_token_ids": (4,)},
    ):
        require_law(replace(HELD, **fields), 10, (7, 8))


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
def test_what_cannot_be_kept_is_refused(param, fields):
    with pytest.raises(NoLaw) as refused:
        require_law(replace(HELD, **fields), 10, (7, 8))
    assert refused.value.param == param


def test_a_model_without_an_end_token_cannot_complete_a_text():
    with pytest.raises(NoLaw, match="ends a text"):
        require_law(HELD, 10, ())
