"""Prometheus metrics of one server, in their own registry. docs/metrics.md lists them."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from engine.core.service import EngineHealth
from server.metrics.audit import AuditMetrics
from server.metrics.constructors import Families
from server.metrics.health import HealthCollector
from server.metrics.http import HttpMetrics
from server.metrics.keys import KeyMetrics
from server.metrics.lora import AdapterCollector
from server.metrics.requests import RequestMetrics
from server.metrics.steps import StepMetrics

# Removes the `_created` series of each counter and histogram, which no dashboard reads.
disable_created_metrics()  # type: ignore[no-untyped-call]

__all__ = ["CONTENT_TYPE", "ServerMetrics"]

CONTENT_TYPE = CONTENT_TYPE_LATEST


class ServerMetrics:
    """Owns the registry. Its parts are updated by engine steps, by requests, by HTTP and at each scrape."""

    def __init__(self, model_name: str, max_model_len: int, health: Callable[[], EngineHealth], num_adapters: int = 0) -> None:
        self.registry = CollectorRegistry()
        families = Families(self.registry, model_name)
        self.steps = StepMetrics(families, health)
        self.audit = AuditMetrics(families)
        self.requests = RequestMetrics(families, max_model_len)
        self.http = HttpMetrics(self.registry)
        self.keys = KeyMetrics(self.registry)
        self.registry.register(HealthCollector(model_name, health))
        if num_adapters:
            self.registry.register(AdapterCollector(num_adapters, lambda: self.steps.load))
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def render(self) -> bytes:
        """Return the exposition text."""
        return generate_latest(self.registry)
