"""Defaults of a model's generation_config.json: what a request that leaves a parameter open gets, on every endpoint."""

from typing import Any

import pytest

from engine.core.types import RequestDefaults
from tests.api.harness import MODEL, chat, completion, in_process
from tests.fake_engine import FakeEngine

DEFAULTS = RequestDefaults(temperature=0.7, top_p=0.8, top_k=20, min_p=0.05, repetition_penalty=1.1, max_tokens=5)
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
OF_MODEL = {field: getattr(DEFAULTS, field) for field in FIELDS}
OF_API = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
ENDPOINTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": MODEL, "prompt": "hello"}),
    ("/v1/chat/completions", chat()),
    ("/v1/responses", {"model": MODEL, "input": "hello"}),
]


async def requested_parameters(path: str, body: dict[str, Any], defaults: RequestDefaults = DEFAULTS) -> dict[str, Any]:
    """Return the sampling parameters of the engine's request."""
    engine = FakeEngine(defaults=defaults)
    async with in_process(engine) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    (request,) = engine.requests
    return {field: getattr(request.sampling, field) for field in FIELDS}


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
@pytest.mark.parametrize("streams", [False, True])
async def test_model_defaults_fill_missing_fields(path: str, body: dict[str, Any], streams: bool) -> None:
    """They were ignored, so that greedy text was another than `generate`'s where the file has a repetition penalty."""
    assert await requested_parameters(path, {**body, "stream": streams}) == OF_MODEL


@pytest.mark.parametrize(("path", "body"), ENDPOINTS[:2])
@pytest.mark.parametrize("field", FIELDS)
async def test_null_is_left_open(path: str, body: dict[str, Any], field: str) -> None:
    assert await requested_parameters(path, {**body, field: None}) == OF_MODEL


@pytest.mark.parametrize(("path", "body"), ENDPOINTS[:2])
@pytest.mark.parametrize("field", OF_API)
async def test_a_requests_own_value_wins(path: str, body: dict[str, Any], field: str) -> None:
    """Also one that is the API's default: 1 is no null."""
    assert await requested_parameters(path, {**body, field: OF_API[field]}) == {**OF_MODEL, field: OF_API[field]}


async def test_a_greedy_request_keeps_the_penalty() -> None:
    for path, body in ENDPOINTS:
        assert await requested_parameters(path, {**body, "temperature": 0}) == {**OF_MODEL, "temperature": 0.0}


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_max_new_tokens_bounds_the_default(path: str, body: dict[str, Any]) -> None:
    """As in vLLM; a request that names a limit has that one."""
    name = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    free = await requested_parameters(path, body, RequestDefaults())
    assert await requested_parameters(path, body, RequestDefaults(max_tokens=10_000)) == free
    assert (await requested_parameters(path, {**body, name: 9}))["max_tokens"] == 9


async def test_responses_answer_reports_used_parameters() -> None:
    async with in_process(FakeEngine(defaults=DEFAULTS)) as client:
        body = {"model": MODEL, "input": "hello"}
        open_answer, own = [(await client.post("/v1/responses", json={**body, **one})).json() for one in ({}, {"top_p": 1})]
    assert (open_answer["temperature"], open_answer["top_p"]) == (0.7, 0.8)
    assert (own["temperature"], own["top_p"]) == (0.7, 1.0)


async def test_truncation_leaves_room_for_default_length() -> None:
    """`truncate_prompt_tokens` -1 leaves room for what will be generated."""
    for path, prompt in (("/v1/completions", completion()), ("/v1/chat/completions", chat())):
        engine = FakeEngine(defaults=DEFAULTS, max_model_len=12)
        async with in_process(engine) as client:
            body = {**prompt, "truncate_prompt_tokens": -1, **({"prompt": [5] * 30} if "prompt" in prompt else {})}
            assert (await client.post(path, json=body)).status_code == 200
        (request,) = engine.requests
        assert (len(request.prompt_ids), request.sampling.max_tokens) == (7, 5)


@pytest.mark.parametrize("most", [12, 13, 4096])
async def test_a_long_default_leaves_the_prompt(most: int) -> None:
    """The bug: a default of the whole context or more left one token of the prompt."""
    cases: list[tuple[dict[str, Any], RequestDefaults]] = [
        ({}, RequestDefaults(max_tokens=most)),
        ({"max_answer_tokens": most}, RequestDefaults()),
    ]
    for settings, defaults in cases:
        engine = FakeEngine(defaults=defaults, max_model_len=12)
        async with in_process(engine, **settings) as client:
            assert (await client.post("/v1/chat/completions", json=chat(truncate_prompt_tokens=-1))).status_code == 200
        (request,) = engine.requests
        assert (len(request.prompt_ids), request.sampling.max_tokens) == (11, 1)
