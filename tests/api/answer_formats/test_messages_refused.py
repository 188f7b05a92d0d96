"""Errors of the Messages API: each refusal names the field, each layer answers in Anthropic's shape."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from server.http.anthropic_errors import WRONG_BASE
from tests.api.answer_formats.test_messages import HELLO, SCHEMA, TIME, TOOLS, URL, engine_of, message
from tests.api.harness import MODEL, completion, in_process
from tests.fake_engine import FakeEngine
from tests.tokenizers_for_tests import calling

COUNT_URL = f"{URL}/count_tokens"
JSON = {"content-type": "application/json"}
KEYS = tuple(map(SecretStr, ("alice:use:alice-secret-key-1", "prometheus:scrape:scrape-secret-1", "bob:use:bob-secret-key-22")))


def error_of(response: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    """Return the error of an answer in Anthropic's shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert (list(body), body["type"]) == (["type", "error", "request_id"], "error")
    assert list(body["error"]) == ["type", "message", "details"]
    assert body["error"]["type"] == kind
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert len(response.content) < 3000
    return body["error"]  # type: ignore[no-any-return]


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, fields]}]}


def answered(**fields: Any) -> dict[str, Any]:
    return {"messages": [*HELLO, {"role": "assistant", "content": [fields]}, *HELLO]}


def result(*content: Any) -> dict[str, Any]:
    call = {"type": "tool_use", "id": "a", "name": "time", "input": {}}
    found = {"type": "tool_result", "tool_use_id": "a", "content": list(content)}
    return {"messages": [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [found]}]}


USE = {"type": "tool_use", "id": "a", "name": "time", "input": {}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"top_k": -1}, "top_k"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences.0"),
    ({"metadata": {"user": "u"}}, "metadata.user"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages.0.name"),
    *((block(type=kind), "messages.0.content.1.type") for kind in ("image", "document", "search_result", "container_upload")),
    *((block(type=kind), "messages.0.content.1.type") for kind in ("server_tool_use", "web_search_tool_result", "mcp_tool_use")),
    *((block(type=kind), "messages.0.content.1.type") for kind in (None, 1, ["text"], {"a": 1}, "custom", "x" * 500)),
    (block(type="text"), "messages.0.content.1.text"),
    (block(type="text", text="x", citations=[{}]), "messages.0.content.1.citations"),
    (block(type="text", text="x", cache_control=1), "messages.0.content.1.cache_control"),
    (block(**USE), "messages.0.content.1.type"),
    (block(type="thinking", thinking="x"), "messages.0.content.1.type"),
    (answered(type="tool_result", tool_use_id="a"), "messages.1.content.0.type"),
    (answered(type="tool_use", id="a", name="time"), "messages.1.content.0.input"),
    (answered(**{**USE, "input": [1]}), "messages.1.content.0.input"),
    (answered(**{**USE, "name": ""}), "messages.1.content"),
    (answered(**USE, caller={"type": "code_execution_20250825"}), "messages.1.content.0.caller"),
    (result({"type": "image", "source": {}}), "messages.2.content.0.content.0.type"),
    (result({"type": "tool_reference", "tool_name": "x"}), "messages.2.content.0.content.0.type"),
    ({"messages": [*HELLO, {"role": "assistant", "content": [USE]}]}, "messages"),
    ({"system": [{"type": "image"}]}, "system.0.type"),
    ({"system": 5}, "system"),
    *(({"tools": [TIME, {"type": kind, "name": "x"}]}, "tools.1.type") for kind in ("bash_20250124", "web_search_20250305")),
    *(({"tools": [TIME, {"type": kind, "name": "x"}]}, "tools.1.type") for kind in ("text_editor_20250728", "mcp_toolset")),
    ({"tools": [{"name": "x"}]}, "tools.0.input_schema"),
    ({"tools": [{**TIME, "name": "a b"}]}, "tools.0.name"),
    ({"tools": [{**TIME, "description": "x" * 70_000}]}, "tools.0.description"),
    ({"tools": [{**TIME, "input_schema": {"type": "array"}}]}, "tools.0.input_schema"),
    ({"tools": [{**TIME, "input_schema": {"type": 5}}]}, "tools.0.input_schema"),
    ({"tools": [{**TIME, "input_schema": {"properties": {"a": {"type": "x"}}}}]}, "tools.0.input_schema"),
    ({"tools": [TIME, TIME]}, "tools.1.name"),
    ({"tools": [TIME] * 129}, "tools"),
    ({"tools": [{**TIME, "defer_loading": True}]}, "tools.0.defer_loading"),
    ({"tools": [{**TIME, "allowed_callers": ["code_execution_20250825"]}]}, "tools.0.allowed_callers"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "any", "name": "time"}}, "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "sometimes"}}, "tool_choice.type"),
    ({"tools": TOOLS, "tool_choice": "auto"}, "tool_choice"),
    ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format"),
    ({"output_config": {"task_budget": {"type": "tokens", "total": 5}}}, "output_config.task_budget"),
    ({"output_config": {"effort": "most"}}, "output_config.effort"),
    ({"output_format": {"type": "json_schema", "schema": SCHEMA}}, "output_format"),
    ({"thinking": {"type": "on"}}, "thinking.type"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits.0.type"),
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits.0.type"),
    ({"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]}, "mcp_servers"),
    ({"container": "container_1"}, "container"),
    ({"compaction": {}}, "compaction"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"seed": 1}, "seed"),
    ({"n": 2}, "n"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"stop": ["x"]}, "stop"),
    ({"temprature": 1}, "temprature"),
    ({"mirostat": 2}, "mirostat"),
    ({"speculative": {"trace": True}, "stream": True}, "speculative.trace"),
    ({"speculative": {"zzz": 1}}, "speculative.zzz"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
async def test_unsupported_fields_are_refused_by_name(fields: dict[str, Any], param: str):
    async with in_process(engine := engine_of("x"), tokenizer=calling()) as client:
        error = error_of(await client.post(URL, json=message(**fields)), 400, "invalid_request_error")
        names = {part.split(": ")[0] for part in error["message"].removeprefix("unknown parameter: ").split("; ")}
        assert param in names, error["message"]
        body = {name: value for name, value in message(**fields).items() if name not in ("max_tokens", "stream")}
        counted = await client.post(COUNT_URL, json=body)
        assert counted.status_code in (200, 400)
    assert engine.requests == []


async def test_numbers_without_limits_are_refused():
    """A number that JSON cannot write back was a 500."""
    body = json.dumps(message(**answered(**{**USE, "input": {"n": 12345}})))
    async with in_process(engine_of("x"), tokenizer=calling()) as client:
        for number in ("1e999", "-1e999"):
            response = await client.post(URL, content=body.replace("12345", number), headers=JSON)
            assert "messages.1.content.0.input" in error_of(response, 400, "invalid_request_error")["message"]
        assert (await client.post(URL, content=body.replace("12345", "1e300"), headers=JSON)).status_code == 200


async def test_templates_without_tools_are_named():
    async with in_process(engine_of("x")) as client:
        for url in (URL, COUNT_URL):
            body = message() if url == URL else {"model": MODEL, "messages": HELLO}
            assert (
                error_of(await client.post(url, json={**body, "tools": TOOLS}), 400, "invalid_request_error")["message"][:7]
                == "tools: "
            )
            turns = [*HELLO, {"role": "assistant", "content": [USE]}, *HELLO]
            error = error_of(await client.post(url, json={**body, "messages": turns}), 400, "invalid_request_error")
            assert error["message"].startswith("messages.1.content: ")
            found = {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "tool_result", "tool_use_id": "a"}]}
            error = error_of(await client.post(url, json={**body, "messages": [found]}), 400, "invalid_request_error")
            assert error["message"].startswith("messages.0.content.1: ")


async def test_threads_are_refused_with_known_code():
    async with in_process(engine_of("x")) as client:
        error = error_of(await client.post(URL, json=message(thread={"type": "create"})), 400, "invalid_request_error")
    assert error["details"] == {"error_code": "thread_unsupported_request"}


BAD_BODIES = [b"", b"{", b'{"model": "\xff"}', b"[" * 50_000, b"[]", b"null", b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}"]


@pytest.mark.parametrize("path", [URL, COUNT_URL])
async def test_bodies_that_are_no_requests_are_400(path: str):
    async with in_process(FakeEngine()) as client:
        for body in BAD_BODIES:
            error_of(await client.post(path, content=body, headers=JSON), 400, "invalid_request_error")


@pytest.mark.parametrize("path", [URL, COUNT_URL])
async def test_every_layer_answers_in_this_shape(path: str):
    """Keys, limits of body and headers, origins, hosts, methods and types of bodies are checked before the route."""
    body = message() if path == URL else {"model": MODEL, "messages": HELLO}
    alice = {"x-api-key": "alice-secret-key-1"}
    async with in_process(FakeEngine(), api_keys=KEYS, max_body_bytes=2048) as client:
        error_of(await client.post(path, json=body), 401, "authentication_error")
        error_of(await client.post(path, json=body, headers={"x-api-key": "wrong"}), 401, "authentication_error")
        error_of(await client.post(path, json=body, headers={"x-api-key": "scrape-secret-1"}), 403, "permission_error")
        error_of(await client.post(path, json={**body, "system": "x" * 3000}, headers=alice), 413, "request_too_large")
        error_of(await client.post(path, json={**body, "model": "other"}, headers=alice), 404, "not_found_error")
        error_of(await client.get(path, headers=alice), 405, "invalid_request_error")
        error_of(await client.post(path, content=b"{}", headers=alice), 415, "invalid_request_error")
        error_of(await client.post(path, json=body, headers={**alice, "Origin": "https://page.test"}), 403, "permission_error")
        error_of(await client.post(path, json=body, headers={**alice, "Host": "page.test"}), 400, "invalid_request_error")
        many = {f"x-{number}": "1" for number in range(120)}
        error_of(await client.post(path, json=body, headers={**alice, **many}), 431, "invalid_request_error")


async def test_limits_of_a_key_are_429():
    async with in_process(FakeEngine(), max_requests_per_minute=1) as client:
        assert (await client.post(URL, json=message(max_tokens=2))).status_code == 200
        response = await client.post(URL, json=message(max_tokens=2))
        assert error_of(response, 429, "rate_limit_error")["details"] == {"error_code": "rate_limit_exceeded"}
        assert int(response.headers["retry-after"]) > 1
        error_of(await client.post(COUNT_URL, json={"model": MODEL, "messages": HELLO}), 429, "rate_limit_error")


async def test_a_full_server_is_529():
    """503 of other routes. Clients of this API have a class for 529, and retry it after the same header."""
    async with in_process(FakeEngine(max_living=0)) as client:
        response = await client.post(URL, json=message())
        assert error_of(response, 529, "overloaded_error")["details"] == {"error_code": "engine_busy"}
        assert response.headers["retry-after"] == "3"
        assert (await client.post("/v1/completions", json=completion())).status_code == 503
    async with in_process(FakeEngine(start_gate=asyncio.Event()), waits=False) as client:
        for path in (URL, COUNT_URL):
            body = message() if path == URL else {"model": MODEL, "messages": HELLO}
            error_of(await client.post(path, json=body), 529, "overloaded_error")


async def test_a_late_answer_is_a_timeout_error():
    async with in_process(FakeEngine(gate=asyncio.Event()), request_limit_s=0.05) as client:
        response = await client.post(URL, json=message())
    assert error_of(response, 504, "timeout_error")["details"] == {"error_code": "deadline_exceeded"}
    assert response.headers["x-should-retry"] == "false"


async def test_failures_are_api_errors_in_streams_too():
    async with in_process(FakeEngine(fail_after=0)) as client:
        error_of(await client.post(URL, json=message()), 500, "api_error")
        error_of(await client.post(URL, json=message(stream=True)), 500, "api_error")
    async with in_process(FakeEngine(fail_after=2)) as client:
        response = await client.post(URL, json=message(stream=True))
    assert response.status_code == 200
    *_, last = response.text.removesuffix("\n\n").split("\n\n")
    name, data = last.split("\n")
    body = json.loads(data.removeprefix("data: "))
    assert (name, body["error"]["type"], body["request_id"]) == ("event: error", "api_error", response.headers["request-id"])
    assert body["error"]["message"] == "the step failed"
    assert "message_stop" not in response.text
    assert "[DONE]" not in response.text


async def test_an_unforeseen_exception_reports_nothing():
    engine = FakeEngine()

    def broken(_: Any) -> Any:
        raise ZeroDivisionError("secret")

    engine.script = broken
    async with in_process(engine) as client:
        assert "secret" not in json.dumps(error_of(await client.post(URL, json=message()), 500, "api_error"))


@pytest.mark.parametrize("path", ["/messages", "/v1/v1/messages", "/v1/v1/messages/count_tokens"])
async def test_a_wrong_base_url_is_explained(path: str):
    """Clients add different paths to the base URL: a base that is right for one is wrong for another."""
    async with in_process(FakeEngine()) as client:
        assert error_of(await client.post(path, json=message()), 404, "not_found_error")["message"] == WRONG_BASE
        unknown = (await client.post("/v1/nowhere", json={})).json()["error"]["message"]
        assert unknown == "this server has no /v1/nowhere; GET /docs shows what it has"


async def test_other_routes_keep_their_shape():
    """Clients of both APIs read only the models; a header of one API distinguishes them."""
    version = {"anthropic-version": "2023-06-01"}
    async with in_process(FakeEngine(), api_keys=KEYS) as client:
        assert "param" in (await client.post("/v1/completions", json=completion(), headers=version)).json()["error"]
        assert "param" in (await client.get("/v1/models")).json()["error"]
        error_of(await client.get("/v1/models", headers=version), 401, "authentication_error")
        both = {**version, "x-api-key": "alice-secret-key-1"}
        error_of(await client.get("/v1/models/other", headers=both), 404, "not_found_error")


async def test_models_are_listed_for_both_apis():
    headers = {"anthropic-version": "2026-10-21"}
    async with in_process(FakeEngine()) as client:
        listed = (await client.get("/v1/models", headers=headers)).json()
        (model,) = listed["data"]
        assert (await client.get(f"/v1/models/{MODEL}", headers=headers)).json() == model
        assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (MODEL, MODEL, False)
        assert (model["type"], model["id"], model["max_input_tokens"]) == ("model", MODEL, 256)
        assert (await client.get("/v1/models")).json()["data"][0]["object"] == "model"


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


ALICE, BOB = "alice-secret-key-1", "bob-secret-key-22"
SENDERS: list[tuple[dict[str, str], str | None]] = [
    ({"x-api-key": ALICE}, "alice"),
    ({"X-Api-Key": f" {ALICE} "}, "alice"),
    (_bearer(ALICE), "alice"),
    ({**_bearer(BOB), "x-api-key": ALICE}, "bob"),
    ({**_bearer("wrong"), "x-api-key": ALICE}, "alice"),
    ({**_bearer(BOB), "x-api-key": "wrong"}, "bob"),
    ({"Authorization": "Basic abc", "x-api-key": ALICE}, "alice"),
    ({"Authorization": f"Basic {ALICE}"}, None),
    ({"x-api-key": ""}, None),
    ({"x-api-key": f"Bearer {ALICE}"}, None),
    ({"x-api-key": ALICE[:-1]}, None),
    ({"x-api-key": f"alice:use:{ALICE}"}, None),
    ({}, None),
]


@pytest.mark.parametrize(("headers", "name"), SENDERS)
@pytest.mark.parametrize("path", [URL, "/v1/chat/completions", "/v1/models"])
async def test_keys_are_read_from_either_header(
    path: str, headers: dict[str, str], name: str | None, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", "server.access")
    async with in_process(FakeEngine(), api_keys=KEYS) as client:
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 2}
        send = client.get(path, headers=headers) if path == "/v1/models" else client.post(path, json=body, headers=headers)
        assert (await send).status_code == (401 if name is None else 200)
        assert caplog.records[-1].key == (name or "-")  # type: ignore[attr-defined]
        document = (await client.get("/openapi.json", headers=_bearer(ALICE))).json()
    assert {scheme["type"] for scheme in document["components"]["securitySchemes"].values()} == {"http", "apiKey"}
    assert len(document["paths"][URL]["post"]["security"]) == 2


async def test_keys_are_written_nowhere(caplog: pytest.LogCaptureFixture):
    caplog.set_level("DEBUG")
    async with in_process(FakeEngine(), api_keys=KEYS, log_requests="texts") as client:
        for key in (ALICE, f"{ALICE}-wrong"):
            response = await client.post(URL, json=message(max_tokens=2), headers={"x-api-key": key})
            assert ALICE not in response.text + str(response.headers)
        assert ALICE not in (await client.get("/metrics", headers={"x-api-key": "scrape-secret-1"})).text
    assert ALICE not in caplog.text


async def test_other_origins_may_send_key_header():
    """A preflight request lists the headers of the request; a page reads the id of its request."""
    headers = {"Origin": "https://page.test", "Access-Control-Request-Method": "POST"}
    wanted = {"Access-Control-Request-Headers": "x-api-key,anthropic-version,content-type"}
    async with in_process(FakeEngine(), cors_origins=("https://page.test",), api_keys=KEYS) as client:
        preflight = await client.options(URL, headers={**headers, **wanted})
        assert preflight.status_code == 200
        assert "x-api-key" in preflight.headers["access-control-allow-headers"]
        sent = {"Origin": "https://page.test", "x-api-key": ALICE}
        answer = await client.post(URL, json=message(max_tokens=2), headers=sent)
        assert answer.status_code == 200
        assert "Request-Id" in answer.headers["access-control-expose-headers"]


# A request as Claude Code sends it.
AGENT: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 32_000,
    "stream": True,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "<system-reminder>\nhm\n</system-reminder>"}, {"type": "text", "text": "hi"}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "unsigned"},
                {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}, "caller": {"type": "direct"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": "a\nb",
                    "is_error": False,
                    "cache_control": {"type": "ephemeral"},
                }
            ],
        },
        {"role": "system", "content": "Available skills: none."},
    ],
    "tools": [
        {
            "name": name,
            "description": "Runs it.",
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
                "additionalProperties": False,
            },
            "eager_input_streaming": True,
        }
        for name in ("Bash", "mcp__server__read")
    ],
    "metadata": {"user_id": '{"device_id": "d", "session_id": "s"}'},
    "thinking": {"type": "adaptive", "display": "summarized"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "diagnostics": {"previous_message_id": None},
    "speed": "standard",
    "inference_geo": "us",
    "service_tier": "auto",
    "fallbacks": "default",
    "user_profile_id": "u",
}
BETAS = {"anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27"}


async def test_a_request_of_an_agent_is_answered():
    headers = {**BETAS, "anthropic-version": "2023-06-01", "x-app": "cli"}
    async with in_process(engine := engine_of("hello", max_model_len=3000), tokenizer=calling()) as client:
        response = await client.post(f"{URL}?beta=true", json=AGENT, headers=headers)
        assert response.status_code == 200, response.text
        counted = {name: AGENT[name] for name in ("model", "system", "messages", "tools", "thinking")}
        count = await client.post(f"{COUNT_URL}?beta=true", json=counted, headers=headers)
    named = set(response.headers["x-ignored-parameters"].split(", "))
    nested = {"cache_control", "thinking", "context_management", "output_config.effort"}
    assert named == {*nested, "diagnostics", "speed", "inference_geo", "service_tier", "fallbacks", "user_profile_id"}
    assert count.json()["input_tokens"] == len(engine.requests[0].prompt_ids)
    assert response.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')


async def test_long_descriptions_are_accepted():
    """Agents describe a tool in more than the 16,384 characters that were accepted."""
    body = {"model": MODEL, "messages": HELLO, "tools": [{**TIME, "description": "Runs it. " * 2100}]}
    async with in_process(engine_of("hello", max_model_len=4096), tokenizer=calling()) as client:
        assert (await client.post(COUNT_URL, json=body)).status_code == 200


async def test_nothing_is_named_without_a_reason():
    async with in_process(engine_of("hello"), tokenizer=calling()) as client:
        plain = message(tools=TOOLS, metadata={"user_id": "u"}, context_management={"edits": []}, thinking=None)
        assert "x-ignored-parameters" not in (await client.post(URL, json=plain)).headers
        for where in (
            block(type="text", text="x", cache_control={}),
            {"tools": [{**TIME, "cache_control": {"type": "ephemeral"}}]},
        ):
            has_control = "{}" not in json.dumps(where["messages"]) if "messages" in where else True
            response = await client.post(URL, json=message(**where))
            assert response.headers.get("x-ignored-parameters") == ("cache_control" if has_control else None)
        nested = result({"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}})
        assert (await client.post(URL, json=message(**nested))).headers["x-ignored-parameters"] == "cache_control"


async def test_strict_refuses_unknown_fields_here_too():
    async with in_process(engine_of("hello"), tokenizer=calling(), strict=True) as client:
        error = error_of(await client.post(URL, json=message(speed="fast")), 400, "invalid_request_error")
        assert error["message"] == "unknown parameter: speed"
        assert (await client.post(URL, json=message(**{"thinking": {"type": "disabled"}}))).status_code == 200
