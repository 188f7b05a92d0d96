"""Predictions and tenants on the wire: the engine's request, and the tokens that usage counts."""

from typing import Any

import httpx
import pytest

from engine.core.types import Request
from tests.api.harness import in_process
from tests.fake_engine import FakeEngine, emits
from tests.tokenizers_for_tests import byte_level

Fields = dict[str, Any]
IDS = byte_level().encode("hello world, the quick")
TEXT = "hello brave world"
PREDICTION = {"type": "content", "content": TEXT}


def chat(**fields) -> tuple[str, Fields]:
    return "/v1/chat/completions", {"model": "fake", "messages": [{"role": "user", "content": "hi"}], **fields}


def completion(**fields) -> tuple[str, Fields]:
    return "/v1/completions", {"model": "fake", "prompt": "hi", "max_tokens": 50, **fields}


BOTH = pytest.mark.parametrize("body", [chat, completion])


async def post(client: httpx.AsyncClient, request: tuple[str, Fields], **headers: str) -> Fields:
    url, fields = request
    response = await client.post(url, json=fields, headers=headers)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def submitted(engine: FakeEngine, request: tuple[str, Fields]) -> Request:
    """Return the engine's request."""
    async with in_process(engine) as client:
        await post(client, request)
    return engine.requests[-1]


@BOTH
async def test_prediction_reaches_engine_without_special_tokens(body):
    request = await submitted(FakeEngine(), body(prediction=PREDICTION))
    assert list(request.prediction_ids) == byte_level().encode(TEXT, add_special_tokens=False)
    parts = {"type": "content", "content": [{"type": "text", "text": text} for text in (TEXT[:7], TEXT[7:])]}
    assert (await submitted(FakeEngine(), body(prediction=parts))).prediction_ids == request.prediction_ids
    assert (await submitted(FakeEngine(), body(prediction={"type": "content", "content": ""}))).prediction_ids == ()
    assert (await submitted(FakeEngine(), body())).prediction_ids == ()


@BOTH
async def test_every_choice_receives_the_prediction(body):
    engine = FakeEngine()
    logprobs = {"logprobs": True} if body is chat else {"logprobs": 1}
    async with in_process(engine) as client:
        await post(client, body(prediction=PREDICTION, n=3, presence_penalty=1.0, **logprobs))
    assert len({request.prediction_ids for request in engine.requests}) == 1
    assert len(engine.requests) == 3


def counts(answer: Fields) -> Fields:
    details = dict(answer["usage"]["completion_tokens_details"])
    assert details.pop("reasoning_tokens") == 0
    return details


@BOTH
async def test_usage_counts_accepted_and_rejected_prediction_tokens(body):
    """Steps of 1, 3, 1, 3, ... tokens; each but the first drafts as many as it returns, and the last one is the extra token."""
    engine = FakeEngine(script=emits(IDS), chunks=(1, 3))
    num_steps = [len(IDS[at : at + 3]) for at in range(1, len(IDS), 4)] + [1 for _ in range(4, len(IDS), 4)]
    async with in_process(engine) as client:
        answer = await post(client, body(prediction=PREDICTION, n=2))
        assert answer["usage"]["completion_tokens"] == 2 * len(IDS)
        accepted, drafted = 2 * sum(size - 1 for size in num_steps), 2 * sum(num_steps)
        assert counts(answer) == {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        assert counts(await post(client, body())) == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
        url, fields = body(prediction=PREDICTION, n=2, stream=True, stream_options={"include_usage": True})
        response = await client.post(url, json=fields)
        assert f'"accepted_prediction_tokens":{accepted},' in response.text.replace(" ", "")


@BOTH
async def test_prediction_tokens_after_stop_are_rejected(body):
    engine = FakeEngine(script=emits(IDS), chunks=(1, 100))
    async with in_process(engine) as client:
        whole, cut = [counts(await post(client, body(prediction=PREDICTION, **stop))) for stop in ({}, {"stop": "world"})]
    assert cut["accepted_prediction_tokens"] < whole["accepted_prediction_tokens"]
    assert sum(cut.values()) == sum(whole.values())


@BOTH
async def test_prediction_longer_than_context_is_refused(body):
    async with in_process(FakeEngine(max_model_len=64)) as client:
        for text in ("x y " * 100, "x" * 100_000):
            url, fields = body(prediction={"type": "content", "content": text})
            response = await client.post(url, json={**fields, "max_tokens": 5})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "prediction")


async def tenants(keys: tuple[str, ...], requests: list[tuple[str, Fields]]) -> list[str]:
    """Return the tenants of requests by (key, fields)."""
    engine = FakeEngine()
    settings: Fields = {"api_keys": keys} if keys else {}
    async with in_process(engine, **settings) as client:
        for key, fields in requests:
            await post(client, chat(**fields), authorization=f"Bearer {key}")
    return [request.tenant for request in engine.requests]


async def test_tenants_separate_users_and_hide_keys():
    users = [("a", None), ("a", None), ("b", None), ("a", "x"), ("b", "x"), ("a", "x"), ("a", "")]
    requests = [(key, {} if user is None else {"user": user}) for key, user in users]
    first, again, other, user, others_user, user_again, empty = await tenants(("a", "b"), requests)
    assert first == again == empty
    assert user == user_again
    assert len({first, other, user, others_user}) == 4
    key, users_key, others_key = (tenant.partition("/")[0] for tenant in (first, user, others_user))
    assert key == users_key != others_key
    assert all(len(tenant) == 16 + 1 + 32 for tenant in (first, other, user, others_user))


async def salts(share: str, requests: list[tuple[str, Fields]]) -> list[str | None]:
    """Return the cache salts of requests by (key, fields)."""
    engine = FakeEngine()
    async with in_process(engine, api_keys=("a", "b"), prefix_cache=share) as client:
        for key, fields in requests:
            await post(client, chat(**fields), authorization=f"Bearer {key}")
    return [request.cache_salt for request in engine.requests]


async def test_prefixes_are_shared_within_key_or_salt():
    requests: list[tuple[str, Fields]] = [
        ("a", {}),
        ("a", {"user": "x"}),
        ("b", {}),
        ("a", {"cache_salt": "s"}),
        ("b", {"cache_salt": "s"}),
    ]
    first, user, other, salted, others_salted = await salts("key", requests)
    assert first == user
    assert len({first, other, salted, others_salted}) == 4
    first, user, other, salted, others_salted = await salts("all", requests)
    assert first == user == other
    assert salted == others_salted != first


async def test_tenants_without_keys_share_nothing():
    assert await tenants((), [("a", {}), ("b", {"user": "x"})]) == ["", ""]
