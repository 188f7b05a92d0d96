"""API keys of the settings: `KEY`, `NAME:KEY` or `NAME:ROLE:KEY`, and the paths that a role may access."""

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

UNNAMED = "-"  # in the log and in /metrics, for a key without a name or a request without a key
MIN_KEY_CHARS = 16  # a shorter key can be guessed

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SCRAPED = frozenset({"/metrics", "/load", "/v1/loads"})


class Role(StrEnum):
    """The paths that a key may access."""

    USE = "use"  # all but the monitoring paths
    SCRAPE = "scrape"  # the monitoring paths
    ADMIN = "admin"  # all

    def may_access(self, path: str) -> bool:
        """Return whether a path is open to this role."""
        return self is Role.ADMIN or (path in _SCRAPED) == (self is Role.SCRAPE)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key. A key without a name has the role admin."""

    secret: str = field(repr=False)
    name: str = UNNAMED
    role: Role = Role.ADMIN

    @classmethod
    def parse(cls, entry: str) -> "ApiKey":
        """Return the key of a settings entry. Raises ValueError, whose message does not contain the entry."""
        *named, secret = entry.split(":", 2)
        name, role = (*named, "", "")[:2]
        if not (secret and secret.isascii() and secret.isprintable() and " " not in secret):
            raise ValueError("an API key is empty or has characters other than printable ASCII without spaces")
        if not named:
            return cls(secret)
        if not _NAME.fullmatch(name):
            raise ValueError("the name of an API key (NAME:KEY) is not 1 to 64 of A-Za-z0-9._-")
        if role not in ("", *Role):
            raise ValueError("the role of an API key (NAME:ROLE:KEY) is not use, scrape or admin")
        return cls(secret, name, Role(role) if role else Role.USE)


def parsed_keys(entries: Iterable[str]) -> tuple[ApiKey, ...]:
    """Return the keys, each once. Raise ValueError for an invalid entry, and for one secret with two names or roles."""
    keys = tuple(dict.fromkeys(map(ApiKey.parse, entries)))
    if len({key.secret for key in keys}) != len(keys):
        raise ValueError("one API key is listed with two names or roles")
    return keys


def may_others_read(path: str) -> bool:
    """Return whether every user of the machine may read a file."""
    return os.name == "posix" and bool(Path(path).stat().st_mode & stat.S_IROTH)
