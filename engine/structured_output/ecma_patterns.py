"""Translates ECMAScript regular expressions of JSON schemas to the syntax of Rust's regex crate, where the two differ."""

import re

_SPACE = r"\t\n\x0b\x0c\r \xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
_ESCAPES = {r"\s": f"[{_SPACE}]", r"\S": f"[^{_SPACE}]"}
_NO_LINE_END = r"[^\n\r\x{2028}\x{2029}]"
_ALL, _NOTHING = r"[\s\S]", r"[^\s\S]"
_TOKEN = re.compile(r"\\c[A-Za-z]|\\.|.", re.DOTALL)
_DOT_IS_ALL = re.compile(r"\(\?[a-zA-Z]*s")  # a flag that ECMAScript does not have


def rust_pattern(pattern: str) -> str:
    """Return the equivalent expression in Rust's syntax; parts that Rust does not support are left unchanged."""
    dot = "." if _DOT_IS_ALL.search(pattern) else _NO_LINE_END
    parts: list[str] = []
    is_in_class, at = False, 0
    while at < len(pattern):
        if not is_in_class and (empty := re.compile(r"\[(\^?)\]").match(pattern, at)):
            parts.append(_ALL if empty[1] else _NOTHING)
            at = empty.end()
            continue
        found = _TOKEN.match(pattern, at)
        assert found is not None
        token, at = found[0], found.end()
        if len(token) == 3:
            parts.append(rf"\x{ord(token[2]) % 32:02x}")
        elif len(token) == 2:
            parts.append(r"\x08" if is_in_class and token == r"\b" else _ESCAPES.get(token, token))
        elif not is_in_class:
            is_in_class = token == "["
            parts.append(dot if token == "." else token)
        else:
            # Rust has nested classes, with the operators &&, -- and ~~.
            is_operator = token in "[&~" or (token == "-" and parts[-1] == "-")
            is_in_class = token != "]"
            parts.append(f"\\{token}" if is_operator else token)
    return "".join(parts)
