"""Rewrites JSON schemas that llguidance would not enforce exactly, or refuses them with the place in the schema.

The library stores numbers as 64-bit floats, compares the keys of an object by their spelling and allows duplicate keys. A
parser decodes escapes, and the last of equal keys wins.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, InvalidOperation
from itertools import combinations, pairwise
from math import comb, gcd, isfinite
from typing import Any, NoReturn, TypeGuard
from urllib.parse import unquote

from engine.structured_output.ecma_patterns import rust_pattern
from engine.structured_output.lark_schemas import with_schemas_replaced
from engine.structured_output.string_formats import NAMED_SCHEMAS

_Schema = dict[str, Any]
_Number = int | Decimal

_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_HOLD_ONE = (
    *("additionalProperties", "additionalItems", "items", "not", "if", "then", "else", "contains", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_HOLD_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_BASES = ("$id", "id")  # the base of pointers inside
_COMBINE = ("allOf", "anyOf", "oneOf", "$ref")

_MAX_SETS = 64  # sets of properties, if a schema limits their number
_MAX_EXPONENT = 400  # of rounded decimals; floats end at 308
_INT64 = 1 << 63  # the end of the library's integer ranges
_UNIT = 1 << 53  # from here on a float plus one is rounded
_OPEN_END = 10**18  # from here on the library has no range without a second bound
_BESIDE_ZERO = 1e-22  # of the powers of ten that the library reads exactly, the closest to 0
_UINT32 = 1 << 32  # the limit of the library's fractions
_ESCAPES = 'nrbtf\\"u'  # the library's default
_NEEDS_ESCAPE_U = "\x00-\x07\x0b\x0e-\x1f\x7f"
_HAS_TWO_SPELLINGS = re.compile("[\x00-\x1f\x7f]")
_EXPONENT = re.compile("([eE][+-]?)[0-9]+$")


def exact_schema(text: str) -> str:
    """Return a schema that the library enforces exactly; raise ValueError with the place of a part that it cannot enforce."""
    return _dumped(_exact(_decoder().decode(text)))


def exact_lark(text: str) -> str:
    """Return a Lark grammar with exact schemas; raise ValueError with the place of a part that the library cannot enforce."""
    return with_schemas_replaced(text, lambda schema: _dumped(_exact(schema)), _decoder())


def _decoder() -> json.JSONDecoder:
    return json.JSONDecoder(parse_float=_decimal, parse_constant=_no_constant)


def _dumped(schema: Any) -> str:
    """Return the text; remaining decimals belong to annotations."""
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"), default=float)


def _decimal(text: str) -> Decimal:
    """Return the number. An exponent beyond the range of decimals is replaced by another one beyond the range of floats."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return Decimal(_EXPONENT.sub(r"\g<1>999999999", text))


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _exact(root: Any) -> Any:
    if not isinstance(root, dict):
        return root
    document = _Document.read(root)
    is_integer_named = any("integer" in _types(schema) for _, schema in document.schemas)
    for place, schema in document.schemas:
        _drop_neutral(schema, document.references)
        _keep_numbers(place, schema, is_integer_named)
        _keep_counts(place, schema)
        _translate_patterns(schema)
    _require_common_multiples(document)
    _keep_open_ends(document)
    _keep_keys(root, document)
    return root


@dataclass(slots=True)
class _Document:
    """The schemas of a document, each with its place: the path of keywords, or a reference to it."""

    schemas: list[tuple[str, _Schema]] = field(default_factory=list)
    references: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, root: _Schema) -> "_Document":
        """Read a document. A pointer starts at the enclosing schema that has an identifier, or at another that has one."""
        document, seen, resources = cls(), set[int](), [root]
        pointers: list[tuple[str, _Schema]] = []
        waiting: list[tuple[str, Any, _Schema]] = [("#", root, root)]
        while waiting:
            place, schema, resource = waiting.pop()
            if isinstance(schema, dict) and id(schema) not in seen:
                seen.add(id(schema))
                document.schemas.append((place, schema))
                if any(isinstance(schema.get(key), str) for key in _BASES):
                    resource = schema
                    resources.append(schema)
                waiting += [(*held, resource) for held in _subschemas(place, schema)][::-1]
                pointers += [(schema[key], resource) for key in _REFERENCES if isinstance(schema.get(key), str)]
            if not waiting:
                for reference, around in pointers:
                    _require_schema_place(reference)
                    for start in [around] if reference.startswith("#") else resources:
                        target = _pointed_at(start, reference.partition("#")[2])
                        waiting += [] if id(target) in seen or not isinstance(target, dict) else [(reference, target, start)]
        document.references = [reference for reference, _ in pointers]
        return document


def _subschemas(place: str, schema: _Schema) -> Iterator[tuple[str, Any]]:
    for key, value in schema.items():
        if key in _HOLD_ONE and isinstance(value, dict):
            yield f"{place}/{key}", value
        elif key in _HOLD_LISTS and isinstance(value, list):
            yield from ((f"{place}/{key}/{at}", item) for at, item in enumerate(value))
        elif key in NAMED_SCHEMAS and isinstance(value, dict):
            yield from ((f"{place}/{key}/{name}", item) for name, item in value.items())


def _require_schema_place(reference: str) -> None:
    """Raise ValueError for a reference into an instance, which is not rewritten as a schema."""
    tokens = unquote(reference.partition("#")[2]).split("/")
    if any(token in ("const", "enum") and before not in NAMED_SCHEMAS for before, token in pairwise(tokens)):
        raise ValueError(f"{reference}: a reference into const or enum is not supported")


def _pointed_at(start: _Schema, pointer: str) -> Any:
    """Return the target of a JSON pointer, None if there is none."""
    value: Any = start
    for token in unquote(pointer).split("/")[1:]:
        key = token.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            value = value.get(key) if isinstance(value, dict) else None
    return value


def _types(schema: _Schema) -> Sequence[Any]:
    types = schema.get("type", ())
    return types if isinstance(types, list) else (types,)


def _drop_neutral(schema: _Schema, references: Sequence[str]) -> None:
    """Drop keywords that have no effect and that the library does not support, unless a reference leads through them."""
    neutral = [key for key in ("propertyNames", "unevaluatedItems", "unevaluatedProperties") if schema.get(key) is True]
    neutral += ["uniqueItems"] if schema.get("uniqueItems") is False else []
    neutral += [] if "contains" in schema else ["minContains", "maxContains"]
    neutral += ["then", "else"] if "if" not in schema else [] if {"then", "else"} & {*schema} else ["if"]
    for key in neutral:
        if key in schema and not any(f"/{key}" in reference for reference in references):
            del schema[key]


def _translate_patterns(schema: _Schema) -> None:
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = rust_pattern(schema["pattern"])
    if patterned := _map(schema, "patternProperties"):
        schema["patternProperties"] = {rust_pattern(pattern): value for pattern, value in patterned.items()}


# Numbers.
def _keep_numbers(place: str, schema: _Schema, is_integer_named: bool) -> None:
    for key in _COUNTS:
        if _is_number(count := schema.get(key)) and _size(count) < _INT64 and count == int(count):
            schema[key] = int(count)
    if "const" in schema:
        schema["const"] = _kept_value(f"{place}/const", schema["const"], is_integer_named)
    if isinstance(values := schema.get("enum"), list):
        schema["enum"] = [_kept_value(f"{place}/enum/{at}", value, is_integer_named) for at, value in enumerate(values)]
    if is_integer := "integer" in (types := _types(schema)) and "number" not in types:
        _round_bounds(place, schema)
    for keys, others, sign in ((_LOWER, _UPPER, 1), (_UPPER, _LOWER, -1)):
        has_other = any(_is_number(schema.get(key)) for key in others)
        for key in keys:
            if _is_number(bound := schema.get(key)):
                is_strict = key.startswith("exclusive") or schema.get(f"exclusive{key.capitalize()}") is True
                if sign * bound >= _OPEN_END and not has_other:
                    raise ValueError(f"{place}/{key}: {_shown(bound)} is too large for a range without a second bound")
                schema[key] = _kept_bound(f"{place}/{key}", bound, is_strict, is_integer)
    if _is_number(step := schema.get("multipleOf")):
        _fraction(f"{place}/multipleOf", step)
        schema["multipleOf"] = _kept(f"{place}/multipleOf", step)


def _is_number(value: object) -> TypeGuard[_Number]:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _size(number: _Number) -> _Number:
    """Return the absolute value; `abs` would round a decimal."""
    return abs(number) if isinstance(number, int) else number.copy_abs()


def _kept_value(place: str, value: Any, is_integer_named: bool) -> Any:
    if isinstance(value, dict):
        return {key: _kept_value(f"{place}/{key}", item, is_integer_named) for key, item in value.items()}
    if isinstance(value, list):
        return [_kept_value(f"{place}/{at}", item, is_integer_named) for at, item in enumerate(value)]
    if not _is_number(value):
        return value
    if is_integer_named and _size(value) >= _INT64:
        raise ValueError(f"{place}: {_shown(value)} is no 64-bit integer, and the schema names the type integer")
    return _kept(place, value)


def _round_bounds(place: str, schema: _Schema) -> None:
    """Replace the bounds of an integer by inclusive integers, because the library adds to floats, with rounding."""
    for inclusive, exclusive, rounding, step in ((*_LOWER, ROUND_FLOOR, 1), (*_UPPER, ROUND_CEILING, -1)):
        strict, bounds = schema.get(exclusive), list[int]()
        if _is_number(bound := schema.get(inclusive)):
            edge = _integer(f"{place}/{inclusive}", bound, rounding)  # outside the range or at its end
            bounds.append(edge if edge == bound and strict is not True else edge + step)
        if _is_number(strict):
            bounds.append(_integer(f"{place}/{exclusive}", strict, rounding) + step)
        if bounds:
            schema.pop(exclusive, None)
            schema[inclusive] = max(bounds) if step > 0 else min(bounds)


def _integer(place: str, number: _Number, rounding: str) -> int:
    if isinstance(number, int):
        return number
    if number.adjusted() > _MAX_EXPONENT:
        raise ValueError(f"{place}: {_shown(number)} is out of range")
    return int(number.to_integral_value(rounding))


def _kept_bound(place: str, bound: _Number, is_strict: bool, is_integer: bool) -> int | float:
    if is_integer and bound == _INT64 - 1 and not is_strict and place.endswith("/maximum"):
        return _INT64 - 1  # rounded up, and then the library's largest integer
    # The library writes the bounds of other numbers with the fewest digits that identify the float.
    is_rewritten = not is_integer and _size(bound) >= _UNIT and Decimal(repr(float(bound))) != bound
    if _size(bound) >= _INT64 or (is_strict and _size(bound) >= _UNIT) or is_rewritten:
        raise ValueError(f"{place}: {_shown(bound)} is too large: the range cannot be kept exactly")
    return _kept(place, bound)


def _keep_open_ends(document: _Document) -> None:
    """Replace an exclusive bound of 0, or refuse another whole one, if a bound that may be combined with it is less than 1 away.

    The library would include it: `{"exclusiveMinimum": 0, "maximum": 0.5}` would allow 0.
    """
    may_combine = any(key in schema for _, schema in document.schemas for key in _COMBINE)
    for place, schema in document.schemas:
        others = [other for _, other in document.schemas] if may_combine else [schema]
        for (inclusive, exclusive), ends, sign in ((_LOWER, _UPPER, 1), (_UPPER, _LOWER, -1)):
            is_flag = schema.get(exclusive) is True
            strict = schema.get(inclusive if is_flag else exclusive)
            if not _is_real(strict) or strict != int(strict):
                continue
            if not any(_is_real(end := other.get(key)) and 0 < sign * (end - strict) < 1 for other in others for key in ends):
                continue
            if strict != 0:
                raise ValueError(f"{place}/{exclusive}: {strict} cannot be excluded beside a bound that is less than 1 away")
            del schema[exclusive]
            own = schema.get(inclusive)
            schema[inclusive] = sign * max(_BESIDE_ZERO, sign * own if _is_real(own) else 0)


def _is_real(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kept(place: str, number: _Number) -> int | float:
    """Return the number in a form that the library reads and writes exactly; raise ValueError if there is none."""
    found = float(number) if _size(number) < Decimal("1e309") else float("inf")
    if _size(number) < _INT64 and number == int(number):
        if int(found) == number:
            return int(number)
    elif isfinite(found) and Decimal(repr(found)) == number and _read(found) == found:
        return found
    raise ValueError(f"{place}: {_shown(number)} cannot be kept exactly: the grammar library would round it")


def _read(number: float) -> float:
    """Return the float that serde_json parses: it rounds the digits, and then their power of ten."""
    sign, digits, exponent = Decimal(repr(number)).as_tuple()
    assert isinstance(exponent, int)
    found = float(int("".join(map(str, digits))))
    while exponent < -308:
        found, exponent = found / 1e308, exponent + 308
    power = float(f"1e{abs(exponent)}")
    found = found * power if exponent > 0 else found / power
    return -found if sign else found


def _fraction(place: str, step: _Number) -> tuple[int, int]:
    """Return the digits and the decimals of the library's fraction, by its algorithm; raise ValueError if it is rounded."""
    value, decimals = abs(float(step)) if _size(step) < _UINT32 else float("inf"), 0
    while isfinite(value) and value < _UINT32 and value != int(value):
        value, decimals = value * 10.0, decimals + 1
    if value >= _UINT32 or decimals > 9 or Decimal(int(value)).scaleb(-decimals) != _size(step):
        raise ValueError(f"{place}: {_shown(step)} cannot be kept exactly")
    return int(value), decimals


def _require_common_multiples(document: _Document) -> None:
    """Raise ValueError if schemas may be combined and the library's least common multiple of them would overflow."""
    if not any(key in schema for _, schema in document.schemas for key in _COMBINE):
        return
    common: tuple[int, int] | None = None
    for place, schema in document.schemas:
        if _is_number(step := schema.get("multipleOf")) or isinstance(step, float):
            digits, decimals = _fraction(place, Decimal(repr(step)))
            if common is None:
                common = digits, decimals
                continue
            scale = max(decimals, common[1])
            one, two = digits * 10 ** (scale - decimals), common[0] * 10 ** (scale - common[1])
            if one * two >= _UINT32:
                raise ValueError(f"{place}/multipleOf: the least common multiple with another multipleOf is too large")
            common = one * two // gcd(one, two), scale


def _shown(number: _Number) -> str:
    text = str(number)
    return text if len(text) <= 60 else f"{text[:60]}..."


# Keys.
def _is_closed(schema: _Schema) -> bool:
    return schema.get("additionalProperties") is False


def _map(schema: _Schema, key: str) -> _Schema:
    value = schema.get(key)
    return value if isinstance(value, dict) else {}


def _required(schema: _Schema) -> list[str]:
    value = schema.get("required")
    return [*dict.fromkeys(name for name in value if isinstance(name, str))] if isinstance(value, list) else []


def _keep_counts(place: str, schema: _Schema) -> None:
    """Count keys as a parser does, without duplicates. A few named keys are enumerated, with one choice for each set."""
    required = _required(schema)
    optional = [name for name, value in _map(schema, "properties").items() if name not in required and value is not False]
    is_finite = _is_closed(schema) and not _map(schema, "patternProperties")
    choices: list[list[_Schema]] = []
    least, most = schema.get("minProperties"), schema.get("maxProperties")
    if isinstance(least, int) and (num := least - len(required)) > 1 and not (is_finite and num > len(optional)):
        if not is_finite or comb(len(optional), num) > _MAX_SETS:
            raise ValueError(f"{place}/minProperties: {least} cannot be kept, since an object may have a key twice")
        choices.append([{"required": [*names]} for names in combinations(optional, num)])
        del schema["minProperties"]
    if is_finite and isinstance(most, int) and (num := most - len(required)) != 1 and num >= 0 and len(optional) > 0:
        if comb(len(optional), num) > _MAX_SETS:
            raise ValueError(f"{place}/maxProperties: {most} cannot be kept beside so many optional properties")
        kept = [{*names} for names in combinations(optional, min(num, len(optional)))]
        choices.append([{"properties": {name: False for name in optional if name not in names}} for names in kept])
        del schema["maxProperties"]
    if choices:
        schema["allOf"] = [*schema.get("allOf", ()), *({"anyOf": options} for options in choices)]


def _keep_keys(root: _Schema, document: _Document) -> None:
    """Allow one spelling for each key, so that a named key does not occur again in another spelling as an unnamed one."""
    schemas = [schema for _, schema in document.schemas]
    names = {id(schema): {*_map(schema, "properties"), *_required(schema)} for schema in schemas}
    patterned = [schema for schema in schemas if _map(schema, "patternProperties")]
    are_plain = not any(_HAS_TWO_SPELLINGS.search(name) for each in names.values() for name in each)
    named = [schema for schema in schemas if not _is_closed(schema) and names[id(schema)]]
    if not named and all(_is_closed(schema) and (are_plain or not names[id(schema)]) for schema in patterned):
        return
    are_free = all(schema.get("additionalProperties", True) in (True, {}) for schema in named)
    if are_plain and are_free and not patterned:
        for schema in named:  # the library does not escape printable characters in keys of a pattern
            schema.pop("additionalProperties", None)
            schema |= {"patternProperties": {"": True}, "additionalProperties": False}
    else:
        _forbid_escapes(root, document)


def _forbid_escapes(root: _Schema, document: _Document) -> None:
    r"""Disable \u escapes in the whole schema. Patterns exclude the characters that need them; constants may not have them."""
    options = root.get("x-guidance", {})
    if not isinstance(options, dict):
        return
    escapes = options.get("json_allowed_escapes")
    allowed = escapes if isinstance(escapes, str) else _ESCAPES
    root["x-guidance"] = {**options, "json_allowed_escapes": allowed.replace("u", "")}
    for place, schema in document.schemas:
        for value_place, text in _strings(place, {key: schema[key] for key in ("const", "enum") if key in schema}):
            if re.search(f"[{_NEEDS_ESCAPE_U}]", text):
                raise ValueError(f"{value_place}: control characters are not supported in a schema that allows unnamed keys")
        if isinstance(schema.get("pattern"), str):
            schema["allOf"] = [*schema.get("allOf", ()), {"pattern": f"^[^{_NEEDS_ESCAPE_U}]*$"}]


def _strings(place: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield place, value
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield from _strings(f"{place}/{key}", item)
