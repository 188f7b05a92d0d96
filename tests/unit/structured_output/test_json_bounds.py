"""The bounds that schemas are given, at every level."""

import json
from decimal import Decimal
from typing import Any

import pytest

from engine.core.types import Grammar, GrammarKind
from engine.structured_output.json_bounds import MAX_DIGITS, WHITESPACE, bounded_schema, most_digits, with_bounded_schemas


def options_of(schema: Any) -> Any:
    return json.loads(bounded_schema(json.dumps(schema)))["x-guidance"]


def test_whitespace_is_bounded_unless_schema_overrides():
    assert options_of({"type": "object"}) == {"whitespace_pattern": WHITESPACE}
    assert options_of({"x-guidance": {"item_separator": ", "}}) == {"item_separator": ", ", "whitespace_pattern": WHITESPACE}
    assert options_of({"x-guidance": {"whitespace_flexible": True}}) == {"whitespace_flexible": True}
    assert options_of({"x-guidance": {"whitespace_pattern": "[ ]*"}}) == {"whitespace_pattern": "[ ]*"}


def test_invalid_schema_is_left_unchanged():
    for text in ("[", "", '"a"', "[1]", "false", '{"x-guidance": 5}'):
        assert bounded_schema(text) == text
    assert options_of(True) == {"whitespace_pattern": WHITESPACE}


def test_every_lark_grammar_schema_is_bounded():
    plain = 'start: "%json {" a /%json [{}]/ </x> # %json {"a": 1}\na: %json'
    found = with_bounded_schemas(f'{plain} {{"type": "null"}} | %json\n{{"a": "}}"}} // %json {{}}\nb: %json {{')
    assert found.startswith(plain)
    assert found.count("whitespace_pattern") == 2
    assert found.endswith(" // %json {}\nb: %json {")


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer"}, MAX_DIGITS),
        ({"maximum": 10**29}, 30),
        ({"properties": {"a": {"anyOf": [{"exclusiveMinimum": -(10**39)}]}}}, 40),
        ({"maximum": 1e30}, 31),
        ({"multipleOf": 1e-30}, 30),
        ({"enum": [1, 10**49, True, None]}, 50),
        ({"description": "9" * 80, "$id": "123e4567-e89b-12d3-a456-426614174000"}, MAX_DIGITS),
    ],
)
def test_digit_limit_fits_numbers_of_schema(schema: Any, expected: int):
    text = json.dumps(schema)
    assert most_digits(Grammar(GrammarKind.JSON_SCHEMA, text)) == expected
    assert most_digits(Grammar(GrammarKind.LARK, f"start: %json {text}", ("", ""))) == expected
    assert most_digits(Grammar(GrammarKind.JSON_OBJECT)) == MAX_DIGITS


def test_digit_limit_of_invalid_json_is_default():
    """Masks must not fail for a text that the library alone has read."""
    for text in ("[", '{"maximum": ' + "9" * 5000 + "}"):
        assert most_digits(Grammar(GrammarKind.JSON_SCHEMA, text)) == MAX_DIGITS
        assert most_digits(Grammar(GrammarKind.LARK, f"start: %json {text}", ("", ""))) == MAX_DIGITS


def test_every_64_bit_number_fits():
    for number in (2**64 - 1, -(2**63), 0.1 + 0.2, 5e-324, 1.7976931348623157e308, 1.2345678901234567e-5, 123456789012345680.0):
        whole, _, rest = repr(number).lstrip("-").partition(".")
        fraction = rest.partition("e")[0]
        assert max(len(whole), len(fraction)) <= MAX_DIGITS
        assert Decimal(repr(number)) == Decimal(repr(float(number)) if isinstance(number, float) else number)
