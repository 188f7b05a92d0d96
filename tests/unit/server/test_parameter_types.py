"""Types that a schema may allow, and the JSON of arguments without quotes."""

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.tool_calls.parameter_types import ALL_TYPES, is_plain_string, json_of, types_of

ROOT: dict[str, Any] = {
    "$defs": {
        "a/b": {"type": "integer"},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "null"}]},
        **{f"c{at}": {"$ref": f"#/$defs/c{at + 1}"} for at in range(2000)},
        "odd": {"type": [{}, 5], "anyOf": "x", "enum": "x", "allOf": 3},
    }
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["number", "null"]}, {"number", "integer", "null"}),
        ({"$ref": "#/$defs/a~1b"}, {"integer"}),
        ({"enum": [1, 2.5, None, "x", [], {}, True]}, ALL_TYPES),
        ({"const": 2.0}, {"integer", "number"}),
        ({"anyOf": [{"type": "string"}, {"allOf": [{"type": "array"}]}]}, {"string", "array"}),
        ({"type": "string", "enum": [1]}, set()),
        *((schema, ALL_TYPES) for schema in [
            {}, True, {"$ref": 5}, *({"$ref": f"#/$defs/{name}"} for name in ("loop", "c0", "none", "odd")),
        ]),
    ],
)  # fmt: skip
def test_types_of_a_schema(schema: Any, types: set[str]):
    """References that are long chains, loops, or lead to what is no schema allow every type: they were an error."""
    assert types_of(schema, ROOT) == types


_SCHEMAS = st.recursive(
    st.sampled_from([{"type": name} for name in sorted(ALL_TYPES)]) | st.just({"enum": [1, "x", None]}) | st.just({"const": 1.5}),
    lambda inner: st.builds(
        lambda word, parts: {word: parts}, st.sampled_from(["anyOf", "allOf", "oneOf"]), st.lists(inner, min_size=1, max_size=3)
    ),
    max_leaves=5,
)  # fmt: skip
_VALUES = st.sampled_from([1, 1.5, 2.0, "x", None, True, [1], {"a": 1}])
_NAMES = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object", int: "integer", float: "number"}


@given(_SCHEMAS, _VALUES)
def test_types_of_valid_values_are_allowed(schema: Any, value: Any):
    if jsonschema_rs.is_valid(schema, value):
        assert _NAMES[type(value)] in types_of(schema, schema)


@pytest.mark.parametrize(
    ("text", "types", "written"),
    [
        (" 12 ", {"integer"}, "12"),
        ("12", {"string"}, '"12"'),
        ("12", {"string", "number"}, "12"),
        ("x y", {"integer"}, '"x y"'),
        (" x ", ALL_TYPES, '" x "'),
        ('"x"', ALL_TYPES, '"x"'),
        ("True", {"boolean"}, "true"),
        ("None", {"string", "null"}, "null"),
        ("None", {"string"}, '"None"'),
        ("NaN", {"number"}, '"NaN"'),
        ("1" * 4000, {"integer"}, "1" * 4000),
        ("[" * 5000, {"array"}, f'"{"[" * 5000}"'),
    ],
)
def test_json_of_a_text(text: str, types: set[str], written: str):
    assert json_of(text, frozenset(types)) == written


def test_plain_strings_have_lengths_alone():
    assert is_plain_string({"type": "string", "maxLength": 3, "description": "x"})
    for schema in ({}, True, {"type": ["string"]}, {"type": "string", "pattern": "x"}, {"type": "string", "enum": ["x"]}):
        assert not is_plain_string(schema)
