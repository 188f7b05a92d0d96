"""Metric families with the labels that every model metric has, and their buckets.

Names, labels and buckets that begin with `vllm:` are vLLM's (v1/metrics/loggers.py), so that its dashboards and the
gateways that read it work here unchanged. Our own begin with `latebranch_`.
"""

from collections.abc import Callable, Sequence
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

ENGINE = "0"  # vLLM's engine index: one engine a server
LABELS = ("model_name", "engine")

FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5),
    *(5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SAMPLES_BUCKETS = (1, 2, 5, 10, 20)
PHASE_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
STEP_TOKENS_BUCKETS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)


def length_buckets(max_model_len: int) -> tuple[int, ...]:
    """Return 1, 2, 5, 10, 20, 50, ... up to the longest sequence."""
    series = (digit * 10**power for power in range(12) for digit in (1, 2, 5))
    return tuple(value for value in series if value <= max_model_len)


class Families:
    """Creates families in one registry, bound to the model's name."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._values = (model_name, ENGINE)

    def counter(self, name: str, text: str) -> Counter:
        """Return a counter."""
        return Counter(name, text, LABELS, registry=self._registry).labels(*self._values)

    def gauge(self, name: str, text: str) -> Gauge:
        """Return a gauge."""
        return Gauge(name, text, LABELS, registry=self._registry).labels(*self._values)

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        """Return a histogram."""
        return Histogram(name, text, LABELS, buckets=buckets, registry=self._registry).labels(*self._values)

    def counters(self, name: str, text: str, label: str, known: Sequence[str] = ()) -> Callable[[str], Counter]:
        """Return counters with one more label; `known` values are present from the start, at zero."""
        family = Counter(name, text, (*LABELS, label), registry=self._registry)
        for value in known:
            family.labels(*self._values, value)
        return cache(lambda value: family.labels(*self._values, value))

    def counters_by(self, name: str, text: str, labels: Sequence[str]) -> Callable[..., Counter]:
        """Return counters with several more labels, whose values are given in order."""
        family = Counter(name, text, (*LABELS, *labels), registry=self._registry)
        return cache(lambda *values: family.labels(*self._values, *values))

    def histograms(self, name: str, text: str, label: str, buckets: Sequence[float]) -> Callable[[str], Histogram]:
        """Return histograms with one more label."""
        family = Histogram(name, text, (*LABELS, label), buckets=buckets, registry=self._registry)
        return cache(lambda value: family.labels(*self._values, value))

    def info(self, name: str, text: str, facts: dict[str, str]) -> None:
        """Show facts as the labels of a gauge that is 1."""
        family = Gauge(name, text, (*LABELS, *facts), registry=self._registry)
        family.labels(*self._values, *facts.values()).set(1)
