"""Keeps responses for later requests, in an SQLite database in memory or in a file. Knows JSON text, no formats.

Each owner (an API key) has its own responses and bounds. An id of one owner is unknown to every other owner.
"""

import asyncio
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property

log = logging.getLogger(__name__)

_VERSION = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY, owner TEXT NOT NULL, id TEXT NOT NULL, previous_id TEXT, created_s REAL NOT NULL,
    used_ns INTEGER NOT NULL, num_bytes INTEGER NOT NULL, input TEXT NOT NULL, answer TEXT NOT NULL, UNIQUE (owner, id)
);
CREATE INDEX IF NOT EXISTS responses_by_age ON responses (created_s);
CREATE TABLE IF NOT EXISTS items (
    owner TEXT NOT NULL, id TEXT NOT NULL,
    response INTEGER NOT NULL REFERENCES responses (number) ON DELETE CASCADE, PRIMARY KEY (owner, id)
);
CREATE INDEX IF NOT EXISTS items_by_response ON items (response);
"""
_EXCESS = """
DELETE FROM responses WHERE number IN (
    SELECT number FROM (
        SELECT number, ROW_NUMBER() OVER recent AS place, SUM(num_bytes) OVER recent AS total FROM responses
        WHERE owner = ? WINDOW recent AS (ORDER BY used_ns DESC, number DESC)
    ) WHERE place > ? OR total > ?
)
"""


class StoreUnusable(Exception):
    """A file that cannot be opened as a store."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """The most that is kept for each owner."""

    num_responses: int
    num_bytes: int
    age_s: float


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response: the items that its request added to the conversation, and the answer with the items `item_ids`, as JSON."""

    id: str
    previous_id: str | None
    input: str
    answer: str
    item_ids: Sequence[str] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of input and answer."""
        return len(self.input.encode()) + len(self.answer.encode())


class ResponseStore:
    """Owns the database. Beyond a bound, the responses of an owner that were used least recently are removed."""

    def __init__(self, limits: StoreLimits, file: str | None = None, clock: Callable[[], float] = time.time) -> None:
        self.limits = limits
        self._file = file
        self._clock = clock
        self._lock = threading.Lock()
        self._is_closed = False
        if file is not None and limits.num_responses:
            self._open_file(file)

    def _open_file(self, file: str) -> None:
        """Open the database now, so that an unusable file stops the start."""
        try:
            os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))  # texts of clients: for this user alone
            _ = self._database
        except (OSError, sqlite3.Error) as error:
            raise StoreUnusable(f"{file}: {error}") from error

    @cached_property
    def _database(self) -> sqlite3.Connection:
        """The database. `_lock` allows one thread at a time."""
        database = sqlite3.connect(self._file or ":memory:", check_same_thread=False)
        (version,) = database.execute("PRAGMA user_version").fetchone()
        (num_tables,) = database.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        if version != (_VERSION if num_tables else 0):
            database.close()
            raise StoreUnusable(f"{self._file}: is no store of this version")
        for pragma in ("foreign_keys = ON", "secure_delete = ON", "journal_mode = WAL", "synchronous = NORMAL"):
            database.execute(f"PRAGMA {pragma}")
        database.executescript(f"{_TABLES} PRAGMA user_version = {_VERSION};")
        return database

    async def add(self, owner: str, response: StoredResponse) -> bool:
        """Keep a response; return whether it is kept. A failure of the database costs the response, not the answer."""
        if not self.limits.num_responses or response.num_bytes > self.limits.num_bytes:
            return False
        try:
            return await asyncio.to_thread(self._add, owner, response)
        except sqlite3.Error:
            log.exception("a response cannot be stored")
            return False

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a response, None if it is unknown to this owner."""
        return await asyncio.to_thread(self._get, owner, response_id)

    async def chain(self, owner: str, response_id: str, most: int) -> list[StoredResponse] | str:
        """Return a response and at most `most` responses in all that it continues, oldest first; or the id of an unknown one."""
        return await asyncio.to_thread(self._chain, owner, response_id, most)

    async def answers_with(self, owner: str, item_ids: Sequence[str]) -> dict[str, str]:
        """Return for each known output item the answer that has it."""
        return await asyncio.to_thread(self._answers_with, owner, item_ids) if item_ids else {}

    async def delete(self, owner: str, response_id: str) -> bool:
        """Remove a response; return whether it was known."""
        return await asyncio.to_thread(self._delete, owner, response_id)

    def close(self) -> None:
        """Close the database; no response can be added after it."""
        with self._lock:
            self._is_closed = True
            if "_database" in self.__dict__:
                self._database.close()

    def _add(self, owner: str, response: StoredResponse) -> bool:
        limits, now_s = self.limits, self._clock()
        with self._lock:
            if self._is_closed:
                return False
            with self._database as database:
                row = (owner, response.id, response.previous_id, now_s, time.time_ns(), response.num_bytes)
                values = "(owner, id, previous_id, created_s, used_ns, num_bytes, input, answer) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
                cursor = database.execute(f"INSERT INTO responses {values}", (*row, response.input, response.answer))
                items = [(owner, item_id, cursor.lastrowid) for item_id in response.item_ids]
                database.executemany("INSERT INTO items (owner, id, response) VALUES (?, ?, ?)", items)
                database.execute("DELETE FROM responses WHERE created_s < ?", (now_s - limits.age_s,))
                database.execute(_EXCESS, (owner, limits.num_responses, limits.num_bytes))
        return True

    def _get(self, owner: str, response_id: str) -> StoredResponse | None:
        with self._lock:
            return self._row(owner, response_id)

    def _row(self, owner: str, response_id: str) -> StoredResponse | None:
        if self._is_closed or not self.limits.num_responses or not response_id.isascii():
            return None
        since_s = self._clock() - self.limits.age_s
        query = "SELECT id, previous_id, input, answer FROM responses WHERE owner = ? AND id = ? AND created_s >= ?"
        with closing(self._database.execute(query, (owner, response_id, since_s))) as rows:
            row = rows.fetchone()
        return None if row is None else StoredResponse(*row)

    def _chain(self, owner: str, response_id: str, most: int) -> list[StoredResponse] | str:
        found: list[StoredResponse] = []
        next_id: str | None = response_id
        with self._lock:
            while next_id is not None and len(found) < most:
                response = self._row(owner, next_id)
                if response is None:
                    return next_id
                found.append(response)
                next_id = response.previous_id
            self._touch(owner, [response.id for response in found])
        return found[::-1] if next_id is None else next_id

    def _touch(self, owner: str, ids: Sequence[str]) -> None:
        """Mark responses as used now."""
        if ids:
            with self._database as database:
                used = [(time.time_ns(), owner, response_id) for response_id in ids]
                database.executemany("UPDATE responses SET used_ns = ? WHERE owner = ? AND id = ?", used)

    def _answers_with(self, owner: str, item_ids: Sequence[str]) -> dict[str, str]:
        query = "SELECT responses.id FROM items JOIN responses ON response = number WHERE items.owner = ? AND items.id = ?"
        answers: dict[str, str] = {}
        with self._lock:
            if self._is_closed or not self.limits.num_responses:
                return {}
            for item_id in dict.fromkeys(item_ids):
                found = self._database.execute(query, (owner, item_id)).fetchone() if item_id.isascii() else None
                if found is not None and (response := self._row(owner, found[0])) is not None:
                    answers[item_id] = response.answer
                    self._touch(owner, [response.id])
        return answers

    def _delete(self, owner: str, response_id: str) -> bool:
        with self._lock:
            if self._row(owner, response_id) is None:
                return False
            with self._database as database:
                database.execute("DELETE FROM responses WHERE owner = ? AND id = ?", (owner, response_id))
            return True
