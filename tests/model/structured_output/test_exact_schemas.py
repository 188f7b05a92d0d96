"""Schemas that the grammar library alone would not keep: exact numbers, keys as a parser reads them, ECMAScript's patterns."""

import json
import random
import re
from decimal import Decimal

import jsonschema_rs
import numpy as np
import pytest
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from engine.core.types import Grammar, GrammarKind
from engine.structured_output import grammars
from engine.structured_output.exact_schemas import exact_lark, exact_schema
from engine.structured_output.grammars import BadGrammar, compiled
from tests.json_grammars import accepts, byte_vocabulary, matcher_of

REFUSED = [
    ('{"properties":{"id":{"const":12345678901234567890}}}', "#/properties/id/const: 12345678901234567890"),
    ('{"enum":[1,[{"a":9007199254740993}]]}', "#/enum/1/0/a: 9007199254740993"),
    ('{"const":{"a":0.1000000000000000055}}', "#/const/a: 0.1000000000000000055"),
    ('{"const":1e400}', "#/const: 1E+400"),
    ('{"const":1e999999999}', "#/const: 1E+999999999"),
    ('{"items":{"const":-2.5e-99999999999999999999}}', "#/items/const: -2.5E-999999999"),
    ('{"type":"integer","maximum":2.5e99999999999999999999}', "#/maximum: 2.5E+999999999"),
    ('{"type":"integer","minimum":1e999999999}', "#/minimum: 1E+999999999"),
    ('{"minimum":1e-400}', "#/minimum"),
    ('{"type":"integer","enum":[1e30]}', "#/enum/0: 1E+30"),
    ('{"type":"integer","minimum":9007199254740993}', "#/minimum: 9007199254740993"),
    ('{"type":"number","exclusiveMaximum":9007199254740993}', "#/exclusiveMaximum: 9007199254740993"),
    ('{"type":"integer","maximum":18446744073709551615}', "#/maximum: 18446744073709551615"),
    ('{"exclusiveMinimum":9007199254740992}', "#/exclusiveMinimum: 9007199254740992"),
    (
        '{"$schema":"http://json-schema.org/draft-04/schema#","maximum":9007199254740992,"exclusiveMaximum":true}',
        "#/maximum: 9007199254740992",
    ),
    ('{"type":"number","minimum":-4611686018427387904,"maximum":5}', "#/minimum: -4611686018427387904"),
    ('{"anyOf":[{"maximum":4611686018427387904},{"type":"null"}]}', "#/anyOf/0/maximum: 4611686018427387904"),
    ('{"type":"integer","minimum":1000000000000000000}', "#/minimum: 1000000000000000000"),
    ('{"items":{"type":"number","exclusiveMaximum":-1e18}}', "#/items/exclusiveMaximum: -1E+18"),
    ('{"type":"number","exclusiveMinimum":1,"maximum":1.5}', "#/exclusiveMinimum: 1"),
    ('{"allOf":[{"exclusiveMaximum":-3},{"minimum":-3.25,"type":"number"}]}', "#/allOf/0/exclusiveMaximum: -3"),
    ('{"$ref":"#/x/const","x":{"const":{"type":"string","format":"date"}}}', "#/x/const"),
    (
        '{"items":{"$ref":"#/$defs/a/enum/0"},"$defs":{"a":{"enum":[{"required":["b"],"properties":{"b":{}}}]}}}',
        "#/$defs/a/enum/0",
    ),
    ('{"multipleOf":0.07}', "#/multipleOf: 0.07"),
    (
        r'{"type":"object","properties":{"a":{"type":"string","pattern":"^\\x01$"}},"required":["a"],"additionalProperties":{"type":"null"}}',
        "required property 'a' is unsatisfiable",
    ),
    ('{"multipleOf":4294967296}', "#/multipleOf: 4294967296"),
    ('{"type":"integer","allOf":[{"multipleOf":100000},{"multipleOf":99999}]}', "#/allOf/1/multipleOf"),
    ('{"$ref":"#/x~1y/z","x/y":{"z":{"const":9007199254740993}}}', "#/x~1y/z/const: 9007199254740993"),
    ('{"$ref":"#a","$defs":{"b":{"$anchor":"a","const":9007199254740993}}}', "#/$defs/b/const: 9007199254740993"),
    ('{"type":"object","additionalProperties":{"type":"integer"},"minProperties":2}', "#/minProperties: 2"),
    ('{"items":{"type":"object","patternProperties":{"^a":{}},"minProperties":3,"required":["b"]}}', "#/items/minProperties: 3"),
    (
        '{"properties":{"a":{"const":"\\u0001"}},"additionalProperties":{"type":"integer"}}',
        "#/properties/a/const: control characters",
    ),
]


@pytest.mark.parametrize(("text", "reason"), REFUSED)
def test_inexact_schema_is_refused_with_place(text, reason):
    """Numbers that 64-bit floats round were rounded in the text, and keys that came twice counted as two.

    A schema inside a const, reached by a reference, kept the library's own formats, numbers and keys.
    """
    with pytest.raises(BadGrammar, match=re.escape(reason)):
        matcher_of(text)


# A schema, texts of it, and texts that are not of it once a parser has read them.
KEPT: list[tuple[str, list[str], list[str]]] = [
    ('{"const":9007199254740992}', ["9007199254740992"], ["9007199254740993", "9007199254740991"]),
    ('{"const":0.1}', ["0.1"], ["0.10000000000000001"]),
    ('{"const":1e30}', ["1" + "0" * 30], []),
    (
        '{"type":"integer","exclusiveMinimum":9007199254740991}',
        ["9007199254740992", "9007199254740993"],
        ["9007199254740991"],
    ),
    ('{"type":"integer","maximum":9223372036854775807}', ["9223372036854775807"], ["9223372036854775808"]),
    ('{"type":"integer","exclusiveMaximum":9223372036854775808}', ["9223372036854775807"], ["9223372036854775808"]),
    ('{"type":"number","exclusiveMinimum":0,"maximum":0.5}', ["0.5", "0.01"], ["0", "0.0", "-0", "0.51"]),
    ('{"type":"number","exclusiveMinimum":0,"minimum":0.25,"exclusiveMaximum":0.5}', ["0.25", "0.4"], ["0", "0.1", "0.5"]),
    ('{"minimum":-0.25,"exclusiveMaximum":-0.0}', ["-0.25", "-0.001"], ["0", "-0", "-0.0", "-0.3"]),
    (
        '{"type":"number","allOf":[{"exclusiveMinimum":0},{"$ref":"#/$defs/a"}],"$defs":{"a":{"maximum":0.5}}}',
        ["0.5", "0.01"],
        ["0", "1"],
    ),
    (
        '{"$schema":"http://json-schema.org/draft-04/schema#","type":"number","minimum":0,"exclusiveMinimum":true,"maximum":0.5}',
        ["0.5", "0.01"],
        ["0", "1"],
    ),
    ('{"$ref":"#/$defs/const","$defs":{"const":{"type":"string","format":"date"}}}', ['"2024-02-29"'], ['"2023-02-29"']),
    ('{"type":"number","exclusiveMinimum":0,"maximum":1}', ["1", "0.01"], ["0", "0.0"]),
    ('{"type":"number","minimum":1000000000000000000,"maximum":2000000000000000000}', ["1" + "0" * 18], ["9" * 18]),
    ('{"type":"integer","minimum":0.1000000000000000055,"exclusiveMaximum":3.0}', ["1", "2"], ["0", "3"]),
    ('{"type":["integer","null"],"maximum":-0.5,"exclusiveMinimum":-3}', ["-1", "-2", "null"], ["0", "-3"]),
    (
        '{"$schema":"http://json-schema.org/draft-04/schema#","type":"integer","minimum":9007199254740991,"exclusiveMinimum":true}',
        ["9007199254740992", "9007199254740993"],
        ["9007199254740991"],
    ),
    ('{"minLength":2.0,"type":"string"}', ['"ab"'], ['"a"']),
    (
        '{"type":"object","properties":{"price":{"type":"number","minimum":0}},"required":["price"]}',
        ['{"price":1}', '{"price":1,"x":"free"}', r'{"price":1,"\u0001\n":0}', '{"price":1,"x":1,"x":2}'],
        [r'{"price":1,"\u0070rice":"free"}', r'{"price":1,"pric\u0065":-1}', '{"price":1,"price":-1}', '{"x":1}'],
    ),
    (
        '{"$ref":"#/components/schemas/x","components":{"schemas":{"x":{"properties":{"a":{"type":"integer"}}}}}}',
        ['{"a":1,"b":2}', "1"],
        [r'{"\u0061":"x"}'],
    ),
    (
        '{"type":"object","properties":{"a\\n":{"type":"integer"}}}',
        [r'{"a\n":1,"b":"x"}'],
        [r'{"a\n":1,"a\u000a":"x"}', r'{"a\n":1,"a\u000A":"x"}', r'{"\u0061\n":"x"}'],
    ),
    (
        '{"type":"object","properties":{"a":{"type":"integer"}},"additionalProperties":{"type":"boolean"}}',
        ['{"a":1,"b":true}', r'{"a":1,"\n\"\\":true}'],
        [r'{"a":1,"\u0061":true}', '{"b":1}'],
    ),
    (
        '{"type":"object","patternProperties":{"^f":{"type":"integer"}}}',
        ['{"foo":1,"g":"x"}', '{"foo":1,"foo":2}'],
        [r'{"\u0066oo":"x"}', '{"foo":"x"}'],
    ),
    (
        '{"type":"object","patternProperties":{"^f":{"type":"integer"}},"properties":{"fa":{"const":5}},'
        '"additionalProperties":false}',
        ['{"fa":5,"fb":1}'],
        ['{"fa":5,"fa":1}', r'{"f\u0061":1}'],
    ),
    (
        '{"q":true,"$ref":"#/$defs/b","$defs":{"b":{"$id":"http://x/b","$ref":"#/q","q":{"properties":{"a":{"type":"integer"}}}}}}',
        ['{"a":1,"b":2}'],
        [r'{"\u0061":"x"}'],
    ),
    (
        '{"$ref":"c#/q","$defs":{"b":{"$id":"http://x/b"},"c":{"$id":"http://x/c","q":{"properties":{"a":{"type":"integer"}}}}},'
        '"$id":"http://x/a"}',
        ['{"a":1,"b":2}'],
        [r'{"\u0061":"x"}'],
    ),
    (
        '{"properties":{"then":{"type":"null"},"uniqueItems":false,"minProperties":true,"const":{"required":["a"]}}}',
        ['{"then":null,"minProperties":2,"const":{"a":1}}'],
        ['{"then":1}', '{"uniqueItems":1}', '{"const":{}}', r'{"const":{"a":1,"\u0061":1},"\u0074hen":1}'],
    ),
    (
        '{"properties":{"a":{"type":"integer"}},"additionalProperties":true,"allOf":[{"properties":{"b":{"type":"integer"}}}]}',
        ['{"a":1,"b":2,"c":3}'],
        [r'{"\u0062":"x"}', '{"b":"x"}'],
    ),
    ('{"type":"object","required":["a"]}', ['{"a":1,"b":2}'], ["{}", r'{"\u0061":1}']),
    (
        '{"allOf":[{"properties":{"a":{"type":"integer"}}},{"required":["b"]},{"additionalProperties":{"type":["integer","null"]}}]}',
        ['{"a":1,"b":null,"c":2}', '"x"'],
        ['{"a":null,"b":1}', '{"b":1,"c":true}', r'{"b":1,"\u0061":null}', r'{"a":1,"\u0062":1}'],
    ),
    (
        '{"type":"object","properties":{"a":{},"b":{},"c":{}},"additionalProperties":false,"minProperties":2}',
        ['{"a":1,"b":1}', '{"b":1,"c":1}', '{"a":1,"b":1,"c":1}'],
        ["{}", '{"b":1}', '{"a":1,"a":1}'],
    ),
    (
        '{"type":"object","properties":{"a":{},"b":{},"c":{}},"additionalProperties":false,"maxProperties":2,"minProperties":1}',
        ['{"a":1,"b":1}', '{"b":1,"c":1}', '{"c":1}'],
        ["{}", '{"a":1,"b":1,"c":1}'],
    ),
    (
        '{"type":"object","required":["a"],"minProperties":2}',
        ['{"a":1,"b":1}'],
        ['{"a":1}', '{"a":1,"a":2}', r'{"a":1,"\u0061":2}'],
    ),
    ('{"type":"object","maxProperties":1,"additionalProperties":{}}', ["{}", '{"a":1}'], ['{"a":1,"b":1}']),
    ('{"type":"array","uniqueItems":false,"maxContains":1,"then":false}', ["[1,1]"], ["{}"]),
    (r'{"type":"string","pattern":"^\\S\\s$"}', ['"a\ufeff"'], ['"\ufeff "', '"a\x85"']),
    (r'{"type":"string","pattern":"^[\\s-]$"}', ['"-"', '"\ufeff"'], ['"a"']),
    (r'{"type":"string","pattern":"^.[[&&a]$"}', ['"x["', '"x&"', '"xa"'], [r'"\ra"', '"\u2028a"']),
    (r'{"type":"string","pattern":"^\\cA[^]$"}', [r'"\u0001\n"'], []),
]


@pytest.mark.parametrize(("text", "good", "bad"), KEPT)
def test_completions_match_as_parsers_read_them(text, good, bad):
    """A key under another spelling, or a second time, escaped its schema; bounds beside floats moved by one.

    An exclusive 0 was allowed if the other bound was less than 1 away.
    """
    matcher = matcher_of(text)
    assert [one for one in good if not accepts(matcher, one)] == []
    assert [one for one in bad if accepts(matcher, one)] == []


def test_the_library_alone_keeps_less(monkeypatch):
    """Without the rewriting most of these schemas would let a bad text come, or refuse a good one."""
    monkeypatch.setattr(grammars, "exact_schema", str)
    unkept = 0
    for text, good, bad in KEPT:
        try:
            matcher = matcher_of(text)
        except BadGrammar:
            unkept += 1
            continue
        unkept += any(accepts(matcher, one) for one in bad) or not all(accepts(matcher, one) for one in good)
    assert unkept >= 15


HOSTILE = [r'"\u0061":0', r',"\u0061":0', r'"\u0066o":0', r"\u0062", '"a":1', '"a":null', "9223372036854775807", "}", '"']


def drawn(schema: str, seed: int) -> str | None:
    """Return a text drawn under the masks, with a liking for what could betray a schema; None for one that grows too long."""
    matcher, chance, tokens = matcher_of(schema), random.Random(seed), list[int]()
    vocabulary = byte_vocabulary()
    words = allocate_token_bitmask(1, vocabulary.vocab_size)
    while len(tokens) < 200:
        if matcher.is_accepting() and (matcher.is_stopped() or chance.random() < 0.3):
            return vocabulary.decode_str(tokens)
        fill_next_token_bitmask(matcher, words)
        allowed = np.unpackbits(words[0].view(np.uint8), bitorder="little").nonzero()[0].tolist()
        allowed = [token for token in allowed if token not in vocabulary.eos_tokens and vocabulary.decode_str([token]).strip()]
        added = vocabulary.tokenize_str(chance.choice(HOSTILE))
        if matcher.deep_copy().try_consume_tokens(added) < len(added):
            added = [chance.choice(allowed)]
        assert matcher.consume_tokens(added)
        tokens += added
    return None


def num_astray(text: str, num_texts: int) -> int:
    """Return how many drawn texts are not of the schema for an independent validator that reads the parsed text."""
    validator = jsonschema_rs.validator_for(json.loads(text))
    texts = [found for seed in range(num_texts) if (found := drawn(text, seed)) is not None]
    assert texts
    return sum(not validator.is_valid(json.loads(found)) for found in texts)


@pytest.mark.parametrize("text", [text for text, _, bad in KEPT if bad])
def test_drawn_sequences_match_their_schema(text):
    assert num_astray(text, 12) == 0


def test_drawn_sequences_deviate_without_rewriting(monkeypatch):
    monkeypatch.setattr(grammars, "exact_schema", str)
    assert num_astray('{"type":"object","properties":{"a":{"const":1}},"required":["a"]}', 40) > 0
    assert num_astray('{"type":"object","patternProperties":{"^f":{"const":1}}}', 40) > 0


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_random_bounds_are_kept_beside_floats(kind):
    """Bounds near the ends of what floats represent are exact or refused, and so are ordinary decimals."""
    chance = random.Random(3)
    num_kept = 0
    for _ in range(150):
        middle = Decimal(chance.choice([0, 1, 99, 2**31, 2**53, -(2**53), 2**60, 2**63])) + chance.randint(-2, 2)
        middle += chance.choice([Decimal(0), Decimal("0.5"), Decimal("-0.01")])
        key = chance.choice(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "const"])
        try:
            matcher = matcher_of(f'{{"type":"{kind}","{key}":{middle}}}')
        except BadGrammar:
            continue
        num_kept += 1
        for step in (*map(Decimal, range(-2, 3)), Decimal("0.5"), Decimal("-0.001")):
            number = middle + step
            if number == int(number):
                number = Decimal(int(number))
            elif kind == "integer":
                continue
            sign = (number > middle) - (number < middle)
            is_in = {"minimum": sign >= 0, "maximum": sign <= 0, "const": sign == 0}.get(key, sign == (1 if "Min" in key else -1))
            assert accepts(matcher, str(number)) == is_in, (key, middle, number)
    assert num_kept > 50


def test_schemas_inside_a_lark_grammar_are_exact():
    """The schemas of forced tool calls are inside one; %json in strings, patterns and comments is text."""
    lark = 'start: "%json {" /%json [^"]+/ x // %json {\nx: %json {"const": 9007199254740993} "a"'
    with pytest.raises(BadGrammar, match="#/const: 9007199254740993"):
        compiled(byte_vocabulary(), Grammar(GrammarKind.LARK, lark))
    kept = lark.replace("9007199254740993", "2")
    assert exact_lark(kept) == kept.replace('{"const": 2} ', '{"const":2} ')
    lenient = 'start: %json {"x-guidance": {"lenient": true}, "uniqueItems": true}'
    with pytest.raises(BadGrammar, match="uniqueItems"):
        compiled(byte_vocabulary(), Grammar(GrammarKind.LARK, lenient))


def test_closed_schemas_are_left_as_they_are():
    schema = {
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}, "b": {"enum": ["x", 1.5, None]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    assert json.loads(exact_schema(json.dumps(schema))) == schema
    assert exact_schema(exact_schema('{"required":["a"]}')) == exact_schema('{"required":["a"]}')
