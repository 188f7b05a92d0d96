"""HTTP metrics, named as prometheus_fastapi_instrumentator names them, from a plain ASGI layer."""

import time

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_DURATION_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})
_UNCOUNTED = frozenset({"/metrics", "/health", "/live", "/ready", "/load", "/v1/loads", "/version"})  # frequent probes


class HttpMetrics:
    """The families, and `num_open`: requests that are not answered completely yet, streams included."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.num_open = 0
        labels = ("handler", "method", "status")
        self.requests = Counter("http_requests", "Requests by route, method and status class.", labels, registry=registry)
        self.duration_s = Histogram(
            "http_request_duration_seconds",
            "Seconds to the end of the answer, streams included.",
            ("handler", "method"),
            buckets=_DURATION_BUCKETS,
            registry=registry,
        )

        self.cut_off = Counter(
            "latebranch_clients_cut_off",
            "Connections ended because the client was too slow, or for a new one, by at what.",
            ("at",),
            registry=registry,
        )
        for at in ("sending", "reading", "waiting"):
            self.cut_off.labels(at)

    def cut_off_at(self, at: str) -> None:
        """Count a client that was too slow."""
        self.cut_off.labels(at).inc()

    def observe(self, handler: str, method: str, status: str, seconds: float) -> None:
        """Count one request."""
        self.requests.labels(handler, method, status).inc()
        self.duration_s.labels(handler, method).observe(seconds)


class HttpMeter:
    """Counts requests by the route's template, `none` without a route, so that clients cannot create new series."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["path"] in _UNCOUNTED:
            await self.app(scope, receive, send)
            return
        began_s, status = time.monotonic(), "none"
        self.metrics.num_open += 1

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = f"{message['status'] // 100}xx"
            await send(message)

        try:
            await self.app(scope, receive, watched_send)
        finally:
            self.metrics.num_open -= 1
            handler = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self.metrics.observe(handler, method, status, time.monotonic() - began_s)
