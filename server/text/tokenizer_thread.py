"""The one thread on which texts become ids, and how much of a key may wait for it. Knows work and its size, not what the work is.

Only encoding is confined to it, since it changes the tokenizer's state. Decoding is short and changes nothing: it is done on the
event loop, with the same tokenizer, also while this thread encodes.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from server.fair_lock import FairTurns

_MAX_WAITING_BYTES = 8 * 2**20  # of one key: a few seconds of encoding

T = TypeVar("T")


class TokenizerBusy(Exception):
    """As much text of a key waits to be encoded as may."""


class TokenizerClosed(Exception):
    """The thread has ended before the work's turn."""


class TokenizerThread:
    """Owns the thread: long texts do not stop the event loop, and a tokenizer is not asked to encode on two threads at once.

    Keys have turns, a piece of work each. Used on one event loop. Work whose asker is cancelled before its turn is never done.
    """

    def __init__(self, max_waiting_bytes: int = _MAX_WAITING_BYTES) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._max_waiting_bytes = max_waiting_bytes
        self._turns = FairTurns()
        self._waiting_bytes = Counter[str]()
        self._is_closed = False

    async def run(self, num_bytes: int, work: Callable[[], T], key: str = "") -> T:
        """Return what `work` on that many bytes of a key's text returns; raise TokenizerBusy if too much of it waits already,
        TokenizerClosed if it will not be done.

        Nothing of the key waits: it is taken, however large.
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
            if _is_asker_cancelled():
                raise
            raise TokenizerClosed from error  # only `close` cancels the work alone
        finally:
            self._waiting_bytes[key] -= num_bytes

    def close(self) -> None:
        """End the thread; work that waits is dropped, and its askers are told."""
        self._is_closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)


def _is_asker_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
