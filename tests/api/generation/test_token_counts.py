"""Generated tokens are counted once and alike: by the counter, by the histograms of requests and by the usage in answers."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from engine.core.service import EngineState
from engine.core.types import FinishReason, TokenEvent
from server.metrics.requests import SampleMeter
from tests.api.harness import chat, completion, data_of, in_process, over_loopback, sample, until
from tests.clients import worker_client
from tests.counting_engine import Trick
from tests.fake_engine import FakeEngine, emits
from tests.tokenizers_for_tests import byte_level

CODEC = byte_level()
IDS = CODEC.encode("hello big fox and a dog")
LABELS = '{engine="0",model_name="fake"}'

WAYS: dict[str, dict[str, Any]] = {
    "length": {},
    "limit": {"max_tokens": 2},
    "token": {"stop_token_ids": [IDS[3]]},
    "string in a step": {"stop": CODEC.decode(IDS[2:3])},
    "string at once": {"stop": CODEC.decode(IDS[:1])},
    "string at a step's end": {"stop": CODEC.decode(IDS[4:5])},
    "samples": {"n": 3, "stop": CODEC.decode(IDS[2:3])},
    "prompts": {"prompt": [[5, 6], [7]], "n": 2},
    "best": {"n": 1, "best_of": 3, "stop": CODEC.decode(IDS[2:3])},
}


async def counted(client: httpx.AsyncClient, url: str = "") -> tuple[float, float, float]:
    """Return the tokens counted in all, those of ended samples, and how many samples have ended."""
    samples = await sample(client, url + "/metrics")
    ended = "vllm:request_generation_tokens"
    names = ("vllm:generation_tokens_total", f"{ended}_sum", f"{ended}_count")
    total, in_samples, num_samples = (samples[name + LABELS] for name in names)
    return total, in_samples, num_samples


async def check_an_end_counts_alike(fields: dict[str, Any], chunks: tuple[int, ...]) -> None:
    async with in_process(FakeEngine(script=emits(IDS), chunks=chunks)) as client:
        body = completion(**{"max_tokens": 99, **fields})
        answer = (await client.post("/v1/completions", json=body)).json()
        num_tokens = answer["usage"]["completion_tokens"]
        total, in_samples, _ = await counted(client)
        assert (total, in_samples) == (num_tokens, num_tokens)
        if "best_of" in fields:
            return  # which does not stream
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        usage = data_of((await client.post("/v1/completions", json=streamed)).text)[-1]["usage"]
        total, in_samples, _ = await counted(client)
        assert (total, in_samples) == (num_tokens + usage["completion_tokens"],) * 2


@pytest.mark.parametrize("chunks", [(1,), (1, 4)])
@pytest.mark.parametrize("way", WAYS)
async def test_each_end_counts_alike(way: str, chunks: tuple[int, ...]):
    """The bug: tokens after a stop string were counted by the metrics, and not by the usage of the answer."""
    await check_an_end_counts_alike(WAYS[way], chunks)


async def test_counting_whole_events_is_detected(monkeypatch: pytest.MonkeyPatch):
    """The mutant: an event's tokens count even if the answer ends before them."""
    on_event = SampleMeter.on_event

    def whole(self: SampleMeter, event: TokenEvent) -> None:
        on_event(self, event)
        keep(self, len(event.token_ids))

    keep = SampleMeter.keep
    monkeypatch.setattr(SampleMeter, "on_event", whole)
    monkeypatch.setattr(SampleMeter, "keep", lambda *_: None)
    await check_an_end_counts_alike(WAYS["length"], (1, 4))
    with pytest.raises(AssertionError):
        await check_an_end_counts_alike(WAYS["string in a step"], (1, 4))


@asynccontextmanager
async def leaving(engine: FakeEngine, path: str, body: dict[str, Any]) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """Yield a second client and the address, after eight clients began requests and left."""
    async with over_loopback(engine) as url, httpx.AsyncClient() as client:
        tasks = [asyncio.create_task(client.post(url + path, json=body)) for _ in range(8)]
        await until(lambda: len(engine.living) == 8)
        await asyncio.sleep(0.05)  # the events that the gate lets through
        for task in tasks:
            task.cancel()
        await until(lambda: not engine.living)
        yield client, url


@pytest.mark.parametrize("num_events", [0, 1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body_of"), [("/v1/completions", completion), ("/v1/chat/completions", chat)])
async def test_requests_of_clients_that_left_count_alike(path: str, body_of: Any, stream: bool, num_events: int):
    """The bug: after eight aborted requests the counter had grown by 50, the histogram's sum by 42.

    The engine went on for a step or two, whose tokens the counter had and the requests had not. No event: aborted in the queue.
    """
    engine = FakeEngine(script=emits(IDS * 9), chunks=(1, 4), gate=asyncio.Event(), num_free_events=num_events)
    async with leaving(engine, path, body_of(stream=stream, max_tokens=99, ignore_eos=True)) as (client, url):
        engine._step(TokenEvent("late", (5,) * 7))  # a step under way when they left
        total, in_samples, num_samples = await counted(client, url)
        assert num_samples == 8
        assert total == in_samples == 8 * (0, 1, 5, 6)[num_events]


@pytest.mark.parametrize("num_samples", [1, 3])
async def test_failed_requests_count_alike(num_samples: int):
    """What was generated before the engine failed counts, of siblings too."""
    async with in_process(FakeEngine(script=emits(IDS), chunks=(2,), fail_after=2)) as client:
        body = completion(n=num_samples, max_tokens=99)
        assert (await client.post("/v1/completions", json=body)).status_code == 500
        total, in_samples, ended = await counted(client)
        assert ended == num_samples
        assert total == in_samples >= 4


async def test_late_requests_count_alike():
    """A request that a time limit ends has as many tokens in both."""
    engine = FakeEngine(script=emits(IDS), gate=asyncio.Event(), num_free_events=2)
    async with in_process(engine) as client:
        assert (await client.post("/v1/completions", json=completion(max_tokens=9, timeout_s=0.2))).status_code == 504
        assert await counted(client) == (2, 2, 1)


async def test_resumed_requests_count_each_token_once():
    """What a dead worker generated is not counted again, nor what it generated and did not report."""
    engine = worker_client()
    async with in_process(engine) as client:
        body = completion(prompt=[Trick.PACE, 5], max_tokens=200, n=2, return_token_ids=True)
        pending = asyncio.create_task(client.post("/v1/completions", json=body))
        for number in (1, 2):
            before, _, _ = await counted(client)
            while (await counted(client))[0] < before + 20 and not pending.done():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            (process,) = multiprocessing.active_children()
            os.kill(process.pid or 0, signal.SIGKILL)
            await until(lambda number=number: engine.health.num_restarts == number and engine.health.state is EngineState.READY)
        answer = (await pending).json()
        assert [choice["token_ids"] for choice in answer["choices"]] == [list(range(6, 206))] * 2
        assert answer["usage"]["completion_tokens"] == 400
        assert await counted(client) == (400, 400, 2)


async def test_the_counter_grows_while_requests_run():
    """A dashboard's rate of tokens must not wait for the ends."""
    engine = FakeEngine(script=emits(IDS), gate=(gate := asyncio.Event()), num_free_events=3)
    async with in_process(engine) as client:
        pending = asyncio.create_task(client.post("/v1/completions", json=completion(max_tokens=5)))
        while (await counted(client))[0] < 3:  # noqa: ASYNC110 (no event marks the count)
            await asyncio.sleep(0)
        assert await counted(client) == (3, 0, 0)
        gate.set()
        await pending
        assert await counted(client) == (5, 5, 1)
        assert (await sample(client))[
            f'vllm:request_success_total{{engine="0",finished_reason="{FinishReason.LENGTH}",model_name="fake"}}'
        ] == 1
