"""Arguments of a call, converted to JSON while they arrive. Knows one call, not the markup around its arguments."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from server.tool_calls.json_end import JsonEnd
from server.tool_calls.parameter_types import is_plain_string, json_of, types_of
from server.tool_calls.patterns import KEY, compiled

Schema = Mapping[str, Any]  # of a function's arguments

_SPACE = " \t\r\n"
_BRACKETS = dict(zip("[({])}", "[[{]]}", strict=True))  # of Python, in JSON
_ESCAPES = {**dict(zip("ntrbfav\\'\"", "\n\t\r\b\f\a\v\\'\"", strict=True)), "\n": ""}


class ArgumentsReader(Protocol):
    """Owns the parse state of one call's arguments. Its joined output depends on the text alone."""

    def feed(self, text: str, at: int, is_end: bool) -> tuple[str, int, bool]:
        """Read `text` from `at`. With `is_end` no more text follows.

        Return the JSON that is now certain, the end of the read text, and whether the arguments end there.
        """
        ...


class JsonArguments:
    """Arguments that are JSON already. They are not changed, valid or not."""

    def __init__(self, _schema: Schema) -> None:
        self._json = JsonEnd()

    def feed(self, text: str, at: int, _is_end: bool) -> tuple[str, int, bool]:
        """Return the text up to the end of the object."""
        num_chars = self._json.feed(text[at:])
        end = len(text) if num_chars is None else at + num_chars
        return text[at:end], end, num_chars is not None


class _FieldsReader(ABC):
    """Arguments that are fields with markup of their own.

    Each state reads one part. It returns whether the next state can continue, or None where text is missing. Text that is no
    field ends the arguments; their JSON is then not closed, so that a mistake of the model cannot look complete.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._text, self._at, self._is_end = "", 0, False
        self._json = ""
        self._num_fields = 0
        self._state: Callable[[], bool | None] = self._between

    def feed(self, text: str, at: int, is_end: bool) -> tuple[str, int, bool]:
        """Return the JSON of the parts that are complete."""
        self._text, self._at, self._is_end = text, at, is_end
        has_next: bool | None = True
        while has_next:
            has_next = self._state()
        piece, self._json = self._json, ""
        return piece, self._at, has_next is False

    def _between(self) -> bool | None:
        match = compiled(self._next).match(self._text, self._at, partial=True)
        if match is None or match.partial:
            self._at = len(self._text) if match and self._is_end else self._at  # the beginning of a key is none
            return False if match is None else None
        self._at = match.end()
        if match["key"] is None:
            self._json += "}" if self._num_fields else "{}"
            return False
        self._json += f"{', ' if self._num_fields else '{'}{_quoted(match['key'])}: "
        self._num_fields += 1
        self._begin_value(match["key"])
        return True

    _next: str  # the pattern of a field's key, or of the end of the fields

    @abstractmethod
    def _begin_value(self, key: str) -> None:
        """Prepare to read the value of a field."""


class XmlArguments(_FieldsReader):
    r"""Fields in the markup of Qwen3-Coder, typed by the schema: `<parameter=place>\nOslo\n</parameter>`.

    A newline on either side of a value belongs to the markup. A value ends at the first end that more markup follows.
    """

    _next = r"~(?:</function>|(?=</tool_call>)|<parameter=(?P<key>[^<>\n]{1,256}+)>)"
    END = "</parameter>"  # of a value
    _VALUE_END = rf"\n?+{END}(?=~(?:<parameter=|</function>|</tool_call>))"

    def _begin_value(self, key: str) -> None:
        properties = self._schema.get("properties")
        self._property = properties.get(key, {}) if isinstance(properties, Mapping) else {}
        self._is_plain = is_plain_string(self._property)
        self._json += '"' if self._is_plain else ""
        self._value: list[str] = []  # not yet converted
        self._has_begun = False
        self._state = self._in_value

    def _in_value(self) -> bool | None:
        match = compiled(self._VALUE_END).search(self._text, self._at, partial=True)
        end = match.start() if match else len(self._text)
        self._add(self._text[self._at : end])
        self._at = end
        if match is None or match.partial:
            if self._is_end:
                self._json += "".join(self._value)
                self._at = len(self._text)
            return None
        self._json += '"' if self._is_plain else json_of("".join(self._value), types_of(self._property, self._schema))
        self._at = match.end()
        self._state = self._between
        return True

    def _add(self, text: str) -> None:
        if text and not self._has_begun:
            self._has_begun, text = True, text.removeprefix("\n")
        if self._is_plain:
            self._json += _inside(text)
        else:
            self._value.append(text)


class PythonArguments(_FieldsReader):
    """Keyword arguments in Python, or in Python with JSON's names: `place="Oslo", days=[1, 2], is_now=True)`."""

    _next = rf"~(?:,?~\)|(?:,~)?{KEY}~=)"
    _ATOM = r"[-+.\w]{1,512}+"
    _ESCAPE = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}+|[^xuU0-7])"

    def _begin_value(self, _key: str) -> None:
        self._depth = 0
        self._has_comma = False  # written once another element follows
        self._is_behind_value = False
        self._state = self._in_value

    def _in_value(self) -> bool | None:
        if self._at == len(self._text):
            return None
        char = self._text[self._at]
        if char in _SPACE:
            self._at += 1
        elif char in ",)" and not self._depth:
            self._state = self._between
        elif char in "\"'":
            return self._begin_string(char)
        elif char in _BRACKETS:
            return self._bracket(char)
        elif char in ",:":
            self._has_comma, self._is_behind_value = char == ",", False
            self._json += ": " if char == ":" else ""
            self._at += 1
        else:
            return self._atom()
        return True

    def _bracket(self, char: str) -> bool:
        if char in "[({":
            self._write(_BRACKETS[char])
            self._is_behind_value = False
        elif not self._depth:
            return False
        else:
            self._json += _BRACKETS[char]
            self._has_comma, self._is_behind_value = False, True
        self._depth += 1 if char in "[({" else -1
        self._at += 1
        return True

    def _write(self, value: str) -> None:
        """Write a value, or the beginning of one. Values that nothing separates are no JSON."""
        self._json += f"{', ' if self._has_comma else ' ' if self._is_behind_value else ''}{value}"
        self._has_comma, self._is_behind_value = False, True

    def _atom(self) -> bool | None:
        match = compiled(self._ATOM).match(self._text, self._at)
        if match is None:
            return False
        if match.end() == len(self._text) and not self._is_end:
            return None
        self._write(_atom_json(match[0]))
        self._at = match.end()
        return True

    def _begin_string(self, char: str) -> bool | None:
        start = self._text[self._at : self._at + 3]
        if len(start) < 3 and start == char * len(start) and not self._is_end:
            return None
        self._quote = char * 3 if start == char * 3 else char
        self._write('"')
        self._at += len(self._quote)
        self._state = self._in_string
        return True

    def _in_string(self) -> bool | None:
        char = self._quote[0]
        if run := compiled(rf"[^\\{char}]+").match(self._text, self._at):
            self._json += _inside(run[0])
            self._at = run.end()
        rest = self._text[self._at : self._at + len(self._quote)]
        if not rest:
            return None
        if rest[0] == "\\":
            return self._escape()
        if len(rest) < len(self._quote) and rest == char * len(rest) and not self._is_end:
            return None
        is_closed = rest == self._quote
        self._json += '"' if is_closed else _inside(char)
        self._at += len(self._quote) if is_closed else 1
        self._state = self._in_value if is_closed else self._in_string
        return True

    def _escape(self) -> bool | None:
        match = compiled(self._ESCAPE).match(self._text, self._at, partial=not self._is_end)
        is_octal = match is not None and match[0][1:].isdigit()
        if match is not None and not self._is_end and (match.partial or (is_octal and match.end() == len(self._text))):
            return None
        self._json += _escape_json(match[0][1:]) if match else _inside("\\")
        self._at = match.end() if match else self._at + 1
        return True


_LITERALS = {"True": "true", "False": "false", "None": "null"}


def _escape_json(escape: str) -> str:
    """Return the JSON of an escape in a string of Python, given without its backslash. Surrogates remain escapes."""
    if escape[0] in "xuU01234567":
        code = int(escape, 8) if escape.isdigit() else int(escape[1:], 16)
        if 0xD800 <= code < 0xE000:
            return f"\\u{code:04x}"
        return _inside(chr(code) if code < 0x110000 else f"\\{escape}")
    return _inside(_ESCAPES.get(escape, f"\\{escape}"))


def _atom_json(atom: str) -> str:
    """Return the JSON of a name or number of Python; a text without JSON is returned unchanged."""
    if atom in _LITERALS or compiled(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][-+]?[0-9]++)?").fullmatch(atom):
        return _LITERALS.get(atom, atom)
    for convert in (lambda: int(atom, 0), lambda: float(atom)):
        try:
            return json.dumps(convert(), allow_nan=False)
        except ValueError:
            continue
    return atom


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _inside(text: str) -> str:
    """Return a part of a string's JSON."""
    return _quoted(text)[1:-1]
