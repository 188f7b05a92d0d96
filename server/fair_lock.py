"""A lock that keys take in turns: a waiter waits for at most one turn of each other key, however many turns that key requests."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairLock:
    """Owns the waiters of each key. Used on one event loop. Turns of one key are granted in the order of their requests."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # keys in the order of their next turns
        self._is_taken = False

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Wait for a turn of `key`, and hold the lock until the block is left."""
        if self._is_taken:
            await self._wait(key)
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, key: str) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._leave(key, place)
            else:  # the turn was granted at the same time
                self._pass_on()
            raise

    def _leave(self, key: str, place: asyncio.Future[None]) -> None:
        places = self._waiting.get(key, deque())
        if place in places:
            places.remove(place)
            if not places:
                del self._waiting[key]

    def _pass_on(self) -> None:
        """Grant the lock to the waiting key whose last turn is longest ago. Skips a waiter that was just cancelled."""
        self._is_taken = False
        while self._waiting and not self._is_taken:
            key = next(iter(self._waiting))
            places = self._waiting.pop(key)
            place = places.popleft()
            if places:
                self._waiting[key] = places
            if not place.done():
                place.set_result(None)
                self._is_taken = True
