"""Replaces `format` keywords of JSON schemas by regular expressions.

The library's own expressions allow impossible dates, times and names. An expression here matches only valid strings, by the
specification that JSON Schema names for the format. docs/structured.md lists the valid strings that it does not match.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

_MAX_HOSTNAME_CHARS = 253  # RFC 1035: 255 octets with the lengths of the labels
_MAX_LOCAL_CHARS = 64  # RFC 5321, of an address before its @
_DAY_MINUTES = 24 * 60
_LITERALS = frozenset({"const", "enum"})  # keywords whose values are instances, not schemas
# Keywords whose values are maps of schemas by name.
NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


@dataclass(frozen=True, slots=True)
class StringFormat:
    """The conditions of a format: a string matches all expressions and has at most `max_length` characters."""

    patterns: tuple[str, ...]
    max_length: int | None = None


def without_formats(schema: Any) -> Any:
    """Return a schema in which known formats are replaced; other formats are left to the library."""
    if isinstance(schema, list):
        return [without_formats(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {keyword: _without_formats_under(keyword, value) for keyword, value in schema.items()}
    name = found.get("format")
    if not isinstance(name, str) or name not in _formats():
        return found
    del found["format"]
    return _restricted(found, _formats()[name])


def _without_formats_under(keyword: str, value: Any) -> Any:
    if keyword in _LITERALS:
        return value
    if keyword in NAMED_SCHEMAS and isinstance(value, dict):
        return {name: without_formats(schema) for name, schema in value.items()}
    return without_formats(value)


def _restricted(schema: Mapping[str, Any], string_format: StringFormat) -> dict[str, Any]:
    """Return the schema restricted to strings of a format; the first expression becomes the pattern if there is none."""
    own, more = dict(schema), [{"pattern": pattern} for pattern in string_format.patterns]
    if "pattern" not in own:
        own |= more.pop(0)
    if string_format.max_length is not None:
        limit = own.get("maxLength", string_format.max_length)
        own["maxLength"] = min(limit, string_format.max_length) if isinstance(limit, int | float) else limit
    if more:
        typed = {"type": own["type"]} if "type" in own else {}  # without it the library would consider every type
        own["allOf"] = [*own.get("allOf", ()), *({**typed, **one} for one in more)]
    return own


def _whole(expression: str) -> str:
    return f"^(?:{expression})$"


def _any(*expressions: str) -> str:
    return f"(?:{'|'.join(expressions)})"


def _date() -> str:
    """Return RFC 3339's full-date, with the days of each month and of leap years."""
    fours = _any("0[48]", "[2468][048]", "[13579][26]")  # 04 to 96
    leap = _any(f"[0-9]{{2}}{fours}", f"(?:00|{fours})00")
    common = _any(
        "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])", "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)", "02-(?:0[1-9]|1[0-9]|2[0-8])"
    )
    return _any(f"[0-9]{{4}}-{common}", f"{leap}-02-29")


def _time() -> str:
    """Return RFC 3339's full-time: second 60 is allowed only at 23:59 UTC, with offsets of quarter hours (all in use are)."""
    fraction = r"(?:\.[0-9]+)?"
    zone = "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
    found = [f"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{fraction}{zone}", f"23:59:60{fraction}[zZ]"]
    for offset in range(0, _DAY_MINUTES, 15):
        found.append(rf"{_clock(offset - 1)}:60{fraction}\+{_clock(offset)}")
        found.append(f"{_clock(-offset - 1)}:60{fraction}-{_clock(offset)}")
    return _any(*found)


def _clock(minutes: int) -> str:
    return f"{minutes % _DAY_MINUTES // 60:02}:{minutes % 60:02}"


def _duration() -> str:
    """Return RFC 3339's duration (appendix A): units are consecutive."""
    time = _any("[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?", "[0-9]+M(?:[0-9]+S)?", "[0-9]+S")
    date = _any("[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?", "[0-9]+M(?:[0-9]+D)?", "[0-9]+D")
    return f"P{_any(f'{date}(?:T{time})?', f'T{time}', '[0-9]+W')}"


def _ipv4() -> str:
    byte = _any("[0-9]", "[1-9][0-9]", "1[0-9]{2}", "2[0-4][0-9]", "25[0-5]")
    return rf"(?:{byte}\.){{3}}{byte}"


def _ipv6() -> str:
    """Return RFC 4291's text forms: eight groups, or fewer with one `::`. The last two may be an IPv4 address."""
    group = "[0-9a-fA-F]{1,4}"
    last = _any(f"{group}:{group}", _ipv4())
    forms = [f"(?:{group}:){{6}}{last}"]
    for after in range(8):  # groups after the ::, which replaces one group or more
        before = _any("", f"(?:{group}:){{0,{6 - after}}}{group}") if after < 7 else ""
        tail = "" if after == 0 else group if after == 1 else f"(?:{group}:){{{after - 2}}}{last}"
        forms.append(f"{before}::{tail}")
    return _any(*forms)


def _label(most: int) -> str:
    """Return a label of a host name with at most `most` characters.

    A label with hyphens at positions three and four must be valid Punycode, which no expression can check, so it is not matched.
    """
    edge, inner = "[a-zA-Z0-9]", "[a-zA-Z0-9-]"
    third = [f"{edge}{inner}{edge}(?:{inner}{{0,{most - 4}}}{edge})?", f"{edge}{inner}-{edge}(?:{inner}{{0,{most - 5}}}{edge})?"]
    return _any(f"{edge}{{1,2}}", *third)


def _hostname(most_labels: int | None, most_chars: int) -> str:
    label = _label(most_chars)
    return rf"{label}(?:\.{label}){'*' if most_labels is None else f'{{0,{most_labels - 1}}}'}"


def _email() -> str:
    """Return RFC 5321's Mailbox, with quotes without escapes and @, and only IP addresses in brackets.

    Labels are limited so that the domain cannot be too long: a separate length limit would be too slow in the library.
    """
    atom = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
    quoted = r'"[ !#-?A-\[\]-~]{1,62}"'
    address = rf"\[(?:{_ipv4()}|IPv6:{_ipv6()})\]"
    return rf"(?:{atom}(?:\.{atom})*|{quoted})@{_any(_hostname(3, 61), _hostname(8, 22), address)}"


def _uri() -> str:
    """Return RFC 3986's URI (appendix A)."""
    escaped = "%[0-9a-fA-F]{2}"
    plain = r"a-zA-Z0-9._~!$&'()*+,;=\-"
    char = f"(?:[{plain}:@]|{escaped})"
    literal = rf"\[(?:{_ipv6()}|[vV][0-9a-fA-F]+\.[{plain}:]+)\]"
    authority = f"(?:(?:[{plain}:]|{escaped})*@)?(?:{literal}|(?:[{plain}]|{escaped})*)(?::[0-9]*)?"
    rootless = f"{char}+(?:/{char}*)*"
    path = _any(f"//{authority}(?:/{char}*)*", f"/(?:{rootless})?", rootless, "")
    return rf"[a-zA-Z][a-zA-Z0-9+.-]*:{path}(?:\?(?:{char}|[/?])*)?(?:#(?:{char}|[/?])*)?"


@cache
def _formats() -> Mapping[str, StringFormat]:
    """Return the formats by name, built on first use."""
    hex_digit = "[0-9a-fA-F]"
    expressions = {
        "date": _date(),
        "time": _time(),
        "date-time": f"{_date()}[tT]{_time()}",
        "duration": _duration(),
        "ipv4": _ipv4(),
        "ipv6": _ipv6(),
        "uri": _uri(),
        "uuid": f"{hex_digit}{{8}}-(?:{hex_digit}{{4}}-){{3}}{hex_digit}{{12}}",
    }
    formats = {name: StringFormat((_whole(expression),)) for name, expression in expressions.items()}
    formats["hostname"] = StringFormat((_whole(_hostname(None, 63)),), _MAX_HOSTNAME_CHARS)
    formats["email"] = StringFormat((_whole(_email()), f"^[^@]{{1,{_MAX_LOCAL_CHARS}}}@"))
    return formats
