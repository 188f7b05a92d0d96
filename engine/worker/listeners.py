"""Listeners that receive what each step reports."""

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from engine.core.types import StepStats

_logger = logging.getLogger(__name__)

Report = TypeVar("Report")
StatsListener = Callable[[StepStats], None]


class Listeners(Generic[Report]):
    """A list of callables. A failing listener is logged and stays registered: reports must not stop generation."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Report], None]] = []

    def add(self, listener: Callable[[Report], None]) -> None:
        """Register a listener."""
        self._listeners.append(listener)

    def notify(self, report: Report) -> None:
        """Call every listener with this report."""
        for listener in self._listeners:
            try:
                listener(report)
            except Exception:
                _logger.exception("a listener failed")
