"""Converts pydantic's errors to readable messages: the field and its valid values. Knows only pydantic's errors.

A field that may have several forms (a text or a list of texts) fails once for each form. Only the form that validated furthest is
reported: it is most likely the intended one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Error = Mapping[str, Any]  # as `ValidationError.errors()` gives it

# Entries of a location that name a form of a union, or the key of a map, not a field.
_FORM_NAMES = ("str", "int", "[key]")
_FORM_BEGINNINGS = ("constrained-", "list[", "dict[", "literal[", "function-", "tagged-union[", "form-")

_KINDS = {
    "string_type": "a string",
    "list_type": "a list",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_SENTENCES = {
    "missing": "is required",
    "too_short": "must not be empty",
    "too_long": "has too many entries; at most {max_length} are accepted",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_long": "must have at most {max_length} characters",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "string_unicode": "must be valid Unicode",
}


def param_of(error: Error) -> str | None:
    """Return the dotted name of the field of an error. The name of an unknown field can be any string of the client."""
    if named := error.get("ctx", {}).get("param"):
        return str(named)
    inside = error["loc"][1:]
    num_clients = 1 if error["type"] == "extra_forbidden" else 0
    ours, clients = inside[: len(inside) - num_clients], inside[len(inside) - num_clients :]
    return ".".join(str(part) for part in [*(part for part in ours if not _is_form(part)), *clients]) or None


def messages_by_field(errors: Sequence[Error]) -> dict[str | None, str]:
    """Return the message of each field, without its name, in the order of the errors."""
    groups: dict[str | None, list[Error]] = {}
    for error in of_best_forms(errors):
        groups.setdefault(param_of(error), []).append(error)
    return {param: _sentence(group) if param or len(group[0]["loc"]) > 1 else _of_body(group) for param, group in groups.items()}


def _of_body(group: Sequence[Error]) -> str:
    """Return the message of the whole body, which names itself where it is of the wrong kind."""
    return ("the body " if group[0]["type"] in _KINDS else "") + _sentence(group)


def _sentence(group: Sequence[Error]) -> str:
    kinds = list(dict.fromkeys(_KINDS[error["type"]] for error in group if error["type"] in _KINDS))
    others = list(dict.fromkeys(_of_one(error) for error in group if error["type"] not in _KINDS))
    return "; ".join([*others, *(["must be " + " or ".join(kinds)] if kinds else [])])


def _of_one(error: Error) -> str:
    if error["type"] in _SENTENCES:
        numbers = {name: _plain(value) for name, value in error.get("ctx", {}).items()}
        return _SENTENCES[error["type"]].format(**numbers)
    return str(error["msg"]).removeprefix("Value error, ")


def _plain(value: object) -> object:
    """Return a limit without a useless fraction: 2, not 2.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_form(part: object) -> bool:
    return isinstance(part, str) and (part in _FORM_NAMES or part.startswith(_FORM_BEGINNINGS))


def of_best_forms(errors: Sequence[Error]) -> list[Error]:
    """Return the errors, except errors of forms that failed earlier than another form of the same field."""
    best: dict[tuple[object, ...], tuple[int, tuple[int, ...], bool]] = {}
    for error in errors:
        field = _field(error)
        best[field] = max(best.get(field, (0, (), False)), _progress(error, field))
    return [error for error in errors if _progress(error, _field(error)) == best[_field(error)]]


def _field(error: Error) -> tuple[object, ...]:
    """Return the location of the field whose form failed; without forms, the whole location."""
    loc = tuple(error["loc"])
    return next((loc[:at] for at, part in enumerate(loc) if _is_form(part)), loc)


def _progress(error: Error, field: tuple[object, ...]) -> tuple[int, tuple[int, ...], bool]:
    """Return how far a form validated: wrong kind (0), right kind up to an item (1), or invalid only as a whole (2); up to which
    item, and whether that is of the right kind itself.
    """
    inside = [part for part in error["loc"][len(field) :] if not _is_form(part)]
    rank = 1 if inside else 0 if error["type"] in _KINDS else 2
    is_kind = bool(inside) and isinstance(inside[-1], int) and error["type"] not in _KINDS
    return rank, tuple(part for part in inside if isinstance(part, int)), is_kind
