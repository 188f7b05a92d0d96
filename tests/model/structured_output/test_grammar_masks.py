"""Masks along a tree equal those of a new matcher for each node's whole text, in any order of queries."""

import json
import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from engine.core.types import Grammar, GrammarKind
from engine.structured_output import grammars
from engine.structured_output.grammars import BadGrammar, compiled
from engine.structured_output.masks import GrammarMasks, _TextMatcher
from tests.model.grammars import ALL, CHOICE, EOS, LARK, REGEX, V, allowed_after, ids_of, masks, text_of, vocabulary

PROMPT = [7, 7, 7]
EVERY = frozenset(range(V))


def allowed_by(
    cache: GrammarMasks, grammar: Grammar, history: Sequence[int], paths: Sequence[tuple[int, ...]]
) -> list[frozenset[int]]:
    bits = np.unpackbits(cache.allowed(grammar, history, len(PROMPT), paths).view(np.uint8), axis=1, bitorder="little")
    return [frozenset(row[:V].nonzero()[0].tolist()) for row in bits]


def expected(grammar: Grammar, text: Sequence[int]) -> frozenset[int]:
    """Return what may come after a text; after one that cannot come everything may."""
    allowed = allowed_after(grammar, tuple(text))
    return EVERY if allowed is None else allowed


@st.composite
def walks(draw: st.DrawFn, grammar: Grammar, start: Sequence[int], most: int) -> tuple[int, ...]:
    """Tokens that the grammar mostly allows: now and then one that it does not, and what comes after it."""
    walk: list[int] = []
    for _ in range(draw(st.integers(0, most))):
        allowed = sorted((allowed_after(grammar, (*start, *walk)) or {5}) - {EOS})
        if not allowed:
            break
        walk.append(draw(st.sampled_from(allowed) | st.sampled_from([*range(V), *allowed * 9])))
    return tuple(walk)


@st.composite
def questions(draw: st.DrawFn) -> tuple[Grammar, list[tuple[list[int], list[tuple[int, ...]]]]]:
    """A grammar, and sequences of it that grow or restart, each with paths to query."""
    grammar = draw(st.sampled_from(list(ALL.values())))
    steps: list[tuple[list[int], list[tuple[int, ...]]]] = []
    text: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        more = draw(walks(grammar, text, 3))
        text = [*text, *more] if draw(st.integers(0, 3)) else [*more]
        if allowed_after(grammar, tuple(text)) is None:
            text = []
        steps.append((text, draw(st.lists(walks(grammar, text, 4), min_size=1, max_size=5))))
    return grammar, steps


def check(grammar: Grammar, steps: Sequence[tuple[list[int], list[tuple[int, ...]]]]) -> None:
    cache, history = masks(), list(PROMPT)  # one list, as a sequence has it: what was kept is found again by it
    for text, paths in steps:
        history[len(PROMPT) :] = text
        assert allowed_by(cache, grammar, history, paths) == [expected(grammar, [*text, *path]) for path in paths]


@settings(max_examples=25)
@given(questions())
def test_masks_are_those_of_a_new_matcher(question):
    check(*question)


TREE = [(), *[tuple(ids_of(path)) for path in ("a", "ab", "aba", "ac", "b", "bc", "bc,", "bc,1", "c", "l", "ab", "b{", "b{a")]]


def never_back(self, num_kept):
    del self._path[num_kept:]


def back_to_the_root_only(self, num_kept):
    self._matcher.rollback(len(self._path))
    del self._path[num_kept:]


def kept_masks(self, text):
    kept = self._masks
    _MOVE_TO(self, text)
    self._masks = kept


_MOVE_TO = _TextMatcher.move_to


@pytest.mark.parametrize(
    ("name", "mutant"),
    [("_go_back", never_back), ("_go_back", back_to_the_root_only), ("move_to", kept_masks)],
    ids=["never back", "back to the root", "masks outlive their text"],
)
def test_masks_detect_mutants(name, mutant, monkeypatch):
    steps = [(ids_of("ab"), TREE), (ids_of("abb"), TREE), (ids_of("cc"), TREE)]
    check(REGEX, steps)
    monkeypatch.setattr(_TextMatcher, name, mutant)
    with pytest.raises(AssertionError):
        check(REGEX, steps)


def test_sequences_of_one_grammar_are_independent():
    cache = masks(max_texts=3)
    histories = [[*PROMPT, *ids_of(text)] for text in ("ab", "abc", "cab", "bb", "aa,1")]
    for length in (4, 5, 6, 7):
        for history in histories:
            (found,) = allowed_by(cache, REGEX, history[:length], [()])
            assert found == expected(REGEX, history[:length][len(PROMPT) :])


@pytest.mark.parametrize("grammar", [REGEX, CHOICE], ids=["regex", "choice"])
def test_allowed_tokens_can_still_match(grammar):
    """Every token that can come begins a text of the language, written out here; the end comes after whole ones alone."""
    choices = ["abc", "ab", "abab", "true", "12"]
    whole = re.compile(REGEX.text if grammar is REGEX else "|".join(choices))
    begun = re.compile(r"[abc]{0,5}|[abc]{2,5}(,[abc12]{1,3})*(,[abc12]{0,3})?")
    cache = masks()
    front: list[tuple[int, ...]] = [()]
    for _ in range(4):
        found = dict(zip(front, allowed_by(cache, grammar, PROMPT, front), strict=True))
        for path, allowed in found.items():
            assert allowed, "some token can come"
            assert (EOS in allowed) == bool(whole.fullmatch(text_of(path)))
            for text in (text_of([*path, token]) for token in allowed - {EOS}):
                assert begun.fullmatch(text) if grammar is REGEX else any(choice.startswith(text) for choice in choices)
        front = [(*path, token) for path, allowed in found.items() for token in sorted(allowed - {EOS})][:40]


def test_unknown_rows_and_special_tokens_are_masked():
    anything = Grammar(GrammarKind.REGEX, "(.|\n)*")
    (allowed,) = allowed_by(masks(), anything, PROMPT, [()])
    assert allowed == {EOS, *range(3, 3 + 32 + 10 + 1)}  # characters, merges and the line break


def test_abandoned_matcher_allows_nothing_and_isolates_others(monkeypatch):
    """llguidance answers with the end token where a limit is hit: a text would be cut short, and look whole."""
    cache, history = masks(), list(PROMPT)
    long = Grammar(GrammarKind.REGEX, "(a|b)*a(a|b){9}c")
    monkeypatch.setattr(grammars, "_LIMITS", LLParserLimits(max_lexer_states=40, verbose_errors=False))
    text = ids_of("abaababbabaaabab")
    paths = [tuple(text[:length]) for length in range(len(text))]
    found = allowed_by(cache, long, history, paths)
    assert found[0]
    assert not found[-1]
    assert allowed_by(cache, REGEX, history, [()]) == [expected(REGEX, [])]
    assert allowed_by(cache, long, history, [(), paths[-1]]) == [found[0], frozenset()]


@pytest.mark.parametrize("text", ["", "a", 'say "a\\b"\n', "\x00\x7f", "日本 😀", "[a]*", "{{x}}", " - "])
def test_choice_is_the_exact_string(text):
    matcher = compiled(vocabulary(), Grammar(GrammarKind.CHOICE, json.dumps([text, "zz"])))
    assert not matcher.is_error()
    assert matcher.is_accepting() == (text == "")


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (GrammarKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        (GrammarKind.JSON_SCHEMA, '{"x-guidance": {"lenient": true}, "not": {}}', "not"),
        (GrammarKind.JSON_SCHEMA, '{"type": "string", "format": "shoe size"}', "shoe size"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "http://127.0.0.1/schema"}', "http://127.0.0.1/schema"),
        (GrammarKind.JSON_SCHEMA, "[", "Expecting value"),
        (GrammarKind.JSON_SCHEMA, '{"type": "integer", "minimum": 4, "maximum": 3}', "minimum"),
        (GrammarKind.REGEX, "(", "unclosed group"),
        (GrammarKind.REGEX, "(?=a)b", "look-around"),
        (GrammarKind.REGEX, "\ud800", "surrogates"),
        (GrammarKind.LARK, "start: nothing", "nothing"),
        (GrammarKind.LARK, "start[temperature=0.1]: /a*/", "temperature"),
        (GrammarKind.LARK, 'start: x\nx[capture="]", temperature=0.1]: /a*/', "temperature"),
        (GrammarKind.LARK, "start: x\nx[suffix=/]/, temperature=0.1]: /a*/", "temperature"),
        (GrammarKind.LARK, "[" * 60_000, "Expected name"),  # read in one pass: it was minutes
        (GrammarKind.LARK, 'a ::= "b"', "root"),
        (GrammarKind.LARK, "root ::= b", "'b' not found"),
        (GrammarKind.LARK, "", "root"),
    ],
)
def test_unsupported_schema_is_refused_by_name(kind, text, reason):
    with pytest.raises(BadGrammar, match=re.escape(reason)):
        compiled(vocabulary(), Grammar(kind, text))


def test_reasons_are_short():
    with pytest.raises(BadGrammar) as refused:
        compiled(vocabulary(), Grammar(GrammarKind.REGEX, "(" * 5000))
    assert len(str(refused.value)) < 600


def test_a_lark_grammar_may_speak_of_temperature():
    for text in ('start: "[temperature=" /[0-9]/ "]"', "start: /[temperature]+/  # [temperature]", LARK.text):
        compiled(vocabulary(), Grammar(GrammarKind.LARK, text))
