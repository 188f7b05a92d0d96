"""Types of arguments that a markup writes without quotes: which types a schema allows, and the JSON of such a text."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

ALL_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
# A string under one of these may have few spellings, so it can be written as JSON too. Lengths are counted in the raw text.
CONSTRAINTS = frozenset(
    ("$ref", "$dynamicRef", "allOf", "anyOf", "const", "else", "enum", "format", "if", "not", "oneOf", "pattern", "then")
)
_OF_PYTHON = {"None": "null", "True": "true", "False": "false"}  # as templates write them


def is_plain_string(schema: object) -> bool:
    """Whether the schema allows strings alone, and all strings of some lengths."""
    return isinstance(schema, Mapping) and schema.get("type") == "string" and not CONSTRAINTS & schema.keys()


def json_of(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a text: the value that it spells, if that is of one of the types; else the text as a string."""
    spelled = text.strip()
    spelled = _OF_PYTHON.get(spelled, spelled)
    try:
        value = from_json(spelled, allow_inf_nan=False)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    is_text = "string" in types and not types & _types_of_value(value)
    return json.dumps(text, ensure_ascii=False) if is_text else spelled


def types_of(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a part of the schema `root` may allow. A schema that is not understood allows every type."""
    try:
        return _Types(root).of(schema)
    except RecursionError:  # references to references
        return ALL_TYPES


class _Types:
    """Owns the types behind each reference, so that each is followed once. The target of a reference may be no schema."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._of_references: dict[str, frozenset[str]] = {}

    def of(self, schema: object) -> frozenset[str]:
        if not isinstance(schema, Mapping):
            return ALL_TYPES
        found = ALL_TYPES
        if names := {name for name in _list(schema.get("type")) if isinstance(name, str)}:
            found &= frozenset(names | ({"integer"} if "number" in names else set()))
        if "$ref" in schema:
            found &= self._of_reference(schema["$ref"])
        for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
            if isinstance(values, list):
                found &= frozenset[str]().union(*map(_types_of_value, values))
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list):
                found &= frozenset[str]().union(*map(self.of, schema[word]))
        for part in _list(schema.get("allOf", [])):
            found &= self.of(part)
        return found

    def _of_reference(self, reference: object) -> frozenset[str]:
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return ALL_TYPES
        if reference not in self._of_references:
            self._of_references[reference] = ALL_TYPES  # for a schema that refers to itself
            target: object = self._root
            for step in reference[2:].split("/"):
                target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
            self._of_references[reference] = self.of(target)
        return self._of_references[reference]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _types_of_value(value: object) -> frozenset[str]:
    """Return the names of a JSON value's type: a whole number has two."""
    match value:
        case None:
            return frozenset(("null",))
        case bool():
            return frozenset(("boolean",))
        case int():
            return frozenset(("integer", "number"))
        case float():
            return frozenset(("integer", "number") if value.is_integer() else ("number",))
        case str():
            return frozenset(("string",))
    return frozenset(("array",) if isinstance(value, list) else ("object",))
