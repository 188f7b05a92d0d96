"""Metrics of the engine's health, read at each scrape: a hung engine sends nothing that could be counted."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.core.service import EngineHealth, EngineState
from server.metrics.families import ENGINE, LABELS


class HealthCollector(Collector):
    """Asks for the engine's health when it is collected."""

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
            "latebranch_resumed_requests", "Samples that a dead engine left and the next one went on with.", labels=LABELS
        )
        resumed.add_metric(self._values, health.num_resumed)
        yield resumed
        age = GaugeMetricFamily(
            "latebranch_engine_heartbeat_age_seconds",
            "Seconds since the engine last said anything; absent before.",
            labels=LABELS,
        )
        if health.heartbeat_age_s is not None:
            age.add_metric(self._values, health.heartbeat_age_s)
        yield age
