"""Grammars of texts with tool calls, in llguidance's dialect of Lark, from a row of server.tool_calls.syntaxes. Knows text only.

Whitespace is as in chat templates (transformers' `tojson`), so that a forced call is written like the calls in a model's prompts.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from server.schemas.exact_json import exactly_dumped
from server.tool_calls.arguments import Schema, XmlArguments
from server.tool_calls.parameter_types import CONSTRAINTS, is_plain_string, json_of, types_of
from server.tool_calls.patterns import NAME, compiled
from server.tool_calls.syntaxes import BARE, BARE_LIST, DOUBLED, FENCED, CallSyntax, Writing

Schemas = Mapping[str, Schema]  # of each function's arguments

_AS_TOJSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MARKER = re.compile("«(.*?)»")
_MAX_DEFINITION_CHARS = 1 << 19  # of one function: each argument with a reference has a copy
_EMPTY = '""'
_ANY_TEXT = "(?s:.*)"
# Words of an object's schema that a grammar of single fields cannot hold it to.
_OF_OBJECTS = CONSTRAINTS | {
    *("dependencies", "dependentRequired", "dependentSchemas", "maxProperties", "minProperties"),
    *("patternProperties", "propertyNames"),
}
_BESIDE_VALUES = CONSTRAINTS - {"enum", "const"} | {"maxLength", "minLength"}
_DEFINITIONS = ("$defs", "definitions", "$schema")
_NUMBERS = {"integer": r"/-?(0|[1-9][0-9]{0,23})/", "number": r"/-?(0|[1-9][0-9]{0,23})(\.[0-9]{1,24})?([eE][-+]?[0-9]{1,3})?/"}


def forced_calls(syntax: CallSyntax, schemas: Schemas, is_one: bool, tokens: Mapping[str, int]) -> str:
    """Return the grammar of a text of calls alone: exactly one call, or at least one.

    `tokens` are the markers that are single tokens. Raises ValueError for a schema that the markup cannot be held to.
    """
    return "\n".join(["start: calls", *_rules(syntax.writing, schemas, is_one, tokens)])


def free_text_with_calls(syntax: CallSyntax, schemas: Schemas, tokens: Mapping[str, int]) -> str:
    """Return the grammar of free text with any calls in it, in the markup or as JSON without markup (the fallbacks).

    The opening of the markup must be a token, so that text cannot spell it, or be at the start of the text. Raises as
    `forced_calls` does.

    A lexeme of llguidance that is lazy, or has a suffix, ends as soon as it matches, before others that could go on. So text ends
    at the name of a fallback's call. The rest of the call, or text, follows. The patterns are the reader's.
    """
    fenced, rest = _around_name(FENCED.head)
    more, _ = _around_name(FENCED.tails[0])
    first = "|".join(_around_name(form.head)[0] for form in (BARE, DOUBLED, BARE_LIST))
    opening = re.escape(syntax.opening)
    has_markup, is_at_start = syntax.forms[0] in syntax.strict_forms, syntax.forms[0].is_at_start
    other = f"/{_ANY_TEXT}/ & ~/{_ANY_TEXT if has_markup and not is_at_start else _rust('~')}{opening}{_ANY_TEXT}/"
    text = "TEXT" if is_at_start else "TEXT (calls any)?"
    rules = [
        f"start: {text} | fenced | first {'| calls' if has_markup and is_at_start else ''}",
        f"any: {text} | fenced",
        f"behind: {text} | fenced | more",
        f"fenced: fenced_text named\nfenced_text[suffix=FENCE]: TEXT\nFENCE: /{fenced}/",
        f"first: first_text named\nfirst_text[lazy]: /{first}/",
        f"more: more_text named\nmore_text[lazy]: /{more}/",
        f"named: any | {' | '.join(f'named_{at} SPACE object_{at} behind' for at in range(len(schemas)))}",
        f"TEXT: {other if has_markup else f'/{_ANY_TEXT}/'}",
        r"SPACE: /[ \t\r\n]{0,64}/",
    ]
    for at, (name, schema) in enumerate(schemas.items()):
        rules.append(f"named_{at}[lazy]: /{name}{rest}/\nobject_{at}: %json {exactly_dumped({**schema, 'type': 'object'})}")
    return "\n".join([*rules, *(_rules(syntax.writing, schemas, False, tokens) if has_markup else [])])


def _around_name(pattern: str) -> tuple[str, str]:
    """Return the parts of a pattern before and behind a call's name, up to its arguments."""
    before, _, behind = pattern.removesuffix(r"~(?=\{)").partition(NAME)
    return _rust(before), _rust(behind)


def _rust(pattern: str) -> str:
    """Return a reader's pattern as a regular expression of Rust, which needs no possessive repetitions."""
    return re.sub(r"([?}])\+", r"\1", pattern).replace("~", r"[ \t\r\n]*")


def _rules(writing: Writing, schemas: Schemas, is_one: bool, tokens: Mapping[str, int]) -> Iterator[str]:
    """Yield the rules of calls."""

    def lark(part: str) -> str:
        """Return a part of a rule. A marker that is one token is named as such; spelled out, it would be several tokens."""
        return _MARKER.sub(lambda found: f"<[{tokens[found[1]]}]>" if found[1] in tokens else _quoted(found[1]), part)

    more = "" if is_one else f" ({lark(writing.separator)} call)*"
    yield f"calls: {lark(writing.begin)} call{more} {lark(writing.end)}"
    yield f"call: {' | '.join(f'call_{at}' for at in range(len(schemas)))}"
    for at, (name, schema) in enumerate(schemas.items()):
        head = lark(writing.head).replace("NAME", name)
        yield f"call_{at}: {head} arguments_{at} {lark(writing.tail)}"
        if writing.values == "object":
            arguments = exactly_dumped({**schema, "type": "object", "x-guidance": _AS_TOJSON})
            yield f"arguments_{at}: %json {arguments}"
        else:
            yield from _field_rules(writing, f"arguments_{at}", schema)
    yield ""


def _field_rules(writing: Writing, rule: str, schema: Schema) -> Iterator[str]:
    """Yield the rules of arguments that are fields, in the order of the schema. Fields that are not required are optional."""
    if unfit := sorted(_OF_OBJECTS & schema.keys()):
        raise ValueError(f"{unfit[0]} of the arguments themselves cannot be enforced in the markup of this model's calls")
    fields = _fields(schema)
    keys, required = list(fields), frozenset(schema.get("required", ()))
    for at, (key, value) in enumerate(fields.items()):
        if not compiled(writing.keys).fullmatch(key):
            raise ValueError(f"the markup of this model's calls cannot write an argument named {key!r}")
        before, after = (part.replace("KEY", _quoted(key)[1:-1]) for part in writing.field)
        yield f"{rule}_{at}: {before} {rule}_{at}_value {after} {rule}_{at}_rest"
        value_rule = f"{rule}_{at}_value"
        yield from _raw_value(value_rule, value, schema) if writing.values == "raw" else [f"{value_rule}: {_json_value(value)}"]
        following = f"{writing.field_separator} {rule}_{at + 1}"
        if at + 1 == len(keys):
            following = _EMPTY
        elif keys[at + 1] not in required:
            following += f" | {rule}_{at + 1}_rest"
        yield f"{rule}_{at}_rest: {following}"
    first_required = next((at for at, key in enumerate(keys) if key in required), None)
    firsts = [f"{rule}_{at}" for at in range(len(keys) if first_required is None else first_required + 1)]
    yield f"{rule}: {' | '.join([*firsts, *([_EMPTY] if first_required is None else [])])}"


def _fields(schema: Schema) -> dict[str, dict[str, Any]]:
    """Return the schema of each argument that has one or is required, with the definitions that it refers to."""
    _require_local(schema)
    properties, required = schema.get("properties", {}), schema.get("required", ())
    others = {key: schema.get("additionalProperties", True) for key in required if key not in properties}
    definitions = {word: schema[word] for word in _DEFINITIONS if word in schema}
    num_chars = len(json.dumps(definitions))
    fields: dict[str, dict[str, Any]] = {}
    for key, value in {**properties, **others}.items():
        if value is False and key in required:
            raise ValueError(f"no value satisfies the schema of the argument {key!r}")
        if value is not False:
            has_references = value is not True and '"$ref"' in json.dumps(value)
            fields[key] = {**({} if value is True else value), **(definitions if has_references else {})}
            num_chars += len(json.dumps(definitions)) if has_references else 0
        if num_chars > _MAX_DEFINITION_CHARS:
            raise ValueError("too many arguments have references for the markup of this model's calls")
    return fields


def _require_local(value: object) -> None:
    """Refuse a reference to a part of the schema that a field's own schema does not have."""
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        _require_local(part)
    reference = value.get("$ref") if isinstance(value, Mapping) else None
    if isinstance(reference, str) and not reference.startswith(("#/$defs/", "#/definitions/")):
        raise ValueError(f"the reference {reference} cannot be followed in the markup of this model's calls")


def _json_value(schema: Schema) -> str:
    return f"%json {exactly_dumped({**schema, 'x-guidance': _AS_TOJSON})}"


def _raw_value(rule: str, schema: dict[str, Any], root: Schema) -> Iterator[str]:
    """Yield the rules of a value and its end: strings are raw text, other values JSON."""
    if is_plain_string(schema):
        most = int(schema["maxLength"]) if "maxLength" in schema else ""
        length = f"{{{int(schema.get('minLength', 0))},{most}}}"
        end = re.escape(XmlArguments.END).replace("/", r"\/")
        yield f"{rule}[suffix={_quoted(XmlArguments.END)}]: {rule.upper()}"
        yield rf"{rule.upper()}: /(?s:.{length})\n/ & ~/{_ANY_TEXT}{end}{_ANY_TEXT}/"
        return
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    is_alone = schema.keys().isdisjoint(_BESIDE_VALUES) and not {"enum", "const"} <= schema.keys()
    if schema.get("type") in tuple(_NUMBERS) and schema.keys() <= {"type", "description", "title", "default", *_DEFINITIONS}:
        written = _NUMBERS[schema["type"]]
    elif values and is_alone and all(_is_read_back(value, root, schema) for value in values):
        written = f"({' | '.join(map(_quoted, values))})"
    else:
        written = _json_value(schema)
    yield f"{rule}: {written} {_quoted(chr(10) + XmlArguments.END)}"


def _is_read_back(value: object, root: Schema, schema: Schema) -> bool:
    """Whether a value is a string that is read back as it is, written without quotes."""
    if not isinstance(value, str) or value != value.strip() or XmlArguments.END in value:
        return False
    types = types_of(schema, root)
    return "string" in types and json_of(value, types) == _quoted(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
