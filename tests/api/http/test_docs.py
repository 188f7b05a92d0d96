"""/docs shows Swagger UI from this server alone, without a key; the schema marks operations with one. HEAD answers as GET."""

import json
import re

import httpx
import pytest
from pydantic import SecretStr

from server.routes import docs, playground
from tests.api.harness import completion, in_process, over_loopback
from tests.fake_engine import FakeEngine

needs_files = pytest.mark.skipif(not docs.is_installed(), reason="fastapi-swagger is not installed")
KEYS = (SecretStr("some-key"),)


@needs_files
async def test_docs_page_loads_locally_without_key():
    """The bug: the page loaded its scripts from a CDN, without a policy, and required a key that a browser cannot send."""
    async with in_process(FakeEngine(), api_keys=KEYS) as client:
        answers = {path: await client.get(path) for path in sorted(docs.PATHS)}
        policies = {answer.headers["content-security-policy"] for answer in answers.values()}
        assert policies == {(await client.get("/")).headers["content-security-policy"]}
        assert all(answer.status_code == 200 for answer in answers.values())
        loaded = set(re.findall(r'(?:src|href|url)(?:=|: )"([^"]+)"', answers["/docs"].text + answers["/docs/start.js"].text))
        assert {"/" + path for path in loaded if not path.startswith("data:")} == docs.PATHS - docs.PAGES
        assert "<style" not in answers["/docs"].text
        assert not re.search(r"<script>|https?:", answers["/docs"].text + answers["/docs/start.js"].text)
        assert answers["/docs/swagger-ui-bundle.js"].text.count("SwaggerUIBundle") > 0
        closed = await client.get("/openapi.json", headers={"Authorization": "Bearer some-key"})
        assert answers["/docs/openapi.json"].json() == closed.json()
        assert (await client.get("/docs/main.py")).status_code == 401
    async with in_process(FakeEngine()) as client:
        for name in ("main.py", "..%2fmain.py", "favicon-32x32.png"):
            assert (await client.get(f"/docs/{name}")).status_code == 404


async def test_the_page_can_be_switched_off():
    async with in_process(FakeEngine(), docs=False) as client:
        for path in docs.PATHS:
            assert (await client.get(path)).status_code == 404
    async with in_process(FakeEngine(), docs=False, api_keys=KEYS) as client:
        for path in docs.PATHS:
            assert (await client.get(path)).status_code == 401


async def test_a_missing_package_is_no_failure(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(docs, "_PACKAGE", "no_such_package")
    async with in_process(FakeEngine()) as client:
        assert (await client.get("/docs")).status_code == 404
    assert "fastapi-swagger is not installed" in caplog.text


async def test_schema_marks_operations_requiring_a_key():
    async with in_process(FakeEngine(), api_keys=KEYS) as client:
        document = (await client.get("/openapi.json", headers={"Authorization": "Bearer some-key"})).json()
        assert document["components"]["securitySchemes"] == {
            "ApiKey": {"type": "http", "scheme": "bearer"},
            "XApiKey": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
        }
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                answer = await client.request(method, path)
                assert (answer.status_code == 401) == bool(operation["security"]), path
    async with in_process(FakeEngine()) as client:
        assert "securitySchemes" not in (await client.get("/openapi.json")).json()["components"]


async def test_head_is_answered_wherever_get_is(caplog: pytest.LogCaptureFixture):
    """The bug: HEAD was 405 on every route, which probes and link checkers send."""
    async with over_loopback(FakeEngine()) as url, in_process(FakeEngine()) as inside:
        async with httpx.AsyncClient(base_url=url) as client:
            document = (await client.get("/openapi.json")).json()
            gets = [path for path, operations in document["paths"].items() if "get" in operations and "{" not in path]
            for path in (*gets, *playground.PATHS, "/openapi.json", "/v1/models/fake", "/nowhere"):
                head, get = await client.head(path), await client.get(path)
                assert head.status_code == get.status_code
                assert head.content == b""
                assert head.headers["content-type"] == get.headers["content-type"]
            assert (await client.head("/v1/completions")).status_code == 405
            assert (
                'http_requests_total{handler="/v1/models",method="HEAD",status="2xx"} 1.0' in (await client.get("/metrics")).text
            )
        caplog.set_level("INFO", "server.access")
        assert (await inside.head("/live")).content == b""
        assert caplog.records[-1].getMessage().startswith("HEAD /live 200")


async def test_every_answer_declares_its_type():
    async with in_process(FakeEngine(), api_keys=KEYS, max_body_bytes=1024) as client:
        headers = {"Authorization": "Bearer some-key"}
        answers = [
            *[await client.get(path, headers=headers) for path in ("/", "/live", "/metrics", "/v1/models", "/nowhere")],
            await client.get("/v1/models"),
            await client.get("/live", headers={"Origin": "https://page.test"}),
            await client.post("/v1/completions", json=completion(), headers=headers),
            await client.post("/v1/completions", json=completion(stream=True), headers=headers),
            await client.post("/v1/completions", json=completion(prompt="x" * 2000), headers=headers),
        ]
    assert {answer.status_code for answer in answers} == {200, 401, 403, 404, 413}
    for answer in answers:
        assert answer.headers.get_list("x-content-type-options") == ["nosniff"], json.dumps(str(answer.url))
