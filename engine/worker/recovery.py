"""Which living requests a new worker is given, and when: those that may have killed its predecessors first, and one at a time.

A request is a suspect once `max_deaths` workers in a row died over it, in a step that it took part in or before they said a word
after they got it, and it got nothing out in between: a token that gets out acquits. While there are suspects nothing is in the
worker but one of them, on trial, and those acquitted. Who was on trial at a death is the first of the next trials, with nobody
beside it, and is given up if that brings death again. So a culprit is found by one death or two, whatever the number of
suspects; halving groups would cost a death for each half.

Knows the ledger's entries. Does not know processes: the client says when a worker is ready, has spoken or is dead.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence, Set

from engine.core.types import ErrorCode, Request
from engine.worker.request_table import Entry, EventStream, RequestTable

_logger = logging.getLogger(__name__)


class Recovery:
    """Owns the order of return. `post` sends a request to the worker that is ready; `max_running` have a place in it at once."""

    def __init__(self, request_table: RequestTable, post: Callable[[Request], None], max_deaths: int, max_running: int) -> None:
        self._request_table = request_table
        self._post = post
        self._max_deaths = max_deaths
        self._max_running = max_running
        self._quarantined: deque[Entry] = deque()
        self._retried_alone: Entry | None = None
        self._unheard: list[Entry] = []  # handed over since the worker last spoke
        self.num_resumed = 0  # requests taken back from dead workers, each as often as it was
        self._is_open = False  # a worker is ready, and nobody is on trial

    def enter(self, requests: Sequence[Request]) -> list[EventStream]:
        """Enter requests for which the ledger has room, and give them to the worker unless somebody is on trial there."""
        streams = self._request_table.open(requests, is_posted=False)
        if self._is_open:
            for stream in streams:
                self._hand_over(stream.entry)
        return streams

    def begin(self) -> None:
        """Give a worker that is ready its first requests."""
        suspects = [entry for entry in self._request_table.entries if entry.num_deaths >= self._max_deaths]
        self._quarantined = deque(sorted(suspects, key=lambda entry: -entry.num_deaths))
        self._admit()

    def go_on(self) -> None:
        """Call after each news of the worker: the next suspect's turn comes when the last one is acquitted, then everybody's."""
        self._unheard.clear()
        self._admit()

    def _admit(self) -> None:
        while not self._is_open and not self._is_trying:
            self._retried_alone = None
            if not self._quarantined:
                self._is_open = True
                for entry in self._request_table.entries:
                    if not entry.is_posted:
                        self._hand_over(entry)
            elif self._request_table.num_posted >= self._max_running:
                return  # it would wait there, and be blamed for a death in which it had no part
            elif self._request_table.has(suspect := self._quarantined.popleft()):
                self._retried_alone = suspect
                _logger.warning("request %s is on trial after %d deaths", suspect.request.request_id, suspect.num_deaths)
                self._hand_over(suspect)

    @property
    def has_suspects(self) -> bool:
        """Whether a living request may have killed `max_deaths` workers in a row."""
        return any(entry.num_deaths >= self._max_deaths for entry in self._request_table.entries)

    @property
    def _is_trying(self) -> bool:
        return (
            self._retried_alone is not None
            and self._retried_alone.num_deaths > 0
            and self._request_table.has(self._retried_alone)
        )

    def _hand_over(self, entry: Entry) -> None:
        entry.is_posted = True
        self._unheard.append(entry)
        self._post(entry.as_resumed)

    def end(self, running: Set[str] | None, cause: str) -> None:
        """Take back what a dead worker had, `running` in its last step (None: unknown); give up who was there alone, on trial."""
        self._is_open = False
        taken = [entry for entry in self._request_table.entries if entry.is_posted]
        suspect, self._retried_alone = self._retried_alone, None
        self._request_table.recall(
            None if running is None else {*running, *(entry.request.request_id for entry in self._unheard)}
        )
        self._unheard.clear()
        self.num_resumed += sum(map(self._request_table.has, taken))
        if (
            suspect is not None
            and taken == [suspect]
            and self._request_table.has(suspect)
            and suspect.num_deaths > self._max_deaths
        ):
            text = f"{suspect.num_deaths} workers died of this request, the last when it ran alone: {cause}"
            _logger.error("request %s is given up: %s", suspect.request.request_id, text)
            self._request_table.fail(suspect, ErrorCode.WORKER_CRASHED, text)
