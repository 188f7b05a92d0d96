"""Crash recovery: resumes live requests in a new worker and isolates requests that may have killed its predecessors.

A request is quarantined after `max_deaths` deaths in a row. A death counts for a request that took part in the worker's last
step, or that was sent after the worker's last event. Any event of a request clears it. Quarantined requests are retried alone:
the worker runs one of them, together with cleared requests. If it dies, that request is the next to be retried, with no other
request in the worker. If the worker dies again, the request fails. So a culprit costs one or two more deaths, however many
requests are quarantined. Bisection would cost one death per halving.

Knows the entries of the request table. Does not know processes: the client reports when a worker is ready, sends events or dies.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence, Set

from engine.core.types import ErrorCode, Request
from engine.worker.request_table import Entry, RequestTable, TokenEventStream

_logger = logging.getLogger(__name__)


class Recovery:
    """Owns the order in which requests are resumed.

    `post` sends a request to the worker. At most `max_running` requests run there at once.
    """

    def __init__(self, request_table: RequestTable, post: Callable[[Request], None], max_deaths: int, max_running: int) -> None:
        self._request_table = request_table
        self._post = post
        self._max_deaths = max_deaths
        self._max_running = max_running
        self._quarantined: deque[Entry] = deque()
        self._retried_alone: Entry | None = None
        self._unconfirmed: list[Entry] = []  # sent since the worker's last event
        self.num_resumed = 0  # counts a request once for each death that it survived
        self._admits_all = False  # a worker is ready and no request is quarantined

    def submit(self, requests: Sequence[Request]) -> list[TokenEventStream]:
        """Open requests in the request table and send them to the worker unless a request is retried alone there."""
        streams = self._request_table.open(requests, is_posted=False)
        if self._admits_all:
            for stream in streams:
                self._send_to_worker(stream.entry)
        return streams

    def on_ready(self) -> None:
        """Send the first requests to a worker that is ready."""
        quarantined = [entry for entry in self._request_table.entries if entry.num_deaths >= self._max_deaths]
        self._quarantined = deque(sorted(quarantined, key=lambda entry: -entry.num_deaths))
        self._admit()

    def on_events(self) -> None:
        """Call after each StepResult. Sends the next quarantined request once the last is cleared, then all others."""
        self._unconfirmed.clear()
        self._admit()

    def _admit(self) -> None:
        while not self._admits_all and not self._is_retry_running:
            self._retried_alone = None
            if not self._quarantined:
                self._admits_all = True
                for entry in self._request_table.entries:
                    if not entry.is_posted:
                        self._send_to_worker(entry)
            elif self._request_table.num_posted >= self._max_running:
                return  # it would wait in the worker's queue, and a death there would count for it
            elif self._request_table.has(entry := self._quarantined.popleft()):
                self._retried_alone = entry
                _logger.warning("request %s is retried alone after %d deaths", entry.request.request_id, entry.num_deaths)
                self._send_to_worker(entry)

    @property
    def has_quarantined(self) -> bool:
        """Whether a live request may have killed `max_deaths` workers in a row."""
        return any(entry.num_deaths >= self._max_deaths for entry in self._request_table.entries)

    @property
    def _is_retry_running(self) -> bool:
        return (
            self._retried_alone is not None
            and self._retried_alone.num_deaths > 0
            and self._request_table.has(self._retried_alone)
        )

    def _send_to_worker(self, entry: Entry) -> None:
        entry.is_posted = True
        self._unconfirmed.append(entry)
        self._post(entry.as_resumed)

    def on_death(self, running: Set[str] | None, cause: str) -> None:
        """Requeue the requests of a dead worker. Fail a request that was retried there without any other.

        `running` are the ids in the worker's last step; None: unknown.
        """
        self._admits_all = False
        posted = [entry for entry in self._request_table.entries if entry.is_posted]
        retried, self._retried_alone = self._retried_alone, None
        self._request_table.requeue(
            None if running is None else {*running, *(entry.request.request_id for entry in self._unconfirmed)}
        )
        self._unconfirmed.clear()
        self.num_resumed += sum(map(self._request_table.has, posted))
        was_alone = retried is not None and posted == [retried] and self._request_table.has(retried)
        if retried is not None and was_alone and retried.num_deaths > self._max_deaths:
            text = f"{retried.num_deaths} workers died of this request, the last when it ran alone: {cause}"
            _logger.error("request %s failed: %s", retried.request.request_id, text)
            self._request_table.fail(retried, ErrorCode.WORKER_CRASHED, text)
