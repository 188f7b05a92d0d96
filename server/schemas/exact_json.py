"""JSON that keeps decimals as written, for schemas: a float would round them before the schema becomes a grammar."""

import json
from decimal import Decimal, InvalidOperation
from typing import Any

from pydantic_core import from_json


class WrittenFloat(float):
    """A float that rounds the number in the JSON text; `written` is the exact text."""

    __slots__ = ("written",)

    written: str


def exactly_parsed(text: str | bytes) -> Any:
    """Return the value of JSON text, with a WrittenFloat for each decimal that a float rounds. Raises ValueError."""
    from_json(text, allow_inf_nan=False)  # the stricter of the two: on encodings, constants and depth
    return with_written_floats(text)


def with_written_floats(text: str | bytes) -> Any:
    """Return the result of `exactly_parsed` for JSON text that pydantic's parser has accepted already."""
    return json.loads(text if isinstance(text, str) else text.decode(), parse_float=_float)


def exactly_dumped(value: Any) -> str:
    """Return compact JSON text of a value of `exactly_parsed`."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{_dumped(key)}:{exactly_dumped(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(exactly_dumped, value))}]"
    return value.written if isinstance(value, WrittenFloat) else _dumped(value)


def rounded(value: Any) -> Any:
    """Return the value with plain floats, for libraries that cannot use WrittenFloat."""
    return json.loads(json.dumps(value))


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _float(text: str) -> float:
    value = float(text)
    if _is_exact(value, text):
        return value
    written = WrittenFloat(value)
    written.written = text
    return written


def _is_exact(value: float, text: str) -> bool:
    try:
        return Decimal(repr(value)) == Decimal(text)
    except InvalidOperation:  # the exponent is beyond the exponents of decimals
        return False
