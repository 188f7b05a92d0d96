"""Strings of a format are valid to a strict checker, and all valid strings are possible."""

import calendar
import json
from datetime import date
from typing import Any

import jsonschema_rs
import pytest

from engine.core.types import Grammar, GrammarKind
from engine.structured_output import string_formats
from engine.structured_output.grammars import BadGrammar, compiled
from engine.structured_output.string_formats import without_formats
from tests.model.json_texts import admits, admits_string, bytes_vocabulary, matcher_of, random_strings

VALID = {
    "date": ["2024-02-29", "2000-02-29", "2023-02-28", "2023-12-31", "0000-02-29", "9999-04-30"],
    "time": [
        "00:00:00Z",
        "23:59:59.123456+05:30",
        "08:30:06z",
        "23:59:60Z",
        "01:29:60+01:30",
        "15:59:60.5-08:00",
        "23:59:60-00:00",
    ],
    "date-time": ["2024-02-29T12:30:00Z", "1990-12-31t23:59:60z", "1990-12-31T15:59:60-08:00", "1998-01-01T05:44:60.25+05:45"],
    "duration": ["P1Y", "P3M2D", "PT36H", "P1DT12H", "P4W", "P1Y2M3DT4H5M6S", "PT0S"],
    "email": [
        "a@b",
        "joe.bloggs+x@mail.example.com",
        '"joe bloggs"@example.com',
        "a@[127.0.0.1]",
        "a@[IPv6:::1]",
        "a" * 64 + "@b.c",
    ],
    "hostname": ["localhost", "a.b-c.example", "1.2", "a" * 63, ".".join(["a" * 62] * 4), "a-b--c.d"],
    "ipv4": ["0.0.0.0", "255.255.255.255", "192.168.1.10"],
    "ipv6": [
        "::",
        "::1",
        "1::",
        "1:2:3:4:5:6:7:8",
        "::ffff:192.168.0.1",
        "1::2:3:4:5:6:7",
        "1:2:3:4:5:6:7::",
        "1:2:3:4:5:6:1.2.3.4",
    ],
    "uri": ["http://a", "https://u:p@[::1]:80/a/b?c=d#e", "urn:isbn:1", "mailto:a@b", "file:///a%20b", "x:", "http://[v1.a:b]/"],
    "uuid": [
        "2eb8aa08-aa98-11ea-b4aa-73b441d16380",
        "00000000-0000-0000-0000-000000000000",
        "ABCDEFab-0000-0000-0000-000000000000",
    ],
}
INVALID = {
    "date": [
        "2023-02-29",
        "1900-02-29",
        "2100-02-29",
        "2024-02-30",
        "2024-04-31",
        "2024-13-01",
        "2024-00-10",
        "2024-01-00",
        "24-01-01",
    ],
    "time": ["12:30:60Z", "22:59:60Z", "23:58:60Z", "23:59:60+01:00", "01:29:60+01:00", "24:00:00Z", "12:00:61Z", "12:00:00"],
    "date-time": ["2023-02-29T00:00:00Z", "2024-02-29T12:30:60Z", "1990-12-31T15:59:60-07:00", "2024-01-01 00:00:00Z"],
    "duration": ["P", "PT", "P1YT", "P1Y2D", "PT1H2S", "P1W2D", "1D"],
    "email": ["a", "a@", "@b", "a..b@c", ".a@b", "a@-b", "a@b-", "a@" + "b" * 64, "a" * 65 + "@b", "a@[256.0.0.1]", "a@b..c"],
    "hostname": ["", "-a", "a-", "a..b", "a" * 64, ".".join(["a" * 63] * 4), "a_b", "xn--x", "ab--c", "a.b."],
    "ipv4": ["256.0.0.1", "1.2.3", "01.2.3.4", "1.2.3.4.5"],
    "ipv6": [":", "1::2::3", "1:2:3:4:5:6:7", "1:2:3:4:5:6:7:8:9", "12345::", "::1.2.3", "1:2:3:4:5:6:7:1.2.3.4", ":1::"],
    "uri": ["a", "//a", "http://[::1", "http://a b", "http://a/%2", "1a:b", "http://[1:2]/", "http://a:b/"],
    "uuid": ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98-11ea-b4aa-73b441d1638", "g0000000-0000-0000-0000-000000000000"],
}
NAMES = sorted(VALID)


def schema_of(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "format": name, **more}


def check_random(name: str, count: int = 600, **more: Any) -> None:
    """Draw strings of a format beside other keywords, and validate each with a strict checker."""
    schema = schema_of(name, **more)
    checker = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    found = random_strings(matcher_of(schema), count)
    assert len(found) > count // 2
    assert [value for value in found if not checker.is_valid(value)] == []


def check_listed(name: str) -> None:
    matcher = matcher_of(schema_of(name))
    checker = jsonschema_rs.Draft202012Validator(schema_of(name), validate_formats=True)
    assert all(map(checker.is_valid, VALID[name]))
    assert [value for value in VALID[name] if not admits_string(matcher, value)] == []
    assert not any(map(checker.is_valid, INVALID[name]))
    assert [value for value in INVALID[name] if admits_string(matcher, value)] == []


@pytest.mark.parametrize("name", NAMES)
def test_random_strings_are_valid(name: str):
    """`date` admitted 29 February of every year, `time` second 60 of every minute, `hostname` names of any length."""
    check_random(name)


@pytest.mark.parametrize("name", NAMES)
def test_listed_strings_are_allowed_if_valid(name: str):
    check_listed(name)


def test_every_format_is_listed():
    assert sorted(string_formats._formats()) == NAMES


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("date", {"pattern": "-02-"}),
        ("time", {"pattern": ":60"}),
        ("date-time", {"pattern": ":60", "maxLength": 27}),
        ("email", {"pattern": "^[a-z.]+@example[.]com$", "maxLength": 40}),
        ("hostname", {"minLength": 50}),
        ("ipv6", {"maxLength": 12}),
        ("uri", {"pattern": "^https://", "minLength": 12, "maxLength": 40}),
        ("duration", {"maxLength": 8}),
    ],
)
def test_other_keywords_apply_beside_a_format(name: str, more: dict[str, Any]):
    check_random(name, 200, **more)


def check_dates() -> None:
    """Validate every day that a month could have, in years of each kind."""
    matcher = matcher_of(schema_of("date"))
    for year in (1, 1900, 1999, 2000, 2004, 2023, 2024, 2100, 2400, 9996):
        days = [(month, day) for month in range(14) for day in range(33)]
        admitted = [at for at in days if admits_string(matcher, f"{year:04}-{at[0]:02}-{at[1]:02}")]
        assert admitted == [(at, day + 1) for at in range(1, 13) for day in range(calendar.monthrange(year, at)[1])]


def test_dates_are_those_of_the_calendar():
    check_dates()
    assert date.fromisoformat("2024-02-29")


@pytest.mark.parametrize("sign", "+-")
def test_leap_seconds_are_at_midnight_of_utc(sign: str):
    """At each offset one local minute has the second: the one that is 23:59 in UTC."""
    matcher = matcher_of(schema_of("time"))
    checker = jsonschema_rs.Draft202012Validator(schema_of("time"), validate_formats=True)
    for offset in range(0, 24 * 60, 15):
        zone = f"{sign}{offset // 60:02}:{offset % 60:02}"
        last = (24 * 60 - 1 + (offset if sign == "+" else -offset)) % (24 * 60)
        for minutes in {last, (last + 1) % (24 * 60), (last + 60) % (24 * 60), 12 * 60, 24 * 60 - 1}:
            value = f"{minutes // 60:02}:{minutes % 60:02}:60{zone}"
            assert admits_string(matcher, value) == checker.is_valid(value) == (minutes == last), value


@pytest.mark.parametrize(
    "more",
    [
        {"pattern": "^2023-02-2[9]$"},
        {"enum": ["2023-02-29", "2100-02-29"]},
        {"const": "2024-04-31"},
        {"maxLength": 9},
        {"minLength": 11},
        {"allOf": [{"pattern": "^2023-02-29$"}]},
    ],
)
def test_a_format_that_nothing_satisfies_is_refused(more: dict[str, Any]):
    """The pattern wrote 29 February 2023."""
    with pytest.raises(BadGrammar, match=r"(?i)unsatisfiable") as refused:
        matcher_of(schema_of("date", **more))
    assert "SearchRegex" not in str(refused.value)


def test_overlong_string_is_refused_plainly():
    """The reason was an expression of the library's, which no client has written."""
    with pytest.raises(BadGrammar, match="too complex in combination"):
        matcher_of(schema_of("email", pattern=".*", minLength=200))


def check_places() -> None:
    """A format applies wherever a schema occurs, under any name. In a constant it is ordinary text."""
    bad, good = "2023-02-29", "2024-02-29"
    is_date = {"type": ["string", "null"], "format": "date"}
    for schema, form in [
        ({"properties": {"format": is_date}, "required": ["format"]}, '{"format":%s}'),
        ({"properties": {"const": is_date}, "required": ["const"]}, '{"const":%s}'),
        ({"properties": {"properties": {"properties": {"enum": is_date}}}}, '{"properties":{"enum":%s}}'),
        ({"patternProperties": {"^const$": is_date}}, '{"const":%s}'),
        ({"additionalProperties": is_date}, '{"x":%s}'),
        ({"type": "array", "items": is_date}, "[%s]"),
        ({"type": "array", "prefixItems": [is_date]}, "[%s]"),
        ({"anyOf": [is_date, {"type": "integer"}]}, "%s"),
        ({"allOf": [is_date, {"maxLength": 12}], "pattern": "^2"}, "%s"),
        ({"$ref": "#/$defs/enum", "$defs": {"enum": is_date}}, "%s"),
        ({"$ref": "#/components/schemas/x", "components": {"schemas": {"x": is_date}}}, "%s"),
    ]:
        matcher = matcher_of(schema)
        assert admits(matcher, form % json.dumps(good)), schema
        assert not admits(matcher, form % json.dumps(bad)), schema
    constant = {"const": {"format": "date", "a": [{"format": "time"}]}}
    assert admits(
        matcher_of({**constant, "x-guidance": {"whitespace_flexible": False}}), '{"format":"date","a":[{"format":"time"}]}'
    )


def test_formats_apply_wherever_a_schema_occurs():
    check_places()


def test_schema_inside_lark_grammar_keeps_formats():
    grammar = 'start: "</a>" /b"x/ %json {"format": "date", "type": "string"} // %json {\n'
    matcher = compiled(bytes_vocabulary(), Grammar(GrammarKind.LARK, grammar))
    assert admits(matcher, '</a>b"x"2024-02-29"')
    assert not admits(matcher, '</a>b"x"2023-02-29"')


def test_unknown_format_is_refused_only_for_strings():
    with pytest.raises(BadGrammar, match="int32"):
        matcher_of({"type": "string", "format": "int32"})
    assert admits(matcher_of({"type": "integer", "format": "int32"}), "12")


def test_a_schema_is_not_changed_in_place():
    schema = {"properties": {"a": {"format": "email", "allOf": [{"minLength": 3}], "maxLength": 20}}}
    before = json.dumps(schema)
    without_formats(schema)
    assert json.dumps(schema) == before


def every_year_leaps(monkeypatch: pytest.MonkeyPatch) -> None:
    formats = dict(string_formats._formats())
    formats["date"] = string_formats.StringFormat((r"^[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])$",))
    monkeypatch.setattr(string_formats, "_formats", lambda: formats)


def names_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    formats = dict(string_formats._formats())
    formats["hostname"] = string_formats.StringFormat(formats["hostname"].patterns)
    monkeypatch.setattr(string_formats, "_formats", lambda: formats)


def literals_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(string_formats, "NAMED_SCHEMAS", frozenset())


@pytest.mark.parametrize(
    ("mutate", "check"),
    [
        (every_year_leaps, check_dates),
        (names_without_a_limit, lambda: check_listed("hostname")),
        (literals_everywhere, check_places),
    ],
)
def test_formats_detect_mutants(mutate, check, monkeypatch: pytest.MonkeyPatch):
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check()
