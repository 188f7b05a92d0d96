"""Regular expressions of markup, matched against text that arrives in pieces.

The regex library reports a match that more text could complete as partial. A complete match must not depend on text that is still
missing, so each pattern ends in something that must come. Each pattern is bounded, so a match takes bounded time.
"""

from functools import cache

import regex

NAME = r"(?P<name>[A-Za-z0-9_-]{1,64}+)"
KEY = r"(?P<key>[^\W\d]\w{0,127}+)"  # of a keyword argument in Python


@cache
def compiled(pattern: str) -> "regex.Pattern[str]":
    """Return the compiled pattern, in which `~` is whitespace."""
    return regex.compile(pattern.replace("~", r"[ \t\r\n]{0,64}+"))
