"""The limits of one key: a token bucket in given time, concurrent requests, and the headers of a refusal."""

import asyncio
import math
from copy import deepcopy

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from server.http.errors import TooManyRequests
from server.http.rate_limits import Account, Bucket, RateLimits
from tests.api.harness import MODEL, chat, completion, in_process, over_loopback, sample, until
from tests.fake_engine import FakeEngine
from tests.tokenizers_for_tests import infilling

KEYS = (SecretStr("one"), SecretStr("two"))
URL = "/v1/completions"


def _as(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def _enters(account: Account, now_s: float) -> float | None:
    """Return None for a request that is admitted, else the seconds of its Retry-After."""
    try:
        account.enter(now_s)
    except TooManyRequests as refusal:
        return float(refusal.headers["Retry-After"])
    return None


def _check_bucket(account_type: type[Account], per_minute: int, pauses_s: list[float]) -> None:
    account, now_s, times_s = account_type(RateLimits(max_per_minute=per_minute), 0.0), 0.0, []
    for pause_s in pauses_s:
        now_s += pause_s
        if (wait_s := _enters(account, now_s)) is None:
            times_s.append(now_s)
        else:
            assert 1 <= wait_s <= math.ceil(60 / per_minute)
            assert _enters(deepcopy(account), now_s + wait_s) is None
    for first, begin_s in enumerate(times_s):
        for last in range(first, len(times_s)):
            assert last - first + 1 <= per_minute + (times_s[last] - begin_s) * per_minute / 60 + 1e-6
    # A client that keeps to the rate is never refused.
    assert all(_enters(account, now_s + 60 + k * 60.001 / per_minute) is None for k in range(3 * per_minute))


pauses = st.lists(st.floats(0, 90), max_size=40)


@given(st.integers(1, 8), pauses)
def test_bucket_admits_at_most_size_plus_rate(per_minute: int, pauses_s: list[float]):
    _check_bucket(Account, per_minute, pauses_s)


def test_request_after_rounded_wait_is_admitted():
    _check_bucket(Account, 1, [0.0, 25.596, 11.172, 5.931, 0.0, 20.942, 0.0])


def test_bucket_property_kills_overflowing_bucket():
    class Overflowing(Bucket):
        def fill(self, now_s: float) -> None:
            self._left += (now_s - self._at_s) * self.per_minute / 60
            self._at_s = now_s

    class Wrong(Account):
        bucket = Overflowing

    with pytest.raises(AssertionError):
        _check_bucket(Wrong, 1, [120.0, 0.0, 0.0])


async def test_each_key_has_its_own_bucket():
    async with in_process(FakeEngine(), api_keys=KEYS, max_requests_per_minute=2) as client:
        answers = [await client.post(URL, json=completion(), headers=_as("one")) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
        assert {answer.headers["x-ratelimit-limit-requests"] for answer in answers} == {"2"}
        assert 0 < float(answers[1].headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60
        error = answers[2].json()["error"]
        assert (error["type"], error["code"], set(error)) == (
            "requests",
            "rate_limit_exceeded",
            {"message", "type", "param", "code"},
        )
        assert 1 <= int(answers[2].headers["retry-after"]) <= 30
        assert answers[2].headers["x-request-id"]
        other = await client.post(URL, json=completion(), headers=_as("two"))
        assert (other.status_code, other.headers["x-ratelimit-remaining-requests"]) == (200, "1")
        assert (await client.post(URL, json=completion(), headers=_as("three"))).status_code == 401
        reads = await client.get("/v1/models", headers=_as("one"))
        assert reads.status_code == 200
        assert "x-ratelimit-limit-requests" not in reads.headers
        samples = await client.get("/metrics", headers=_as("one"))
    assert 'latebranch_rejected_requests_total{engine="0",model_name="fake",reason="rate_limit_exceeded"} 1.0' in samples.text


@pytest.mark.timeout(60)  # without the limit a request waits for the gate
async def test_concurrent_requests_count_until_last_byte():
    engine = FakeEngine(gate=(gate := asyncio.Event()))
    async with in_process(engine, max_concurrent_requests=2) as client:
        pending = [asyncio.create_task(client.post(URL, json=completion(stream=stream))) for stream in (True, False)]
        await until(lambda: len(engine.living) == 2)
        refused = await client.post(URL, json=completion())
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == "too_many_concurrent_requests"
        assert "x-ratelimit-limit-requests" not in refused.headers
        gate.set()
        await asyncio.gather(*pending)
        assert (await client.post(URL, json=completion(n=0))).status_code == 400
        for _ in range(3):
            assert (await client.post(URL, json=completion())).status_code == 200
        samples = await sample(client)
    reason = 'reason="too_many_concurrent_requests"'
    assert samples[f'latebranch_rejected_requests_total{{engine="0",model_name="fake",{reason}}}'] == 1


async def test_a_client_that_leaves_makes_room():
    engine = FakeEngine(gate=asyncio.Event())
    async with over_loopback(engine, max_concurrent_requests=1) as url, httpx.AsyncClient(base_url=url) as client:
        async with client.stream("POST", URL, json=completion(stream=True)) as response:
            assert response.status_code == 200
            assert (await client.post(URL, json=completion())).status_code == 429
        await until(lambda: not engine.living)
        engine.gate = None
        assert (await client.post(URL, json=completion())).status_code == 200


async def test_the_official_client_knows_the_refusal():
    async with (
        over_loopback(FakeEngine(), max_requests_per_minute=1) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        await client.completions.create(model=MODEL, prompt="x")
        with pytest.raises(openai.RateLimitError) as refusal:
            await client.completions.create(model=MODEL, prompt="x")
    assert refusal.value.code == "rate_limit_exceeded"
    assert int(refusal.value.response.headers["retry-after"]) > 1


@given(st.integers(1, 50), st.lists(st.tuples(st.floats(0, 90), st.integers(1, 120)), max_size=40))
def test_token_debt_is_repaid_before_next_request(per_minute: int, requests: list[tuple[float, int]]):
    """What is spent in the long run is the rate, a minute's amount at first, and what the last request spent beyond."""
    account, now_s, spent, most = Account(RateLimits(max_tokens_per_minute=per_minute), 0.0), 0.0, 0, 0
    for pause_s, num_tokens in requests:
        now_s += pause_s
        if (wait_s := _enters(account, now_s)) is None:
            assert spent < per_minute + now_s * per_minute / 60 + 1e-6
            account.spend(num_tokens, now_s)
            spent, most = spent + num_tokens, max(most, num_tokens)
        else:
            assert _enters(deepcopy(account), now_s + wait_s) is None
    assert spent <= per_minute + now_s * per_minute / 60 + most + 1e-6


@pytest.mark.parametrize("stream", [True, False])
async def test_tokens_per_key_are_counted_and_limited(stream: bool):
    keys = (SecretStr("alice:one"), SecretStr("bob:two"))
    async with in_process(FakeEngine(), api_keys=keys, max_tokens_per_minute=40) as client:
        body = completion(prompt=[1, 2, 3], max_tokens=20, n=2, stream=stream)
        first = await client.post(URL, json=body, headers=_as("one"))
        assert (first.status_code, first.headers["x-ratelimit-limit-tokens"]) == (200, "40")
        refused = await client.post(URL, json=body, headers=_as("one"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "token_rate_limit_exceeded")
        assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
        assert 4 <= int(refused.headers["retry-after"]) <= 7, "3 of the prompt and 2 times 20 generated, so 3 and 1 are missing"
        assert (await client.post("/tokenize", json={"prompt": "x"}, headers=_as("one"))).status_code == 429
        assert (await client.post(URL, json=body, headers=_as("two"))).status_code == 200
    async with in_process(FakeEngine(), api_keys=(*keys, SecretStr("root:admin:ad"))) as client:
        for _ in range(2):
            await client.post(URL, json=body, headers=_as("one"))
        await client.post(URL, json=completion(prompt=[1, 2], max_tokens=3), headers=_as("ad"))
        text = (await client.get("/metrics", headers=_as("ad"))).text
    for line in (
        'latebranch_key_requests_total{key="alice"} 2.0',
        'latebranch_key_tokens_total{key="alice",kind="prompt"} 6.0',
        'latebranch_key_tokens_total{key="alice",kind="generation"} 80.0',
        'latebranch_key_tokens_total{key="root",kind="generation"} 3.0',
    ):
        assert line in text.splitlines()
    assert "bob" not in text


ANSWERS = [
    (URL, completion(), 5, None),
    (URL, completion(max_tokens=5), 5, None),
    (URL, completion(max_tokens=6), None, "max_tokens"),
    ("/v1/chat/completions", chat(), 5, None),
    ("/v1/chat/completions", chat(max_tokens=6), None, "max_tokens"),
    ("/v1/chat/completions", chat(max_tokens=1, max_completion_tokens=6), None, "max_completion_tokens"),
    ("/v1/responses", {"model": MODEL, "input": "x", "max_output_tokens": 6}, None, "max_output_tokens"),
    ("/v1/responses", {"model": MODEL, "input": "x"}, 5, None),
    ("/infill", {"input_prefix": "x", "input_suffix": "x"}, 5, None),
    ("/infill", {"input_prefix": "x", "input_suffix": "x", "n_predict": 6}, None, "n_predict"),
]


@pytest.mark.parametrize(("path", "body", "num_tokens", "param"), ANSWERS)
async def test_answers_are_no_longer_than_allowed(path: str, body: dict[str, object], num_tokens: int | None, param: str | None):
    async with in_process(engine := FakeEngine(vocab_size=500), max_answer_tokens=5, tokenizer=infilling("qwen")) as client:
        answer = await client.post(path, json=body)
        assert answer.status_code == (200 if num_tokens else 400)
        if num_tokens is None:
            assert (answer.json()["error"]["param"], engine.requests) == (param, [])
        else:
            assert engine.requests[0].sampling.max_tokens == num_tokens


def test_time_before_spending_is_not_counted_twice():
    """A full bucket stays full while nothing is spent: what a late token costs is not made up for by the time before it."""
    account = Account(RateLimits(max_tokens_per_minute=60), 0.0)
    account.spend(60, 60.0)
    assert _enters(account, 60.0) == 1
    assert _enters(account, 61.0) is None
