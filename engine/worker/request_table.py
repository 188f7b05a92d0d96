"""The table of live requests: one mailbox each, and the limits of the queue.

Knows requests and events. Does not know where the engine runs or how commands reach it. Its one owner is the engine service
that created it, and it is used on that service's event loop only.
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
from engine.worker.queue_displacement import QueuedShare, displaced_shares

_RECENT_FINISHES = 64  # of the current queue
MIN_RETRY_S, MAX_RETRY_S = 1.0, 30.0


def clamped_retry_s(seconds: float) -> float:
    """Return a Retry-After between MIN_RETRY_S and MAX_RETRY_S."""
    return min(max(seconds, MIN_RETRY_S), MAX_RETRY_S)


@dataclass(slots=True, eq=False)
class Submission:
    """State shared by requests that were submitted together. `has_begun`: one of them has had an event."""

    has_begun: bool = False


@dataclass(slots=True, eq=False)
class Entry:
    """One live request and the tokens emitted so far. The request table sets all fields but `is_posted`.

    Request and emitted tokens are stored together so that another engine can resume the request. `is_posted`: an engine has it.
    `num_deaths` counts the engines that died in a step with it since its last event. The mailbox is bounded by `max_tokens`.
    """

    request: Request
    submission: Submission
    is_posted: bool
    token_ids: list[int] = field(default_factory=list)
    num_prompt_logprobs: int = 0
    num_deaths: int = 0
    mailbox: asyncio.Queue[TokenEvent] = field(default_factory=asyncio.Queue)
    has_begun: bool = False
    is_aborted: bool = False  # an abort was requested
    is_abandoned: bool = False  # aborted, and its mailbox is no longer read

    @property
    def as_resumed(self) -> Request:
        """The request for the next engine, with the output so far as its progress, behind that of engines before this table.

        Once an engine has died, it needs each event: a request that ends engines is found by its deaths since its last event.
        """
        earlier = self.request.progress
        num_logprobs = earlier.num_prompt_logprobs + self.num_prompt_logprobs
        progress = Progress((*earlier.token_ids, *self.token_ids), num_logprobs)
        needs_each_event = self.request.needs_each_event or bool(self.token_ids or self.num_deaths)
        return replace(self.request, progress=progress, needs_each_event=needs_each_event)


class RequestTable:
    """Owns the entries. An entry is removed with exactly one `finish` event, from the engine or created here."""

    def __init__(
        self, limits: SchedulerConfig, post_abort: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._post_abort = post_abort
        self._clock = clock
        self._live: dict[str, Entry] = {}
        self._num_begun = 0  # live requests with an event
        self._num_unbegun_tokens = 0  # prompt tokens of the others
        self._finish_times_s: deque[float] = deque(
            maxlen=_RECENT_FINISHES
        )  # the start of the current queue and each finish since
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __len__(self) -> int:
        return len(self._live)

    @property
    def entries(self) -> ValuesView[Entry]:
        """The live requests, oldest first."""
        return self._live.values()

    def has(self, entry: Entry) -> bool:
        """Return whether this entry is still live."""
        return self._live.get(entry.request.request_id) is entry

    @property
    def num_posted(self) -> int:
        """Live requests that an engine has."""
        return sum(entry.is_posted for entry in self._live.values())

    @property
    def _waiting(self) -> list[Entry]:
        """The waiting requests, oldest first. Takes time linear in the number of live requests."""
        waiting = [entry for entry in self._live.values() if not entry.has_begun]
        return waiting[len(waiting) - self.num_waiting :]

    @property
    def num_waiting(self) -> int:
        """Requests without an event, minus the free places in the running batch."""
        num_places = max(0, self._limits.max_running - self._num_begun)
        return max(0, len(self._live) - self._num_begun - num_places)

    @property
    def retry_after_s(self) -> float:
        """Estimated seconds until the waiting requests have finished, at the finish rate since the queue formed.

        Earlier finishes are no measure: without a queue the finish rate is the arrival rate.
        """
        if len(self._finish_times_s) < 2:
            return UNKNOWN_RETRY_S
        span_s = self._clock() - self._finish_times_s[0]
        return clamped_retry_s(self.num_waiting * span_s / len(self._finish_times_s))

    def make_room(self, requests: Sequence[Request]) -> None:
        """Make room in the queue for requests that are submitted together.

        Keys share a full queue evenly: submissions of keys with a larger share are displaced (engine.worker.queue_displacement).
        Raises EngineBusy if that does not make enough room, and displaces nothing then. Raises ValueError if an id is in use.
        """
        for request in requests:
            if request.request_id in self._live:
                raise ValueError(f"request id {request.request_id!r} is in use")
        if self._has_room(requests):
            return
        queue: dict[Submission, list[Entry]] = {}
        for entry in self._waiting:
            queue.setdefault(entry.submission, []).append(entry)
        shares = [_share_of([entry.request for entry in waiting], submission.has_begun) for submission, waiting in queue.items()]
        displaced = displaced_shares(shares, _share_of(requests), self._limits)
        if displaced is None:
            raise EngineBusy(f"{self.num_waiting} requests are waiting already", self.retry_after_s)
        submissions = list(queue)
        self._displace({submissions[index] for index in displaced})

    def _has_room(self, requests: Sequence[Request]) -> bool:
        """Return whether the queue has room for the requests. An empty queue has room for prompts of any length."""
        num_waiting = len(self._live) + len(requests) - max(self._num_begun, self._limits.max_running)
        num_tokens = self._num_unbegun_tokens + sum(len(request.prompt_ids) for request in requests)
        is_short = num_tokens <= self._limits.max_waiting_tokens or not self.num_waiting
        return num_waiting <= self._limits.max_waiting and is_short

    def _displace(self, submissions: Set[Submission]) -> None:
        """Fail all requests of the submissions, also running requests: their client gets an error in any case."""
        for entry in [entry for entry in self._live.values() if entry.submission in submissions]:
            self.fail(entry, ErrorCode.DISPLACED, "the queue is full, and other keys have fewer requests in it")
            if entry.is_posted:
                self._post_abort(entry.request.request_id)

    def open(self, requests: Sequence[Request], is_posted: bool = True) -> "list[TokenEventStream]":
        """Add requests that are submitted together. There must be room. The caller sends them to the engine afterwards."""
        if not self.num_waiting:
            self._finish_times_s.clear()
            self._finish_times_s.append(self._clock())
        submission = Submission()
        entries = [Entry(request, submission, is_posted) for request in requests]
        self._live.update((entry.request.request_id, entry) for entry in entries)
        self._num_unbegun_tokens += sum(len(request.prompt_ids) for request in requests)
        self._is_empty.clear()
        return [TokenEventStream(entry, self.abandon) for entry in entries]

    def deliver(self, events: Iterable[TokenEvent]) -> None:
        """Put events into their mailboxes. Events of requests that are not live are dropped."""
        for event in events:
            entry = self._live.get(event.request_id)
            if entry is not None:
                self._put(entry, event)
                if event.finish is not None:
                    self._finish_times_s.append(self._clock())

    def requeue(self, running: Set[str] | None) -> None:
        """Mark all requests as not posted after the death of an engine, and end aborted requests.

        `running` are the ids in the engine's last step; None: unknown, so any request may have taken part.
        """
        for entry in list(self._live.values()):
            if entry.is_posted and (running is None or entry.request.request_id in running):
                entry.num_deaths += 1
            entry.is_posted = False
            if entry.is_aborted:
                self._put(entry, TokenEvent(entry.request.request_id, finish=FinishReason.ABORT))

    def fail(self, entry: Entry, code: ErrorCode, error: str) -> None:
        """End a live request with an error."""
        self._put(entry, TokenEvent(entry.request.request_id, finish=FinishReason.ERROR, error=error, error_code=code))

    def fail_all(self, code: ErrorCode, error: str) -> None:
        """End every live request with an error. Later events of the engine are dropped."""
        for entry in list(self._live.values()):
            self.fail(entry, code, error)

    def abort_all(self) -> None:
        """End every live request with ABORT. Later events of the engine are dropped."""
        for entry in list(self._live.values()):
            self._put(entry, TokenEvent(entry.request.request_id, finish=FinishReason.ABORT))

    def _put(self, entry: Entry, event: TokenEvent) -> None:
        if not entry.has_begun:
            entry.has_begun = entry.submission.has_begun = True
            self._num_begun += 1
            self._num_unbegun_tokens -= len(entry.request.prompt_ids)
        entry.num_deaths = 0
        entry.token_ids.extend(event.token_ids)
        entry.num_prompt_logprobs += len(event.prompt_logprobs)
        if not entry.is_abandoned:
            entry.mailbox.put_nowait(event)
        if event.finish is not None:
            del self._live[event.request_id]
            self._num_begun -= 1
            if not self._live:
                self._is_empty.set()

    def abort(self, request_id: str) -> None:
        """Abort a live request; other ids are ignored. A request that no engine has ends at once."""
        entry = self._live.get(request_id)
        if entry is None:
            return
        entry.is_aborted = True
        if entry.is_posted:
            self._post_abort(request_id)
        else:
            self._put(entry, TokenEvent(request_id, finish=FinishReason.ABORT))

    def abandon(self, entry: Entry) -> None:
        """Stop filling this mailbox and abort its request if it is live.

        The entry stays, and its id stays in use, until the engine has ended the request.
        """
        if self.has(entry) and not entry.is_abandoned:
            entry.is_abandoned = True
            self.abort(entry.request.request_id)

    async def wait_empty(self, timeout_s: float) -> None:
        """Wait until no request is live, for at most `timeout_s`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_empty.wait(), timeout_s)


def _share_of(requests: Sequence[Request], has_begun: bool = False) -> QueuedShare:
    first, num_tokens = requests[0], sum(len(request.prompt_ids) for request in requests)
    return QueuedShare(first.group, first.priority, len(requests), num_tokens, has_begun)


class TokenEventStream(AsyncGenerator[TokenEvent, None]):
    """One request's events, in order, the last with `finish`. Closing or dropping the stream early abandons the request.

    Not an `async def` generator, whose cleanup code does not run if it is closed before the first item is requested.
    Cancelling a wait for the next event does not change the stream.
    """

    def __init__(self, entry: Entry, abandon: Callable[[Entry], None]) -> None:
        self._entry = entry
        self._abandon = abandon
        self._loop = asyncio.get_running_loop()
        self._is_over = False

    @property
    def entry(self) -> Entry:
        """The request's entry in the request table."""
        return self._entry

    async def asend(self, _value: None) -> TokenEvent:
        """Return the next event."""
        if self._is_over:
            raise StopAsyncIteration
        event = await self._entry.mailbox.get()
        self._is_over = event.finish is not None
        return event

    async def athrow(self, typ: Any, val: BaseException | object = None, tb: TracebackType | None = None) -> TokenEvent:
        """Close the stream and raise the exception."""
        await self.aclose()
        return await super().athrow(typ, val, tb)

    async def aclose(self) -> None:
        """Abandon the request unless it has ended."""
        self._is_over = True
        self._abandon(self._entry)

    def __del__(self) -> None:
        # A cancelled reader drops the stream without closing it. The garbage collector may run in any thread.
        if not self._is_over and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._abandon, self._entry)
