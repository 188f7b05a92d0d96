"""Metrics of the engine's health, read at each scrape: a hung engine sends no steps that could be counted."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.core.service import EngineHealth, EngineState
from server.metrics.constructors import ENGINE, LABELS


class HealthCollector(Collector):
    """Reads the engine's health at each collection."""

    def __init__(self, model_name: str, health: Callable[[], EngineHealth]) -> None:
        self._values = [model_name, ENGINE]
        self._health = health

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        health = self._health()
        states = GaugeMetricFamily("latebranch_engine_state", "1 for the state the engine is in.", labels=[*LABELS, "state"])
        for state in EngineState:
            states.add_metric([*self._values, state.value], float(state is health.state))
        yield states
        restarts = CounterMetricFamily("latebranch_engine_restarts", "Times the engine was started again.", labels=LABELS)
        restarts.add_metric(self._values, health.num_restarts)
        yield restarts
        resumed = CounterMetricFamily(
            "latebranch_resumed_requests", "Samples of a dead engine that the next engine continued.", labels=LABELS
        )
        resumed.add_metric(self._values, health.num_resumed)
        yield resumed
        age = GaugeMetricFamily(
            "latebranch_engine_heartbeat_age_seconds",
            "Seconds since the engine's last heartbeat; absent before the first.",
            labels=LABELS,
        )
        if health.heartbeat_age_s is not None:
            age.add_metric(self._values, health.heartbeat_age_s)
        yield age
