"""Fields that the server does not know: ignored and named where they cannot change a text, refused where they could."""

import logging
from typing import Any

import pytest

from server.http.errors import InvalidRequest
from server.http.unknown_fields import _OUTPUT_CHANGING, MAX_IGNORED, without_unknown
from server.schemas.chat import ChatRequest
from server.schemas.completion import CompletionRequest
from tests.api.harness import MODEL, chat, completion, in_process
from tests.fake_engine import FakeEngine

URL = "/v1/completions"
HARMLESS = {
    "safety_identifier": "abc",
    "prompt_cache_key": "k",
    "langfuse-tags": ["x"],
    "mirostat_tau": 5.0,
    "trace.id": {"a": 1},
}


async def test_what_cannot_change_a_text_is_ignored_and_named(caplog: pytest.LogCaptureFixture):
    async with in_process(FakeEngine()) as client:
        plain = (await client.post(URL, json=completion())).json()
        for stream in (False, True):
            response = await client.post(URL, json=completion(stream=stream, **HARMLESS))
            assert (response.status_code, response.headers["x-ignored-parameters"]) == (200, ", ".join(HARMLESS))
        answer = (await client.post(URL, json=completion(**HARMLESS))).json()
        assert answer["choices"] == plain["choices"]
        assert "x-ignored-parameters" not in (await client.post(URL, json=completion())).headers
        assert (await client.post("/tokenize", json={"prompt": "x", "trace": 1})).headers["x-ignored-parameters"] == "trace"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [", ".join(HARMLESS) in warning for warning in warnings] == [True, False], "once for each route"


async def test_what_changes_texts_elsewhere_is_refused_by_name_unless_it_is_neutral():
    async with in_process(FakeEngine()) as client:
        for name, neutral in _OUTPUT_CHANGING.items():
            values: list[object] = ["x", 0.123, [{"a": 1}], True if False in neutral else "y"]
            for value in values:
                with pytest.raises(InvalidRequest) as refusal:
                    without_unknown({name: value}, {"prompt"})
                assert refusal.value.param == name
            for value in (None, *neutral):
                assert without_unknown({name: value, "prompt": "x"}, {"prompt"}) == ({"prompt": "x"}, [name])
        error = (await client.post(URL, json=completion(mirostat=2))).json()["error"]
        assert (error["param"], error["message"]) == ("mirostat", "mirostat: not supported by this server; accepted: null, 0")
        assert (await client.post(URL, json=completion(mirostat=0))).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/v1/responses", {"input": "x", "seed": 1}, "seed"),
        ("/v1/responses", {"input": "x", "max_tokens": 5}, "max_tokens"),
        ("/v1/responses", {"input": "x", "response_format": {"type": "json_object"}}, "response_format"),
        ("/v1/completions", {"prompt": "x", "tools": []}, "tools"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "echo": True}, "echo"),
        ("/tokenize", {"prompt": "x", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
async def test_what_another_endpoint_honours_is_refused_by_name(path: str, fields: dict[str, Any], name: str, strict: bool):
    """A seed to /v1/responses was ignored, and the text another each time."""
    async with in_process(FakeEngine(), strict=strict) as client:
        response = await client.post(path, json={"model": MODEL, **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)
        if not strict:
            without = await client.post(path, json={"model": MODEL, **fields, name: None, "user": "u", "metadata": {}})
            assert without.status_code == 200


@pytest.mark.parametrize(
    ("name", "meant"),
    [("temprature", "temperature"), ("topP", "top_p"), ("top-k", "top_k"), ("maxTokens", "max_tokens"), ("stops", "stop")],
)
async def test_a_misspelled_field_is_not_ignored(name: str, meant: str):
    async with in_process(FakeEngine()) as client:
        error = (await client.post(URL, json=completion(**{name: 1}))).json()["error"]
    assert (error["param"], error["message"]) == (name, f"unknown parameter: {name}; is {meant} meant?")


async def test_what_is_unknown_inside_of_a_field_is_refused():
    bodies: list[dict[str, Any]] = [
        completion(speculative={"zzz": 1}),
        completion(stream=True, stream_options={"zzz": 1}),
        chat(messages=[{"role": "user", "content": "x", "zzz": 1}]),
    ]
    async with in_process(FakeEngine()) as client:
        for body in bodies:
            response = await client.post(URL if "prompt" in body else "/v1/chat/completions", json=body)
            assert response.status_code == 400
            assert "unknown parameter" in response.json()["error"]["message"]


async def test_many_are_refused_however_harmless():
    async with in_process(FakeEngine()) as client:
        for count, status in ((MAX_IGNORED, 200), (MAX_IGNORED + 1, 400)):
            fields = {f"zz{k}zz": 1 for k in range(count)}
            assert (await client.post(URL, json=completion(**fields))).status_code == status


async def test_strict_refuses_every_unknown_field():
    async with in_process(FakeEngine(), strict=True) as client:
        for fields in ({"safety_identifier": "abc"}, {"mirostat": 0}):
            error = (await client.post(URL, json=completion(**fields))).json()["error"]
            assert (error["param"], error["message"]) == (next(iter(fields)), f"unknown parameter: {next(iter(fields))}")


def test_no_field_of_ours_is_in_the_table():
    """They leave the table on the day on which they are honoured."""
    assert not set(_OUTPUT_CHANGING) & {*CompletionRequest.model_fields, *ChatRequest.model_fields}
