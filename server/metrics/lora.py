"""vLLM's gauge of the LoRA adapters in use, which gateways read to route a request to a replica that runs its adapter."""

import time
from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.metrics.steps import EngineLoad

_LABELS = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")


class AdapterCollector(Collector):
    """Reads the load at each collection. The value is the time: a reader takes the latest of several series."""

    def __init__(self, num_adapters: int, load: Callable[[], EngineLoad]) -> None:
        self._num_adapters = num_adapters
        self._load = load

    def collect(self) -> Iterator[Metric]:
        """Yield the gauge, with vLLM's labels and no others."""
        load = self._load()
        gauge = GaugeMetricFamily("vllm:lora_requests_info", "Adapters of running and of waiting requests.", labels=_LABELS)
        adapters = ",".join(load.waiting_adapters), ",".join(load.running_adapters)
        gauge.add_metric([str(self._num_adapters), *adapters], time.time())
        yield gauge
