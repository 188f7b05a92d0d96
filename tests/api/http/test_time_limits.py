"""Requests that are late end with an error that names the limit, and leave the engine."""

import asyncio

import httpx
import pytest

from server.generation.generation import Generation
from server.http.time_limits import TimeLimits
from tests.api.harness import MODEL, chat, completion, in_process, sample
from tests.fake_engine import FakeEngine
from tests.tokenizers_for_tests import infilling

pytestmark = pytest.mark.timeout(60)  # without a limit the requests of these tests never end

LONG_S = 3600.0
SHORT_S = 0.05
ROUTES = {
    "/v1/completions": completion(),
    "/v1/chat/completions": chat(),
    "/v1/responses": {"model": MODEL, "input": "hello"},
    "/infill": {"input_prefix": "hello", "input_suffix": "x"},
}


def stuck_after(num_events: int) -> FakeEngine:
    """Return an engine that emits so many events of each request and then nothing."""
    return FakeEngine(gate=asyncio.Event(), num_free_events=num_events, vocab_size=500)


def code_of(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["code"])


@pytest.mark.parametrize("path", list(ROUTES))
async def test_timeout_of_request_is_enforced(path: str) -> None:
    engine = stuck_after(1)
    async with in_process(engine, request_limit_s=LONG_S, tokenizer=infilling("qwen")) as client:
        answer = await client.post(path, json={**ROUTES[path], "timeout_s": SHORT_S})
        samples = await sample(client)
    assert (answer.status_code, code_of(answer)) == (504, "deadline_exceeded")
    assert answer.headers["x-should-retry"] == "false"
    assert answer.json()["error"]["param"] == "timeout_s"
    assert "server" not in answer.json()["error"]["message"]
    assert engine.living == {}
    assert samples['latebranch_failed_requests_total{code="deadline_exceeded",engine="0",model_name="fake"}'] == 1
    assert samples['vllm:request_success_total{engine="0",finished_reason="error",model_name="fake"}'] == 1


async def test_server_limit_applies_to_every_request() -> None:
    engine = stuck_after(1)
    async with in_process(engine, request_limit_s=SHORT_S) as client:
        for body in (completion(), completion(timeout_s=LONG_S)):
            answer = await client.post("/v1/completions", json=body)
            assert code_of(answer) == "deadline_exceeded"
            assert answer.json()["error"]["param"] is None, "no field of the request is to blame"
            assert "this server" in answer.json()["error"]["message"]
    assert engine.living == {}


async def test_late_stream_ends_with_an_error() -> None:
    async with in_process(engine := stuck_after(2)) as client:
        answer = await client.post("/v1/completions", json=completion(stream=True, n=2, timeout_s=20 * SHORT_S))
    events = answer.text.removesuffix("\n\n").split("\n\n")
    assert answer.status_code == 200
    assert len(events) > 2
    assert '"code":"deadline_exceeded"' in events[-2]
    assert events[-1] == "data: [DONE]"
    assert engine.living == {}


@pytest.mark.parametrize("stream", [True, False])
async def test_late_first_token_is_503(stream: bool) -> None:
    async with in_process(engine := stuck_after(0), first_token_limit_s=SHORT_S, request_limit_s=LONG_S) as client:
        answer = await client.post("/v1/completions", json=completion(stream=stream))
        samples = await sample(client)
    assert (answer.status_code, code_of(answer), answer.headers["retry-after"]) == (503, "first_token_late", "5")
    assert samples['latebranch_failed_requests_total{code="first_token_late",engine="0",model_name="fake"}'] == 1
    assert engine.living == {}


async def test_first_token_limit_ignores_later_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text must have begun; one that has is late no more."""
    calls: list[bool] = []
    limits = TimeLimits(first_token_s=1.0, total_s=5.0)
    assert limits.deadline_s(10.0, has_begun=False) == 11.0
    assert limits.deadline_s(10.0, has_begun=True) == 15.0

    def deadline_s(_: TimeLimits, _began_s: float, has_begun: bool) -> None:
        calls.append(has_begun)

    monkeypatch.setattr(TimeLimits, "deadline_s", deadline_s)
    async with in_process(FakeEngine()) as client:
        await client.post("/v1/completions", json=completion(n=3, max_tokens=4))
    assert calls == [False] * 3 + [True] * 9


async def test_request_within_limits_succeeds() -> None:
    async with in_process(stuck_after(1000), first_token_limit_s=LONG_S, tokenizer=infilling("qwen")) as client:
        for path, body in ROUTES.items():
            assert (await client.post(path, json={**body, "timeout_s": LONG_S})).status_code == 200


@pytest.mark.parametrize("wrong", [0, -1, "1", True])
async def test_timeout_must_be_positive(wrong: object) -> None:
    async with in_process(FakeEngine()) as client:
        answer = await client.post("/v1/completions", json=completion(timeout_s=wrong))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeout_s")


async def test_unenforced_limit_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant waits for ever; what is asserted of it is that the others do not pass by chance."""

    async def patient(self: Generation) -> object:
        return await self._arrival()

    monkeypatch.setattr(Generation, "_next_arrival", patient)
    async with in_process(stuck_after(1)) as client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.post("/v1/completions", json=completion(timeout_s=SHORT_S)), 10 * SHORT_S)
