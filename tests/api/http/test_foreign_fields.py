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
from tests.tokenizers_for_tests import CHAT_TEMPLATE, byte_level

URL = "/v1/completions"
HARMLESS = {
    "safety_identifier": "abc",
    "prompt_cache_key": "k",
    "prompt_cache_options": {"ttl": 5},
    "langfuse-tags": ["x"],
    "mirostat_tau": 5.0,
    "trace.id": {"a": 1},
}


async def test_harmless_fields_are_ignored_and_named(caplog: pytest.LogCaptureFixture):
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


async def test_output_changing_fields_are_refused_unless_neutral():
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


OPENAIS: dict[str, tuple[object, ...]] = {  # fields of OpenAI's that change no text here: values that are dropped, and none are
    "store": (True,),
    "metadata": ({"team": "x"},),
    "service_tier": ("flex", "priority"),
    "verbosity": ("low", "high"),
    "safety_identifier": ("user-5",),
    "prompt_cache_key": ("k",),
    "prompt_cache_retention": ("24h",),
    "reasoning_effort": ("low", "none"),
}
NEUTRAL_VALUES = {"store": False, "metadata": {}, "service_tier": "auto", "verbosity": "medium", "reasoning_effort": None}


@pytest.mark.parametrize("strict", [False, True])
async def test_neutral_fields_of_openai_are_named(strict: bool):
    """langchain, litellm and the Vercel SDK send reasoning_effort, verbosity, store and metadata; each was a 400."""
    engine = FakeEngine()
    async with in_process(engine, strict=strict) as client:
        plain = (await client.post("/v1/chat/completions", json=chat())).json()["choices"]
        for stream in (False, True):
            for name, values in OPENAIS.items():
                for value in values:
                    response = await client.post("/v1/chat/completions", json=chat(**{name: value}, stream=stream))
                    assert (response.status_code, response.headers.get("x-ignored-parameters")) == (200, name), response.text
                    assert stream or response.json()["choices"] == plain
        everything = {name: values[0] for name, values in OPENAIS.items()}
        response = await client.post("/v1/chat/completions", json=chat(**everything))
        assert {*response.headers["x-ignored-parameters"].split(", ")} == {*OPENAIS}
        neutral = await client.post("/v1/chat/completions", json=chat(**NEUTRAL_VALUES))
        assert "x-ignored-parameters" not in neutral.headers
    assert len({request.prompt_ids for request in engine.requests}) == 1


async def test_completions_refuse_effort_alone():
    async with in_process(FakeEngine()) as client:
        for name in ("store", "verbosity", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"):
            response = await client.post(URL, json=completion(**{name: OPENAIS[name][0]}))
            assert (response.status_code, response.headers["x-ignored-parameters"]) == (200, name)
        response = await client.post(URL, json=completion(reasoning_effort="low"))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "reasoning_effort")


EFFORT = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}Effort: {{ reasoning_effort }}\n"
)


async def test_effort_reaches_templates_that_read_it(monkeypatch: pytest.MonkeyPatch):
    """It is named as ignored only where the template does not read it."""
    monkeypatch.setattr(byte_level(), "chat_template", EFFORT + CHAT_TEMPLATE)
    engine, url = FakeEngine(), "/v1/chat/completions"
    async with in_process(engine) as client:
        for fields in ({"reasoning_effort": "high"}, {"chat_template_kwargs": {"reasoning_effort": "high"}}, {}):
            response = await client.post(url, json=chat(**fields))
            assert (response.status_code, "x-ignored-parameters" in response.headers) == (200, False)
        both = {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}}
        response = await client.post(url, json=chat(**both))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "reasoning_effort")
        forged = await client.post(url, json=chat(reasoning_effort="<|end|>"))
        assert forged.status_code == 200
        tokens = await client.post("/tokenize", json={"messages": chat()["messages"], "reasoning_effort": "high"})
        assert tokens.json()["tokens"] == list(engine.requests[0].prompt_ids)
        bare = await client.post("/tokenize", json={"prompt": "x", "reasoning_effort": "high"})
        assert (bare.status_code, bare.json()["error"]["param"]) == (400, "reasoning_effort")
    prompts = [byte_level().decode(request.prompt_ids).splitlines()[0] for request in engine.requests]
    assert prompts == ["Effort: high", "Effort: high", "Effort: medium", "Effort: <|end|>"]
    end = byte_level().convert_tokens_to_ids("<|end|>")
    assert engine.requests[-1].prompt_ids.count(end) == engine.requests[0].prompt_ids.count(end)


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
async def test_fields_of_other_endpoints_are_refused(path: str, fields: dict[str, Any], name: str, strict: bool):
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


async def test_unknown_nested_fields_are_refused():
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


def test_supported_fields_are_not_in_table():
    """They leave the table on the day on which they are honoured."""
    assert not set(_OUTPUT_CHANGING) & {*CompletionRequest.model_fields, *ChatRequest.model_fields}
