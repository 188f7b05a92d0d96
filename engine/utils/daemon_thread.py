"""Work in a thread that does not delay the exit of the process: fetching weights can take minutes."""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

_logger = logging.getLogger(__name__)

T = TypeVar("T")


async def in_daemon_thread(work: Callable[[], T], name: str) -> T:
    """Return the result of `work`, or raise its error. A cancelled caller leaves the thread to itself."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(method: Callable[[Any], None], value: Any) -> None:
        if not outcome.done():  # done: the waiting task was cancelled
            method(value)

    def post(method: Callable[[Any], None], value: Any) -> None:
        with suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(settle, method, value)

    def run() -> None:
        try:
            post(outcome.set_result, work())
        except Exception as error:
            _logger.debug("%s failed", name, exc_info=True)
            post(outcome.set_exception, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await outcome
