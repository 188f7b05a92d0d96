"""Those who want the numbers of each step."""

import logging
from collections.abc import Callable

from engine.core.types import StepStats

_logger = logging.getLogger(__name__)

Listener = Callable[[StepStats], None]


class Listeners:
    """A list of callables. One that raises is logged and stays: numbers must never stop the tokens."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def add(self, listener: Listener) -> None:
        """Have `listener` called by each `tell`."""
        self._listeners.append(listener)

    def tell(self, stats: StepStats) -> None:
        """Call every listener with these numbers."""
        for listener in self._listeners:
            try:
                listener(stats)
            except Exception:
                _logger.exception("a listener failed on step %d", stats.step)
