"""One span a request, beneath the client's own, with its phases; and none unless an endpoint is set."""

from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from server.settings import Settings
from tests.api.harness import MODEL, chat, completion, in_process
from tests.fake_engine import FakeEngine

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENDPOINT = "http://127.0.0.1:9"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    from server.http import otel

    exporter = InMemorySpanExporter()
    monkeypatch.setattr(otel, "otlp_provider", lambda _: otel.provider_of(exporter, SimpleSpanProcessor))
    return exporter


@pytest.mark.parametrize("streams", [False, True])
async def test_sample_phases_are_nested_in_request_span(spans: InMemorySpanExporter, streams: bool):
    async with in_process(FakeEngine(chunks=(1, 2)), otlp_endpoint=ENDPOINT) as client:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        answer = await client.post("/v1/chat/completions", json=chat(n=2, max_tokens=7, stream=streams), headers=headers)
        assert answer.status_code == 200
    finished: Any = spans.get_finished_spans()
    (request,) = [span for span in finished if span.kind is SpanKind.SERVER]
    assert request.name == f"chat {MODEL}"
    assert (request.parent.span_id, request.context.trace_id) == (int(PARENT, 16), int(TRACE, 16))
    assert request.attributes["gen_ai.usage.output_tokens"] == 14
    assert request.attributes["gen_ai.response.finish_reasons"] == ("length", "length")
    assert request.attributes["latebranch.steps"] == 10  # 1 + 2 + 1 + 2 + 1 tokens, twice
    assert request.attributes["http.response.status_code"] == 200
    assert not any("hello" in str(value) for value in request.attributes.values()), "texts stay here"
    phases = [span for span in finished if span is not request]
    assert sorted((span.attributes["latebranch.choice"], span.name) for span in phases) == [
        (choice, name) for choice in (0, 1) for name in ("decode", "prefill", "queue")
    ]
    assert {span.parent.span_id for span in phases} == {request.context.span_id}
    assert all(request.start_time <= span.start_time <= span.end_time <= request.end_time for span in phases)


async def test_every_route_that_generates_is_traced():
    """/v1/messages had no spans."""
    from server.http import otel

    async with in_process(FakeEngine()) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    streamed = {
        path
        for path, methods in paths.items()
        if "text/event-stream" in methods.get("post", {"responses": {}})["responses"].get("200", {}).get("content", {})
    }
    assert streamed == {*otel._OPERATIONS}


async def test_failures_show(spans: InMemorySpanExporter):
    async with in_process(FakeEngine(fail_after=2), otlp_endpoint=ENDPOINT) as client:
        await client.post("/v1/completions", json=completion(max_tokens=7))
        await client.post("/v1/completions", json=completion(max_tokens=-1))
        await client.get("/v1/models")
    finished: Any = spans.get_finished_spans()
    failed, refused = [span for span in finished if span.kind is SpanKind.SERVER]
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.attributes["gen_ai.response.finish_reasons"] == ("error",)
    assert (refused.attributes["http.response.status_code"], refused.status.status_code) == (400, StatusCode.UNSET)


async def test_nothing_is_traced_by_default(spans: InMemorySpanExporter):
    async with in_process(FakeEngine()) as client:
        assert (await client.post("/v1/completions", json=completion())).status_code == 200
    assert spans.get_finished_spans() == ()


def test_missing_otel_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("server.settings.find_spec", lambda _: None)
    with pytest.raises(ValueError, match="extra otel"):
        Settings(otlp_endpoint=ENDPOINT)
