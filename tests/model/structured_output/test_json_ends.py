"""JSON that a model writes ends: whitespace and digits are bounded, and what programs write can come."""

import json
import re
from typing import Any

import numpy as np
import pytest

from engine.core.types import Grammar, GrammarKind
from engine.structured_output import json_bounds
from engine.structured_output import masks as grammar_masks
from engine.structured_output.grammars import CompiledGrammars
from engine.structured_output.json_bounds import MAX_DIGITS
from engine.structured_output.masks import GrammarMasks
from engine.structured_output.number_lengths import JsonPosition, NumberLimit, TokenDigits
from tests.model.grammars import EOS, V, ids_of, tokenizer
from tests.model.grammars import masks as tiny_masks
from tests.model.json_texts import admits, bytes_vocabulary, matcher_of

NESTED = {
    "list": [1, -2.5e-7, [], {}, [[{"a": None}]]],
    "map": {"x": {"y": {"z": [True, False, "a, b: {c}"]}}},
    "number": 0.30000000000000004,
}
ANY = {"type": "object"}
DIGITS = frozenset(range(ord("0"), ord("9") + 1))


def allowed(grammar: Grammar, text: bytes, path: bytes = b"", masks: GrammarMasks | None = None) -> frozenset[int]:
    """Return the bytes that can come after a text and a path from there; its end is beyond every byte."""
    masks = masks or GrammarMasks(CompiledGrammars(bytes_vocabulary))
    (words_W,) = masks.allowed(grammar, list(text), 0, [tuple(path)])
    return frozenset(np.unpackbits(words_W.view(np.uint8), bitorder="little").nonzero()[0].tolist())


def schema(value: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


@pytest.mark.parametrize("style", [{}, {"separators": (",", ":")}, *({"indent": indent} for indent in (1, 2, 4, 8, "\t"))])
def test_usual_styles_are_allowed(style: dict[str, Any]):
    text = json.dumps(NESTED, **style)
    matcher = matcher_of(ANY)
    assert admits(matcher, text)
    assert admits(matcher, text.replace("\n", "\r\n"))
    deep: Any = 1
    for _ in range(9):
        deep = {"a": deep}
    assert admits(matcher, json.dumps(deep, indent=4))


def check_whitespace() -> None:
    """After an opening brace, a comma, a colon or a value whitespace ends, however a model goes on with it."""
    grammar = schema(ANY)
    for start in (b"{", b'{"a":', b'{"a":1', b'{"a":1,', b'{"a":[', b'{"a":[1', b'{"a":"b"'):
        for space in (b" ", b"\n", b"\t"):
            text = start
            while len(text) < 200:
                spaces = allowed(grammar, text) & frozenset(b" \t\r\n")
                if not spaces:
                    break
                text += space if space[0] in spaces else bytes([min(spaces)])
            assert len(text) <= len(start) + 43, text
            assert allowed(grammar, text)


def test_whitespace_between_parts_is_bounded():
    """After `"age": 30` and a line's end a model wrote spaces until its token limit."""
    check_whitespace()


def test_free_whitespace_is_available_on_request():
    matcher = matcher_of({**ANY, "x-guidance": {"whitespace_pattern": "[ \\t\\n\\r]+"}})
    assert admits(matcher, '{\n\n \t "a"  :' + " " * 200 + "1 }")
    assert not admits(matcher_of(ANY), '{ "a":  1}')


NUMBERS: list[tuple[Grammar, bytes]] = [
    (schema({"type": "integer"}), b""),
    (schema({"type": "number"}), b"-"),
    (schema({"type": "number"}), b"0."),
    (schema({"type": "number"}), b"1e-"),
    (schema({"type": "array", "items": {"type": ["boolean", "number"]}}), b"[true,-"),
    (schema({"type": "integer", "minimum": 5}), b""),
    (schema({"type": "number", "maximum": 5.5}), b"-"),
    (schema({"type": "array", "items": {"type": "number"}}), b"[1,2.5, "),
    (schema({}), b""),
    (schema(ANY), b'{"1234567890123456789012345678901234567890":[true,{"a\\"":'),
    (Grammar(GrammarKind.JSON_OBJECT), b'{"a":'),
]


def check_numbers() -> None:
    for grammar, start in NUMBERS:
        masks = GrammarMasks(CompiledGrammars(bytes_vocabulary))
        digits = b"7" * MAX_DIGITS
        digits = digits[:3] if start.endswith(b"e-") else digits
        assert allowed(grammar, start + digits[1:], masks=masks) >= DIGITS
        assert not allowed(grammar, start + digits, masks=masks) & DIGITS
        assert not allowed(grammar, start, digits, masks) & DIGITS
        assert not allowed(grammar, start + digits[:2], digits[2:], masks) & DIGITS
        assert allowed(grammar, start + digits, masks=masks)


def test_open_numbers_are_bounded():
    """A number without bounds went on until the token limit; so did any number of any JSON."""
    check_numbers()


def test_digits_in_strings_are_not_bounded():
    digits = b"7" * 60
    for start in (b'{"', b'{"a":"', b'{"a":"\\"', b'{"a":["\\\\","'):
        assert allowed(schema(ANY), start + digits) >= DIGITS
        assert allowed(schema(ANY), start, digits) >= DIGITS


def test_a_schemas_own_bounds_widen_numbers():
    """No digit is cut off that a number's bounds, constants or multiples need."""
    grammar = schema({"enum": [10**40, 5]})
    text = b"1"
    while len(text) < 41:
        assert allowed(grammar, text) & DIGITS == frozenset(b"0")
        text += b"0"
    fraction = schema({"const": 2.5e-29})
    assert allowed(fraction, b"2.5e-2") & DIGITS or allowed(fraction, b"0.00000")


def test_only_possible_digits_are_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_masks, "most_digits", lambda _: 3)
    grammar = schema({"enum": [123456, 7]})
    assert allowed(grammar, b"123") == frozenset(b"4")
    assert allowed(grammar, b"12345") == frozenset(b"6")


def test_longer_tokens_of_digits_are_bounded(monkeypatch: pytest.MonkeyPatch):
    """The tokenizer has a token of two digits: with one left it cannot come."""
    monkeypatch.setattr(grammar_masks, "most_digits", lambda _: 4)
    masks, (twelve,) = tiny_masks(), [tokenizer().convert_tokens_to_ids("12")]
    text = ids_of('{"a":121')
    words_2W = masks.allowed(Grammar(GrammarKind.JSON_OBJECT), text, 0, [(), (twelve,)])
    bits = np.unpackbits(words_2W.view(np.uint8), axis=1, bitorder="little")[:, :V]
    assert not bits[0, twelve]
    assert bits[0, ids_of("1")[0]]
    assert not bits[0, EOS]


def test_calls_are_bounded_between_their_marks_alone():
    digits = b"7" * MAX_DIGITS
    call = 'start: /[0-9"]*/ "<" /(.|\n)*/'
    everywhere = Grammar(GrammarKind.LARK, call, ("", ""))
    marked = Grammar(GrammarKind.LARK, call, ("<", ">"))
    nowhere = Grammar(GrammarKind.LARK, call)
    assert [bool(allowed(grammar, digits) & DIGITS) for grammar in (everywhere, marked, nowhere)] == [False, True, True]
    inside, behind = b'9"<' + digits, b"<{1}>" + digits
    assert [bool(allowed(grammar, inside) & DIGITS) for grammar in (marked, nowhere)] == [False, True]
    assert allowed(marked, behind) & DIGITS
    assert allowed(marked, b"<", b"{1}>" + digits) & DIGITS


def test_matcher_rereads_text_after_rollback():
    """Masks depend on the text alone, whatever was queried before."""
    masks, grammar = GrammarMasks(CompiledGrammars(bytes_vocabulary)), schema({"type": "integer"})
    history = list(b"7" * MAX_DIGITS)
    for length in (MAX_DIGITS, 3, MAX_DIGITS - 1, MAX_DIGITS, 1):
        text = history[:length]
        (words_W,) = masks.allowed(grammar, text, 0, [()])
        (fresh_W,) = GrammarMasks(CompiledGrammars(bytes_vocabulary)).allowed(grammar, text, 0, [()])
        assert (words_W == fresh_W).all()


@pytest.mark.parametrize("text", [json.dumps(NESTED), json.dumps(NESTED, indent=2), '{"a\\\\":"\\"12","b":-12.345e+67}'])
def test_positions_are_those_of_a_parser(text: str):
    """At each byte outside strings the count of digits equals the digits before it."""
    outside = re.sub(r'"(?:\\.|[^"\\])*"', lambda found: " " * len(found[0]), text)
    position = JsonPosition()
    for at, char in enumerate(text.encode()):
        position = position.after(bytes([char]))
        run = re.search(r"[0-9]*\Z", outside[: at + 1])
        assert run is not None
        assert position.num_digits == len(run[0])


def whitespace_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_bounds, "WHITESPACE", r"[ \t\r\n]+")


def no_number_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenDigits, "too_long", lambda *_: None)


def paths_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NumberLimit, "_position", lambda self, _: self._positions[()])


@pytest.mark.parametrize(
    ("mutate", "check"),
    [(whitespace_of_the_library, check_whitespace), (no_number_limit, check_numbers), (paths_uncounted, check_numbers)],
)
def test_bounds_detect_mutants(mutate, check, monkeypatch: pytest.MonkeyPatch):
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check()


class FewTokens:
    """A vocabulary whose tokens end strings, begin numbers and have exponents."""

    tokens = (b"1", b"12", b"1e4", b"1e4567", b'","a":12345', b'12345"', b"a,12", b'"', b"e-1234,")
    vocab_size = len(tokens)

    def decode_bytes(self, token_ids: list[int]) -> bytes:
        return b"".join(self.tokens[token_id] for token_id in token_ids)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"[", {b"1e4567", b'12345"', b"e-1234,"}),
        (b"[123", {b"12", b"1e4567", b'12345"', b"e-1234,"}),
        (b"[1e12", {b"12", b"1e4567", b'12345"', b"e-1234,"}),
        (b'["', {b'","a":12345'}),
        (b'["\\', set()),
    ],
)
def test_tokens_with_whole_numbers_are_read(text: bytes, expected: set[bytes]):
    """Numbers after a token's closing quote count. Digits within a string do not."""
    words_W = TokenDigits(FewTokens()).too_long(JsonPosition().after(text), 4)  # type: ignore[arg-type]
    found = set() if words_W is None else np.unpackbits(words_W.view(np.uint8), bitorder="little").nonzero()[0].tolist()
    assert {FewTokens.tokens[token_id] for token_id in found} == expected
