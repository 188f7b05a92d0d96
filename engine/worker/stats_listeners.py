"""Listeners that receive the statistics of each step."""

import logging
from collections.abc import Callable

from engine.core.types import StepStats

_logger = logging.getLogger(__name__)

StatsListener = Callable[[StepStats], None]


class StatsListeners:
    """A list of callables. A failing listener is logged and stays registered: statistics must not stop generation."""

    def __init__(self) -> None:
        self._listeners: list[StatsListener] = []

    def add(self, listener: StatsListener) -> None:
        """Register a listener."""
        self._listeners.append(listener)

    def notify(self, stats: StepStats) -> None:
        """Call every listener with these statistics."""
        for listener in self._listeners:
            try:
                listener(stats)
            except Exception:
                _logger.exception("a listener failed on step %d", stats.step)
