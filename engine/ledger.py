"""Who waits for which tokens: the living requests, a mailbox each, and how full the house is.

Knows requests and events on the event loop. Does not know where the engine runs or how letters reach it. One owner: the
engine service that made it; everything here happens on that service's event loop.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from engine.config import SchedulerConfig
from engine.service import EngineBusy
from engine.types import FinishReason, Request, TokenEvent

_RECENT_FINISHES = 64  # of the present queue
MIN_RETRY_S, MAX_RETRY_S = 1.0, 30.0
_UNKNOWN_RETRY_S = 5.0


def clamped_retry_s(seconds: float) -> float:
    """Return a polite Retry-After: at least 1 s, at most 30 s."""
    return min(max(seconds, MIN_RETRY_S), MAX_RETRY_S)


@dataclass(slots=True)
class Entry:
    """One living request: what was asked, and what has been emitted. The ledger fills `token_ids`.

    Prompt and emitted tokens lie together so that an unfinished request could be resumed elsewhere. The mailbox needs no
    bound of its own: `max_tokens` bounds it, however slowly it is read.
    """

    request: Request
    token_ids: list[int] = field(default_factory=list)
    mailbox: asyncio.Queue[TokenEvent] = field(default_factory=asyncio.Queue)
    has_begun: bool = False
    is_abandoned: bool = False


class Ledger:
    """Owns the entries. An entry leaves, with exactly one `finish` in its mailbox, by `deliver` or `end_all`."""

    def __init__(
        self, limits: SchedulerConfig, post_abort: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._post_abort = post_abort
        self._clock = clock
        self._living: dict[str, Entry] = {}
        self._marks_s: deque[float] = deque(maxlen=_RECENT_FINISHES)  # when the present queue began, and each finish since
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __len__(self) -> int:
        return len(self._living)

    @property
    def num_waiting(self) -> int:
        """Requests without an event yet, beyond those that the free running places will take."""
        num_begun = sum(entry.has_begun for entry in self._living.values())
        num_places = max(0, self._limits.max_running - num_begun)
        return max(0, len(self._living) - num_begun - num_places)

    @property
    def retry_after_s(self) -> float:
        """Seconds in which the waiting requests would be gone at the rate of finishing since they began to queue.

        Earlier finishes tell nothing: a house that is not full finishes as many as come.
        """
        if len(self._marks_s) < 2:
            return _UNKNOWN_RETRY_S
        span_s = self._clock() - self._marks_s[0]
        return clamped_retry_s(self.num_waiting * span_s / len(self._marks_s))

    def check_room(self, request_id: str) -> None:
        """Raise EngineBusy if the queue is full, ValueError if the id is in use."""
        if request_id in self._living:
            raise ValueError(f"request id {request_id!r} is in use")
        if self.num_waiting >= self._limits.max_waiting:
            raise EngineBusy(f"{self.num_waiting} requests are waiting already", self.retry_after_s)

    def open(self, request: Request) -> "EventStream":
        """Enter a request for which there is room; its letter may be sent once this has returned."""
        if not self.num_waiting:
            self._marks_s.clear()
            self._marks_s.append(self._clock())
        entry = self._living[request.request_id] = Entry(request)
        self._is_empty.clear()
        return EventStream(entry, self.abandon)

    def deliver(self, events: Iterable[TokenEvent]) -> None:
        """Put events into their mailboxes. News of a request that has ended here is dropped."""
        for event in events:
            entry = self._living.get(event.request_id)
            if entry is not None:
                self._put(entry, event)
                if event.finish is not None:
                    self._marks_s.append(self._clock())

    def end_all(self, finish: FinishReason, error: str | None = None) -> None:
        """End every living request here, whatever the engine would still say of it."""
        for entry in list(self._living.values()):
            self._put(entry, TokenEvent(entry.request.request_id, finish=finish, error=error))

    def _put(self, entry: Entry, event: TokenEvent) -> None:
        entry.has_begun = True
        entry.token_ids.extend(event.token_ids)
        if not entry.is_abandoned:
            entry.mailbox.put_nowait(event)
        if event.finish is not None:
            del self._living[event.request_id]
            if not self._living:
                self._is_empty.set()

    def abort(self, request_id: str) -> None:
        """Ask the engine to end a living request; others are ignored."""
        if request_id in self._living:
            self._post_abort(request_id)

    def abandon(self, entry: Entry) -> None:
        """Note that nobody reads this mailbox any more and, if its request still lives, have it aborted.

        The entry stays, and its id stays taken, until the engine has said the end.
        """
        if self._living.get(entry.request.request_id) is entry and not entry.is_abandoned:
            entry.is_abandoned = True
            self._post_abort(entry.request.request_id)

    async def wait_empty(self, timeout_s: float) -> None:
        """Wait until no request lives, for at most `timeout_s`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_empty.wait(), timeout_s)


class EventStream(AsyncGenerator[TokenEvent, None]):
    """One request's events, in order, the last with `finish`. Closing or losing it early abandons the request.

    Not an `async def` generator: the code after such a generator's `yield` does not run if it is closed before its first
    item is asked for. Cancelling a wait for the next event leaves the stream as it was.
    """

    def __init__(self, entry: Entry, abandon: Callable[[Entry], None]) -> None:
        self._entry = entry
        self._abandon = abandon
        self._loop = asyncio.get_running_loop()
        self._is_over = False

    async def asend(self, _value: None) -> TokenEvent:
        """Return the next event."""
        if self._is_over:
            raise StopAsyncIteration
        event = await self._entry.mailbox.get()
        self._is_over = event.finish is not None
        return event

    async def athrow(self, typ: Any, val: BaseException | object = None, tb: TracebackType | None = None) -> TokenEvent:
        """Close, and raise the exception."""
        await self.aclose()
        return await super().athrow(typ, val, tb)

    async def aclose(self) -> None:
        """Abandon the request unless it has ended."""
        self._is_over = True
        self._abandon(self._entry)

    def __del__(self) -> None:
        # A reader that was cancelled drops the stream without closing it; the collector may run in any thread.
        if not self._is_over and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._abandon, self._entry)
