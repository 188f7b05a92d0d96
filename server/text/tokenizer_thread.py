"""The thread that encodes texts, and how many bytes of one API key may wait for it. Knows the size of work, not its content.

Only encoding is confined to this thread, since it changes the tokenizer's state. Decoding is short and changes no state: it runs
on the event loop, with the same tokenizer, also while this thread encodes.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from server.fair_lock import FairLock

_MAX_WAITING_BYTES = 8 * 2**20  # of one key: a few seconds of encoding

T = TypeVar("T")


class TokenizerBusy(Exception):
    """Too much text of a key waits to be encoded."""


class TokenizerClosed(Exception):
    """The thread has ended before the work began."""


class TokenizerThread:
    """Owns the thread: long texts do not block the event loop, and a tokenizer never encodes on two threads at once.

    Keys take turns, one piece of work each. Used on one event loop. Work is dropped if its caller is cancelled before its turn.
    """

    def __init__(self, max_waiting_bytes: int = _MAX_WAITING_BYTES) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._max_waiting_bytes = max_waiting_bytes
        self._turns = FairLock()
        self._waiting_bytes = Counter[str]()
        self._is_closed = False

    async def run(self, num_bytes: int, work: Callable[[], T], key: str = "") -> T:
        """Return the result of `work` on `num_bytes` of a key's text. Raise TokenizerBusy if too much text of the key waits, or
        TokenizerClosed if the thread is closed first.

        If no text of the key waits, work of any size is accepted.
        """
        waiting = self._waiting_bytes[key]
        if waiting and waiting + num_bytes > self._max_waiting_bytes:
            raise TokenizerBusy(f"{waiting} bytes of text wait to be encoded already")
        self._waiting_bytes[key] += num_bytes
        try:
            async with self._turns.turn(key):
                if self._is_closed:
                    raise TokenizerClosed
                return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except asyncio.CancelledError as error:
            if _is_caller_cancelled():
                raise
            raise TokenizerClosed from error  # only `close` cancels the work alone
        finally:
            self._waiting_bytes[key] -= num_bytes

    def close(self) -> None:
        """End the thread. Waiting work is dropped, and its callers get TokenizerClosed."""
        self._is_closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)


def _is_caller_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
