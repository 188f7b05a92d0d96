"""Every failure is `{"error": {message, type, param, code}}`, bounded, with the right status, and never a 422."""

import asyncio
import json
from contextlib import nullcontext
from typing import Any

import httpx
import pytest

from engine.core.types import ErrorCode
from server.http.errors import InvalidRequest, as_invalid_request
from server.routes.json_bodies import parsed_body
from tests.api.harness import MODEL, chat, completion, in_process
from tests.fake_engine import FakeEngine

URL = "/v1/completions"
JSON = {"content-type": "application/json"}


def _assert_error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    assert len(response.content) < 3000
    return error


BAD_BODIES = {
    "empty": b"",
    "not JSON": b"{",
    "bad UTF-8": b'{"model": "\xff"}',
    "NaN": b'{"model": "fake", "prompt": "x", "temperature": NaN}',
    "Infinity": b'{"model": "fake", "prompt": "x", "temperature": -Infinity}',
    "infinite number": b'{"model": "fake", "prompt": "x", "temperature": 1e999}',
    "lone surrogate": b'{"model": "fake", "prompt": "\\ud800"}',
    "deep": b"[" * 50_000,
    "deep inside": b'{"model": "fake", "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "long number": b'{"model": "fake", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    "a list": b"[]",
    "a string": b'"x"',
    "null": b"null",
}


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_malformed_body_is_400(name: str):
    async with in_process(FakeEngine()) as client:
        _assert_error(await client.post(URL, content=BAD_BODIES[name], headers=JSON), 400)


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        (None, 415),
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("APPLICATION/JSON", 200),
        ("application/vnd.api+json", 200),
        ("text/json", 415),
        ("text/plain", 415),
        ("text/plain; a=application/json", 415),
        ("text/plain/json", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/x-www-form-urlencoded", 415),
    ],
)
async def test_body_without_json_type_is_415(content_type: str | None, status: int):
    """The bug: a body without a content type was parsed, and pages of other origins may send such bodies unasked."""
    headers = {} if content_type is None else {"content-type": content_type}
    async with in_process(engine := FakeEngine()) as client:
        response = await client.post(URL, content=json.dumps(completion()).encode(), headers=headers)
        assert response.status_code == status
        assert bool(engine.requests) == (status == 200)
        if status == 415:
            assert _assert_error(response, 415)["code"] == "unsupported_media_type"
        assert _assert_error(await client.post(URL, headers=headers), 400)["message"] == "the body is empty"


WORDED = [
    ({"stop": ["a"] * 17}, "stop", "stop: has too many entries; at most 16 are accepted"),
    ({"stop": 5}, "stop", "stop: must be a string or a list"),
    ({"stop": ["a", ""]}, "stop.1", "stop.1: must not be empty"),
    ({"stop": "x" * 257}, "stop", "stop: must have at most 256 characters"),
    ({"prompt": None}, "prompt", "prompt: must be a string or a list"),
    ({"prompt": [1, "a"]}, "prompt.1", "prompt.1: must be an integer"),
    ({"prompt": ["a", 1]}, "prompt.1", "prompt.1: must be a string"),
    ({"prompt": [{}]}, "prompt.0", "prompt.0: must be a string or an integer or a list"),
    ({"prompt": [[1, -1]]}, "prompt.0.1", "prompt.0.1: must be at least 0"),
    ({"prompt": [-1]}, "prompt.0", "prompt.0: must be at least 0"),
    ({"temperature": 3}, "temperature", "temperature: must be at most 2"),
    ({"n": 1.5}, "n", "n: must be an integer"),
    ({"stream_options": 1, "stream": True}, "stream_options", "stream_options: must be an object"),
]


@pytest.mark.parametrize(("fields", "param", "message"), WORDED)
async def test_errors_are_worded_for_people(fields: dict[str, Any], param: str, message: str):
    """The bug: the error of 17 `stop` strings was "should be a valid string; should have at most 16 items after validation"."""
    async with in_process(FakeEngine()) as client:
        error = _assert_error(await client.post(URL, json=completion(**fields)), 400)
    assert (error["param"], error["message"]) == (param, message)


async def test_every_mistake_of_an_item_is_named():
    content = [{"type": "text", "text": 5, "x": 1}]
    async with in_process(FakeEngine()) as client:
        body = chat(messages=[{"role": "user", "content": content}])
        error = _assert_error(await client.post("/v1/chat/completions", json=body), 400)
    assert "content.0.x" in error["message"]
    assert "content.0.text: must be a string" in error["message"]


@pytest.mark.parametrize("body", [[], "x", 1])
async def test_a_body_of_another_kind_is_named(body: Any):
    async with in_process(FakeEngine()) as client:
        error = _assert_error(await client.post(URL, json=body), 400)
    assert (error["param"], error["message"]) == (None, "the body must be an object")


@pytest.mark.parametrize("name", ["str", "int", "", "list[x", "dict[", "function-y", "constrained-str"])
async def test_an_unknown_field_may_have_any_name(name: str):
    """The bug: pydantic's names of the forms of a union were read as field names, so the message was empty: a 500."""
    at_top, inside = completion(**{name: 1}), completion(speculative={name: 1})
    async with in_process(FakeEngine(), strict=True) as client:
        error = _assert_error(await client.post(URL, json=at_top), 400)
        assert (error["param"], error["message"]) == (name or None, f"unknown parameter: {name or repr(name)}")
        error = _assert_error(await client.post(URL, json=inside), 400)
        assert (error["param"], error["message"]) == (f"speculative.{name}", f"unknown parameter: speculative.{name}")


def test_errors_without_details_have_a_message():
    assert str(as_invalid_request([])) == "the request is not valid"


async def test_too_many_containers_are_refused_before_validation(monkeypatch: pytest.MonkeyPatch):
    """The bug: a prompt of a million lists of one token stopped the event loop for 2.4 s before it was refused."""
    validated: list[object] = []
    monkeypatch.setattr("server.routes.generation.completion_generation", lambda *args: validated.append(args))
    bodies = [completion(prompt=[[1]] * 100_000), completion(prompt=[[[1]] * 300] * 300), completion(speculative=[{}] * 20_000)]
    async with in_process(FakeEngine()) as client:
        for body in bodies:
            assert "objects and lists" in _assert_error(await client.post(URL, json=body), 400)["message"]
        for prompt in ([[1]] * 1025, ["a"] * 1025):
            assert "at most 1024" in _assert_error(await client.post(URL, json=completion(prompt=prompt)), 400)["message"]
        many = chat(messages=[{"role": "user", "content": "x"}] * 2049)
        assert "at most 2048" in _assert_error(await client.post("/v1/chat/completions", json=many), 400)["message"]
    assert validated == []


@pytest.mark.parametrize("make", [lambda one: one, lambda one: {"stop": [one]}, lambda one: {"a": {"b": one}}])
def test_objects_with_too_many_keys_are_refused(make: Any):
    for num_keys in (1024, 1025):
        body = json.dumps(make({str(i): 1 for i in range(num_keys)})).encode()
        with pytest.raises(InvalidRequest, match="object of more than 1024 keys") if num_keys > 1024 else nullcontext():
            parsed_body(body, "application/json")


NOT_STRICT = [b"NaN", b"-Infinity", b'"\xff"', b'"\xed\xa0\x80"', b'"\xc0\x80"', b'"\\ud800"', b"[" * 201 + b"]" * 201]


@pytest.mark.parametrize("value", NOT_STRICT)
def test_lax_json_is_refused(value: bytes):
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        parsed_body(b'{"prompt": ' + value + b"}", "application/json")
    assert parsed_body(b'{"prompt": ' + b"[" * 150 + b"]" * 150 + b"}", "application/json")


def test_brackets_in_text_are_no_containers():
    text = '["' + "{[" * 10_000 + '\\"[\\\\'
    assert parsed_body(json.dumps({"prompt": text}).encode(), "application/json") == {"prompt": text}
    with pytest.raises(InvalidRequest, match="objects and lists"):
        parsed_body(json.dumps({"prompt": text, "stop": [[]] * 20_000}).encode(), "application/json")
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        parsed_body(b'{"prompt": "' + b'\\"[' * 100_000, "application/json")


@pytest.mark.parametrize("strict", [True, False])
async def test_error_text_is_bounded(strict: bool):
    """vLLM once answered a 4,475-byte body with 23.6 MB: many errors, each with all of the input."""
    many_keys = {f"k{i}": "x" * 50 for i in range(200)}
    bodies = [
        completion(**many_keys),
        completion(**{"k" * 3000: 1}),
        completion(**{f"k{i}": 1 for i in range(5000)}),
        completion(prompt=[["x" * 1000] * 100] * 20),
        completion(model="m" * 1000),
        completion(stop=["x" * 5000] * 10),
        chat(metadata={f"k{i}": i for i in range(5000)}),
        completion(presence_penalty="x" * 5000),
        completion(logit_bias={"x" * 5000: 1}),
        {"model": MODEL, "messages": [{"role": "x" * 1000, "content": ["x"] * 1000}] * 100},
    ]
    async with in_process(FakeEngine(), strict=strict) as client:
        for body in bodies:
            response = await client.post(URL if "prompt" in body else "/v1/chat/completions", json=body)
            error = _assert_error(response, 404 if len(body["model"]) > 100 else 400)
            assert len(error["message"]) <= 1000


async def test_invalid_utf8_of_client_is_quoted():
    async with in_process(FakeEngine()) as client:
        _assert_error(await client.get("/v1/models/%ff%fe"), 404)
        _assert_error(await client.get("/%ff%0a%0d"), 404)


async def test_unknown_paths_and_wrong_methods():
    async with in_process(FakeEngine()) as client:
        _assert_error(await client.get("/nowhere"), 404)
        assert _assert_error(await client.get(URL), 405)["message"] == "GET is not possible here; use POST"
        assert (await client.get(URL)).headers["allow"] == "POST"


async def test_body_over_limit_is_413():
    async def stream():
        for _ in range(3):
            yield b"x" * 1000

    async with in_process(FakeEngine(), max_body_bytes=2048) as client:
        _assert_error(await client.post(URL, content=b"x" * 2049, headers=JSON), 413)
        _assert_error(await client.post(URL, content=stream(), headers=JSON), 413)
        _assert_error(await client.post(URL, content=b"x" * 2048, headers=JSON), 400)


async def test_unexpected_exception_is_500_without_details(caplog: pytest.LogCaptureFixture):
    engine = FakeEngine()

    def broken(_):
        raise ZeroDivisionError("secret")

    engine.script = broken
    async with in_process(engine) as client:
        error = _assert_error(await client.post(URL, json=completion()), 500)
    assert "secret" not in json.dumps(error)
    assert "secret" in caplog.text


async def test_valid_client_request_id_is_kept(caplog: pytest.LogCaptureFixture):
    async with in_process(FakeEngine()) as client:
        for offered, is_kept in [("abc-1.2:3_x", True), ("a b", False), ("x" * 129, False), ("é", False), ("", False)]:
            response = await client.get("/live", headers={b"X-Request-Id": offered.encode()})
            assert (response.headers["x-request-id"] == offered) is is_kept
        caplog.set_level("INFO", "server.access")
        await client.get("/a%0Ab%0D%1b[31m")
    assert "\n" not in caplog.records[-1].getMessage()
    assert "\x1b" not in caplog.records[-1].getMessage()


async def test_loading_is_503_with_a_time():
    """The bug: with tools the answer was a 400, as what the template supports was not yet known."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    engine = FakeEngine(start_gate=asyncio.Event())
    async with in_process(engine, waits=False) as client:
        for url, body in (
            (URL, completion()),
            *(
                ("/v1/chat/completions", chat(**fields))
                for fields in ({}, {"tools": tools}, {"tools": tools, "tool_choice": "none"})
            ),
        ):
            response = await client.post(url, json=body)
            assert _assert_error(response, 503)["code"] == "engine_unavailable"
            assert int(response.headers["retry-after"]) >= 1


async def test_openapi_declares_errors_but_not_422():
    async with in_process(FakeEngine()) as client:
        document = (await client.get("/openapi.json")).json()
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        responses = document["paths"][path]["post"]["responses"]
        assert {"200", "400", "401", "404", "413", "500", "503"} <= set(responses)
        assert "422" not in responses
    assert document["components"]["schemas"]["CompletionRequest"]["additionalProperties"] is False


FATES = {
    ErrorCode.NO_POSSIBLE_TOKEN: (400, "no_possible_token"),
    ErrorCode.REFUSED: (400, "request_refused"),
    ErrorCode.DISPLACED: (503, "engine_busy"),
    ErrorCode.WORKER_CRASHED: (500, "worker_crashed"),
    ErrorCode.LOGITS_NOT_FINITE: (500, "logits_not_finite"),
}


@pytest.mark.parametrize("code", list(FATES))
async def test_failure_status_separates_client_from_server(code: ErrorCode):
    """The bug: what a request forbade itself, and would again, was the server's failure, which clients retry."""
    status, expected_code = FATES[code]
    async with in_process(FakeEngine(fail_after=0, fail_code=code)) as client:
        answer = await client.post(URL, json=completion())
    assert _assert_error(answer, status)["code"] == expected_code
    assert ("retry-after" in answer.headers) == (status == 503)
