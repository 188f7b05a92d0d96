"""OpenTelemetry spans: one per request, with children for queue, prefill and decoding of each sample. Needs the extra `otel`.

Names follow the semantic conventions for generative AI and HTTP; our own begin with `latebranch.`. No text is exported.
"""

import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.request_trace import SampleTimes, current_trace

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/infill": "text_completion",
    "/v1/fim/completions": "text_completion",
}


def provider_of(exporter: SpanExporter, processor: type[SpanProcessor] = BatchSpanProcessor) -> TracerProvider:
    """Return a provider of this process's spans. It is not registered as the global provider."""
    resource = Resource.create({"service.name": "latebranch", "service.version": version("latebranch")})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(processor(exporter))  # type: ignore[call-arg]
    return provider


def otlp_provider(endpoint: str) -> TracerProvider:
    """Return a provider that sends spans in batches, from a background thread, to an OTLP/HTTP collector."""
    return provider_of(OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces"))


class Tracing:
    """ASGI layer: a span for each generation request, as a child of the client's span if it sends a `traceparent`."""

    def __init__(self, app: ASGIApp, provider: TracerProvider, model_name: str) -> None:
        self.app = app
        self._tracer = provider.get_tracer("latebranch")
        self._model_name = model_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        operation = _OPERATIONS.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if operation is None:
            await self.app(scope, receive, send)
            return
        span = self._begin(operation, scope)

        async def watched_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                _set_status(span, message["status"])
            await send(message)

        token = current_trace.set(_SpanOfRequest(self._tracer, span))
        try:
            await self.app(scope, receive, watched_send)
        finally:
            current_trace.reset(token)
            span.end()

    def _begin(self, operation: str, scope: Scope) -> Span:
        headers = Headers(scope=scope)
        parent: Context = TraceContextTextMapPropagator().extract(dict(headers.items()))
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "latebranch",
            "gen_ai.request.model": self._model_name,
            "http.request.method": scope["method"],
            "url.path": scope["path"],
        }
        name = f"{operation} {self._model_name}"
        return self._tracer.start_span(name, parent, SpanKind.SERVER, attributes)


def _set_status(span: Span, status: int) -> None:
    span.set_attribute("http.response.status_code", status)
    if status >= 500:  # in the HTTP conventions a 4xx is no error of a server's span
        span.set_attribute("error.type", str(status))
        span.set_status(Status(StatusCode.ERROR))


class _SpanOfRequest:
    """Adds usage to the request's span, and child spans for the phases of its samples."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def generated(self, samples: Sequence[SampleTimes]) -> None:
        """Add usage, and the spans of each sample's phases."""
        attributes: dict[str, Any] = {
            "gen_ai.usage.input_tokens": sum(sample.num_prompt_tokens for sample in samples),
            "gen_ai.usage.output_tokens": sum(sample.num_tokens for sample in samples),
            "gen_ai.response.finish_reasons": [sample.finish for sample in samples],
            "latebranch.steps": sum(sample.num_steps for sample in samples),
        }
        self._span.set_attributes(attributes)
        if any(sample.finish == "error" for sample in samples):
            self._span.set_status(Status(StatusCode.ERROR))
        for index, sample in enumerate(samples):
            self._add_phases(index, sample)

    def _add_phases(self, index: int, sample: SampleTimes) -> None:
        if sample.admitted_s is None or sample.first_token_s is None or sample.last_token_s is None:
            return
        steps = {"latebranch.steps": sample.num_steps, "gen_ai.usage.output_tokens": sample.num_tokens}
        self._add("queue", index, sample.arrival_s, sample.admitted_s, {})
        self._add("prefill", index, sample.admitted_s, sample.first_token_s, {})
        self._add("decode", index, sample.first_token_s, sample.last_token_s, steps)

    def _add(self, name: str, index: int, begin_s: float, end_s: float, attributes: dict[str, int]) -> None:
        begin_ns, end_ns = (self._offset_ns + int(seconds * 1e9) for seconds in (begin_s, end_s))
        context = set_span_in_context(self._span)
        span = self._tracer.start_span(name, context, attributes={"latebranch.choice": index, **attributes}, start_time=begin_ns)
        span.end(end_ns)
