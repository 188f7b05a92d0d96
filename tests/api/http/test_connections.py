"""Through a real server: clients that leave, and the official client."""

import asyncio

import httpx
import openai
import pytest

from tests.api.harness import MODEL, chat, completion, over_loopback, sample, until
from tests.fake_engine import FakeEngine, emits
from tests.tokenizers_for_tests import byte_level

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of connections that tests break on purpose


def _silent(num_free_events: int) -> FakeEngine:
    """Return an engine that emits so many events and then nothing until it is aborted."""
    return FakeEngine(gate=asyncio.Event(), num_free_events=num_free_events)


async def test_abandoned_stream_is_aborted_before_next_step():
    engine = _silent(num_free_events=2)
    async with over_loopback(engine) as url, httpx.AsyncClient(base_url=url) as client:
        async with client.stream("POST", "/v1/chat/completions", json=chat(stream=True, n=2)) as response:
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
        await until(lambda: not engine.living)
        assert sorted(engine.aborted) == sorted(request.request_id for request in engine.requests)
        assert engine.num_steps <= 4
        aborts = (await sample(client))['vllm:request_success_total{engine="0",finished_reason="abort",model_name="fake"}']
        assert aborts == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_request_abandoned_before_output_is_aborted(stream: bool):
    engine = _silent(num_free_events=0 if stream else 1)
    async with over_loopback(engine) as url, httpx.AsyncClient(base_url=url) as client:
        pending = asyncio.create_task(client.post("/v1/completions", json=completion(stream=stream), timeout=None))
        await until(lambda: engine.requests)
        pending.cancel()
        await until(lambda: not engine.living)
        assert pending.cancelled()
        assert engine.aborted == [engine.requests[0].request_id]
        assert (await client.get("/live")).status_code == 200


async def test_the_official_client_is_at_home():
    text = "hello 日本語 😀"
    engine = FakeEngine(script=emits(byte_level().encode(text)), chunks=(2,))
    async with over_loopback(engine) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        whole = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
        assert whole.choices[0].message.content == text
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}],
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"speculative": {"enabled": False}, "top_k": 5},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
        assert chunks[-1].usage is not None
        completed = await client.completions.create(model=MODEL, prompt="x", logprobs=1)
        assert completed.choices[0].text == text


async def test_official_client_raises_its_own_errors():
    engine = FakeEngine(script=emits(byte_level().encode("hello there")))
    async with over_loopback(engine) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.completions.create(model=MODEL, prompt="x", temperature=9)
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="x")
        engine.fail_after = 1
        with pytest.raises(openai.APIError, match="the step failed"):
            async for _ in await client.completions.create(model=MODEL, prompt="x", stream=True):
                pass
        engine.max_living = 0
        with pytest.raises(openai.InternalServerError, match="full"):
            await client.completions.create(model=MODEL, prompt="x")


async def test_concurrent_streams_keep_their_own_texts():
    engine = FakeEngine(chunks=(1, 3, 2))
    async with over_loopback(engine) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:

        async def text_of(number: int) -> str:
            body = completion(prompt=[number], max_tokens=40)
            return str((await client.post("/v1/completions", json=body)).json()["choices"][0]["text"])

        alone = [await text_of(number) for number in range(5, 25)]
        together = await asyncio.gather(*(text_of(number) for number in range(5, 25)))
    assert together == alone
    assert len(set(alone)) > 10
