"""Who waits for which tokens: the living requests, a mailbox each, and how full the house is.

Knows requests and events on the event loop. Does not know where the engine runs or how letters reach it. One owner: the
engine service that made it; everything here happens on that service's event loop.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence, Set, ValuesView
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from engine.core.config import SchedulerConfig
from engine.core.service import UNKNOWN_RETRY_S, EngineBusy
from engine.core.types import ErrorCode, FinishReason, Progress, Request, TokenEvent
from engine.worker.queue_displacement import QueuedShare, displaced

_RECENT_FINISHES = 64  # of the present queue
MIN_RETRY_S, MAX_RETRY_S = 1.0, 30.0


def clamped_retry_s(seconds: float) -> float:
    """Return a polite Retry-After: at least 1 s, at most 30 s."""
    return min(max(seconds, MIN_RETRY_S), MAX_RETRY_S)


@dataclass(slots=True, eq=False)
class Siblings:
    """What requests have in common that were submitted together, the choices of one answer. `has_begun`: any of them has."""

    has_begun: bool = False


@dataclass(slots=True, eq=False)
class Entry:
    """One living request: what was asked, and what has been told. The ledger fills all but `is_posted`.

    Prompt and emitted tokens lie together so that an unfinished request can be resumed by another engine. `is_posted`: an engine
    has it. `num_deaths` counts the engines in whose last step it took part, since the last time something got out. The mailbox
    needs no bound of its own: `max_tokens` bounds it, however slowly it is read.
    """

    request: Request
    siblings: Siblings
    is_posted: bool
    token_ids: list[int] = field(default_factory=list)
    num_prompt_logprobs: int = 0
    num_deaths: int = 0
    mailbox: asyncio.Queue[TokenEvent] = field(default_factory=asyncio.Queue)
    has_begun: bool = False
    is_unwanted: bool = False  # an abort has been asked for
    is_abandoned: bool = False  # nobody reads the mailbox either

    @property
    def as_resumed(self) -> Request:
        """The request as the next engine is to see it: what has been told is history."""
        return replace(self.request, progress=Progress(tuple(self.token_ids), self.num_prompt_logprobs))


class RequestTable:
    """Owns the entries. An entry leaves with exactly one `finish` in its mailbox, that of the engine or one that is put here."""

    def __init__(
        self, limits: SchedulerConfig, post_abort: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._post_abort = post_abort
        self._clock = clock
        self._living: dict[str, Entry] = {}
        self._num_begun = 0  # of the living
        self._num_unbegun_tokens = 0  # of the prompts of the others
        self._marks_s: deque[float] = deque(maxlen=_RECENT_FINISHES)  # when the present queue began, and each finish since
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __len__(self) -> int:
        return len(self._living)

    @property
    def entries(self) -> ValuesView[Entry]:
        """The living requests, oldest first."""
        return self._living.values()

    def has(self, entry: Entry) -> bool:
        """Return whether this very request still lives."""
        return self._living.get(entry.request.request_id) is entry

    @property
    def num_posted(self) -> int:
        """Living requests that an engine has."""
        return sum(entry.is_posted for entry in self._living.values())

    @property
    def _waiting(self) -> list[Entry]:
        """The requests of which `num_waiting` is the number, oldest first; takes as long as there are many."""
        waiting = [entry for entry in self._living.values() if not entry.has_begun]
        return waiting[len(waiting) - self.num_waiting :]

    @property
    def num_waiting(self) -> int:
        """Requests without an event yet, beyond those that the free running places will take."""
        num_places = max(0, self._limits.max_running - self._num_begun)
        return max(0, len(self._living) - self._num_begun - num_places)

    @property
    def retry_after_s(self) -> float:
        """Seconds in which the waiting requests would be gone at the rate of finishing since they began to queue.

        Earlier finishes tell nothing: a house that is not full finishes as many as come.
        """
        if len(self._marks_s) < 2:
            return UNKNOWN_RETRY_S
        span_s = self._clock() - self._marks_s[0]
        return clamped_retry_s(self.num_waiting * span_s / len(self._marks_s))

    def make_room(self, requests: Sequence[Request]) -> None:
        """Return if there is room for the requests of one answer; raise EngineBusy if not, ValueError if an id is in use.

        Keys share a full queue evenly: while others hold more of it than that of `requests` would, answers of theirs are ended to
        make room, each with all its requests. Nobody's is ended for requests that are refused.
        """
        for request in requests:
            if request.request_id in self._living:
                raise ValueError(f"request id {request.request_id!r} is in use")
        if self._has_room(requests):
            return
        queue: dict[Siblings, list[Entry]] = {}
        for entry in self._waiting:
            queue.setdefault(entry.siblings, []).append(entry)
        claims = [_claim([entry.request for entry in waiting], siblings.has_begun) for siblings, waiting in queue.items()]
        victims = displaced(claims, _claim(requests), self._limits)
        if victims is None:
            raise EngineBusy(f"{self.num_waiting} requests are waiting already", self.retry_after_s)
        answers = list(queue)
        self._displace({answers[victim] for victim in victims})

    def _has_room(self, requests: Sequence[Request]) -> bool:
        """Return whether the queue takes more requests as it is: of any length where nobody waits."""
        num_waiting = len(self._living) + len(requests) - max(self._num_begun, self._limits.max_running)
        num_tokens = self._num_unbegun_tokens + sum(len(request.prompt_ids) for request in requests)
        is_short = num_tokens <= self._limits.max_waiting_tokens or not self.num_waiting
        return num_waiting <= self._limits.max_waiting and is_short

    def _displace(self, answers: Set[Siblings]) -> None:
        """End answers whole: a choice that runs on is one that nobody will read."""
        for entry in [entry for entry in self._living.values() if entry.siblings in answers]:
            self.fail(entry, ErrorCode.DISPLACED, "the queue is full, and other keys have fewer requests in it")
            if entry.is_posted:
                self._post_abort(entry.request.request_id)

    def open(self, requests: Sequence[Request], is_posted: bool = True) -> "list[EventStream]":
        """Enter the requests of one answer, for which there is room; letters are to be sent after this, or when they can be."""
        if not self.num_waiting:
            self._marks_s.clear()
            self._marks_s.append(self._clock())
        siblings = Siblings()
        entries = [Entry(request, siblings, is_posted) for request in requests]
        self._living.update((entry.request.request_id, entry) for entry in entries)
        self._num_unbegun_tokens += sum(len(request.prompt_ids) for request in requests)
        self._is_empty.clear()
        return [EventStream(entry, self.abandon) for entry in entries]

    def deliver(self, events: Iterable[TokenEvent]) -> None:
        """Put events into their mailboxes. News of a request that has ended here is dropped."""
        for event in events:
            entry = self._living.get(event.request_id)
            if entry is not None:
                self._put(entry, event)
                if event.finish is not None:
                    self._marks_s.append(self._clock())

    def recall(self, running: Set[str] | None) -> None:
        """Take the requests back from an engine that is dead; end those that nobody wants any more.

        `running` took part in its last step; None if that is not known: any of them may have.
        """
        for entry in list(self._living.values()):
            if entry.is_posted and (running is None or entry.request.request_id in running):
                entry.num_deaths += 1
            entry.is_posted = False
            if entry.is_unwanted:
                self._put(entry, TokenEvent(entry.request.request_id, finish=FinishReason.ABORT))

    def fail(self, entry: Entry, code: ErrorCode, error: str) -> None:
        """End a living request with an error."""
        self._put(entry, TokenEvent(entry.request.request_id, finish=FinishReason.ERROR, error=error, error_code=code))

    def fail_all(self, code: ErrorCode, error: str) -> None:
        """End every living request with an error, whatever the engine would still say of it."""
        for entry in list(self._living.values()):
            self.fail(entry, code, error)

    def abort_all(self) -> None:
        """End every living request with ABORT, whatever the engine would still say of it."""
        for entry in list(self._living.values()):
            self._put(entry, TokenEvent(entry.request.request_id, finish=FinishReason.ABORT))

    def _put(self, entry: Entry, event: TokenEvent) -> None:
        if not entry.has_begun:
            entry.has_begun = entry.siblings.has_begun = True
            self._num_begun += 1
            self._num_unbegun_tokens -= len(entry.request.prompt_ids)
        entry.num_deaths = 0
        entry.token_ids.extend(event.token_ids)
        entry.num_prompt_logprobs += len(event.prompt_logprobs)
        if not entry.is_abandoned:
            entry.mailbox.put_nowait(event)
        if event.finish is not None:
            del self._living[event.request_id]
            self._num_begun -= 1
            if not self._living:
                self._is_empty.set()

    def abort(self, request_id: str) -> None:
        """Ask that a living request end; others are ignored. Without an engine that has it, it ends here."""
        entry = self._living.get(request_id)
        if entry is None:
            return
        entry.is_unwanted = True
        if entry.is_posted:
            self._post_abort(request_id)
        else:
            self._put(entry, TokenEvent(request_id, finish=FinishReason.ABORT))

    def abandon(self, entry: Entry) -> None:
        """Note that nobody reads this mailbox any more and, if its request still lives, have it aborted.

        The entry stays, and its id stays taken, until the engine that has it has said the end.
        """
        if self.has(entry) and not entry.is_abandoned:
            entry.is_abandoned = True
            self.abort(entry.request.request_id)

    async def wait_empty(self, timeout_s: float) -> None:
        """Wait until no request lives, for at most `timeout_s`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_empty.wait(), timeout_s)


def _claim(requests: Sequence[Request], has_begun: bool = False) -> QueuedShare:
    first, num_tokens = requests[0], sum(len(request.prompt_ids) for request in requests)
    return QueuedShare(first.group, first.priority, len(requests), num_tokens, has_begun)


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

    @property
    def entry(self) -> Entry:
        """Its place in the ledger."""
        return self._entry

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
