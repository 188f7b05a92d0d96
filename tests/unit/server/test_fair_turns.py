"""Keys have turns one after the other; a cancelled waiter does not delay the others."""

import asyncio
from collections import deque

import pytest

from server.fair_lock import FairLock


class FirstCome(FairLock):
    """The mutant: one queue for all."""

    def turn(self, key: str):
        return super().turn("")


class KeepsItsTurn(FairLock):
    """The mutant: a key goes on until it has nothing more to do."""

    def _pass_on(self):
        first = next(iter(self._waiting), None)
        super()._pass_on()
        if first in self._waiting:
            self._waiting = {first: self._waiting.pop(first), **self._waiting}


class ForgetsTheCancelled(FairLock):
    """The mutant: a turn that comes while its asker is cancelled is lost."""

    async def _wait(self, key: str) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(place)
        await place


class CallsCancelledWaiter(FairLock):
    """The mutant: a turn is given to the first waiter, though it has been cancelled and has not run since."""

    def _pass_on(self):
        self._is_taken = bool(self._waiting)
        if self._waiting:
            key = next(iter(self._waiting))
            places = self._waiting.pop(key)
            places.popleft().set_result(None)
            if places:
                self._waiting[key] = places


async def order_of(turns: FairLock, requested: list[str]) -> list[str]:
    """Return the keys in the order of their turns when all wait during another turn."""
    had: list[str] = []

    async def take(key: str) -> None:
        async with turns.turn(key):
            had.append(key)
            await asyncio.sleep(0)

    async with turns.turn("first"):
        taking = [asyncio.create_task(take(key)) for key in requested]
        await asyncio.sleep(0)
        assert had == []
    await asyncio.gather(*taking)
    return had


async def check_each_key_has_its_turn(kind: type[FairLock]) -> None:
    assert await order_of(kind(), ["a"] * 100 + ["b"] * 2 + ["c"]) == ["a", "b", "c", "a", "b", *["a"] * 98]


async def check_cancelled_waiter_does_not_block(kind: type[FairLock]) -> None:
    turns = kind()

    async def take(key: str) -> str:
        async with turns.turn(key):
            return key

    async with turns.turn("first"):
        before, at_the_end, last = (asyncio.create_task(take(key)) for key in "abc")
        await asyncio.sleep(0)
        before.cancel()
        await asyncio.sleep(0)
    at_the_end.cancel()  # in the very moment in which its turn has come
    assert await asyncio.wait_for(last, 1.0) == "c"
    async with turns.turn("again"):
        assert turns._waiting == {}


async def check_waiter_cancelled_at_turn_does_not_block(kind: type[FairLock]) -> None:
    turns, is_over = kind(), asyncio.Event()

    async def take(key: str) -> str:
        async with turns.turn(key):
            await is_over.wait()
            return key

    holding, leaving, last = (asyncio.create_task(take(key)) for key in "abc")
    await asyncio.sleep(0)
    is_over.set()
    leaving.cancel()  # in the pass of the loop in which the turn is passed on
    assert await asyncio.wait_for(last, 1.0) == "c"
    assert await holding == "a"
    assert leaving.cancelled()
    async with turns.turn("again"):
        assert turns._waiting == {}


@pytest.mark.parametrize("mutant", [FirstCome, KeepsItsTurn])
async def test_each_key_has_its_turn(mutant: type[FairLock]) -> None:
    await check_each_key_has_its_turn(FairLock)
    with pytest.raises(AssertionError):
        await check_each_key_has_its_turn(mutant)


async def test_cancelled_waiter_does_not_block_others() -> None:
    await check_cancelled_waiter_does_not_block(FairLock)
    with pytest.raises((TimeoutError, asyncio.InvalidStateError)):
        await check_cancelled_waiter_does_not_block(ForgetsTheCancelled)


async def test_waiter_cancelled_at_turn_does_not_block() -> None:
    await check_waiter_cancelled_at_turn_does_not_block(FairLock)
    with pytest.raises((TimeoutError, asyncio.InvalidStateError)):
        await check_waiter_cancelled_at_turn_does_not_block(CallsCancelledWaiter)
