"""One at a time, and keys by turns: nobody waits for more than one turn of each other key, however many another key asks for."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairTurns:
    """Owns who waits. Used on one event loop; a key's own turns come in the order in which they were asked for."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # whose key's turn is next, first
        self._is_taken = False

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Wait for a turn of `key`, and have it until the block is left."""
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
            else:  # the turn came at the same time
                self._pass_on()
            raise

    def _leave(self, key: str, place: asyncio.Future[None]) -> None:
        places = self._waiting.get(key, deque())
        if place in places:
            places.remove(place)
            if not places:
                del self._waiting[key]

    def _pass_on(self) -> None:
        """Give the turn to the key that has waited longest since its last one, if any waits; who has just left has none."""
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
