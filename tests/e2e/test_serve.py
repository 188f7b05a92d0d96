"""The server as its users have it: a real process, real weights, the openai client, many streams at once."""

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.prompts import PROMPTS
from tests.e2e.server import RunningServer, sse

pytestmark = [pytest.mark.weights, pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = "smollm2-135m"
SHAPES = [(0, 1, 0), (4, 1, 0), (2, 2, 2), (0, 3, 2), (6, 1, 0)]


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_openai_client_streams_with_speculation_on(server: RunningServer, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Repeat exactly: one two three one two three one two three one two three"}],
        max_tokens=24,
        temperature=0,
        stream=True,
        extra_body={"speculative": {"trunk": 4, "branches": 1, "depth": 0}},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] in ("stop", "length")
    assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0


def test_streamed_plain_and_speculative_texts_are_equal(client: openai.OpenAI) -> None:
    def text(speculative: dict[str, Any], **sampling: Any) -> str:
        body = {"model": MODEL, "prompt": PROMPTS[1], "max_tokens": 24, "extra_body": {"speculative": speculative}, **sampling}
        return str(client.completions.create(**body).choices[0].text)

    for sampling in ({"temperature": 0}, {"temperature": 0.9, "seed": 5, "top_p": 0.9}):
        texts = {text({"trunk": t, "branches": b, "depth": d}, **sampling) for t, b, d in SHAPES[1:]}
        assert texts == {text({"enabled": False}, **sampling)}


def _body(index: int, choice: random.Random) -> dict[str, Any]:
    trunk, branches, depth = SHAPES[index % len(SHAPES)]
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": PROMPTS[index % len(PROMPTS)],
        "max_tokens": choice.choice([4, 12, 24, 48]),
        "temperature": choice.choice([0, 0.7, 1.0]),
        "stream": True,
        "speculative": {"trunk": trunk, "branches": branches, "depth": depth},
    }
    return body | ({"seed": index} if index % 4 == 0 else {})


def _stream(url: str, body: dict[str, Any], num_events: int | None) -> list[dict[str, Any] | None]:
    """Return a stream's events; with `num_events` hang up after so many."""
    events: list[dict[str, Any] | None] = []
    with httpx.stream("POST", url + "/v1/completions", json=body, timeout=300) as response:
        assert response.status_code == 200
        for event in sse(response.iter_lines()):
            events.append(event)
            if num_events is not None and len(events) >= num_events:
                return events
    return events


def test_sixteen_streams_a_third_of_them_abandoned(server: RunningServer) -> None:
    choice = random.Random(0)
    bodies = [_body(index, choice) for index in range(16)]
    num_restarts = server.get("/health").json()["restarts"]
    with ThreadPoolExecutor(16) as pool:
        limits = [2 if index % 3 == 2 else None for index in range(16)]
        streams = list(pool.map(lambda pair: _stream(server.url, *pair), zip(bodies, limits, strict=True)))
    for body, limit, events in zip(bodies, limits, streams, strict=True):
        if limit is None:
            assert events[-1] is None
            data = [event for event in events if event is not None]
            assert not any("error" in event for event in data)
            assert sum(event["choices"][0]["finish_reason"] is not None for event in data if event["choices"]) == 1, body
    _wait_until_idle(server)
    # An idle engine checks its books, and a leak would have ended the worker.
    assert server.get("/health").json()["restarts"] == num_restarts


def _wait_until_idle(server: RunningServer) -> None:
    for _ in range(300):
        gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        if not any(server.metric(name) for name in gauges):
            return
        time.sleep(0.1)
    raise AssertionError("requests or slots are left: " + server.get("/metrics").text)


BAD_BODIES: list[tuple[bytes, int]] = [
    (json.dumps({"model": MODEL, "prompt": "x " * 20000, "max_tokens": 4}).encode(), 400),
    (json.dumps({"model": "no-such-model", "prompt": "x"}).encode(), 404),
    (json.dumps({"model": MODEL, "prompt": {"a": 1}}).encode(), 400),
    (json.dumps({"model": MODEL, "prompt": ""}).encode(), 400),
    (json.dumps({"model": MODEL, "prompt": []}).encode(), 400),
    (json.dumps({"model": MODEL, "prompt": "x", "max_tokens": -1}).encode(), 400),
    (json.dumps({"model": MODEL, "prompt": "x", "temperature": -0.1}).encode(), 400),
    (json.dumps({"model": MODEL, "prompt": "x", "n": 0}).encode(), 400),
    (json.dumps({"model": MODEL, "prompt": [-5]}).encode(), 400),
    (json.dumps({"model": MODEL, "prompt": "x", "presence_penalty": 3.0}).encode(), 400),
    (json.dumps({"model": MODEL, "prompt": "x", "speculative": {"verifier": "guess"}}).encode(), 400),
    (b'{"model": "smollm2-135m", "prompt": "\xff\xfe"}', 400),
    (b"[" * 5000, 400),
    (b"not json", 400),
    (b'{"prompt": "' + b"x" * 5_000_000 + b'"}', 413),
]


@pytest.mark.parametrize(("body", "status"), BAD_BODIES, ids=range(len(BAD_BODIES)))
def test_bad_input_is_a_clear_refusal(server: RunningServer, body: bytes, status: int) -> None:
    response = httpx.post(server.url + "/v1/completions", content=body, headers={"content-type": "application/json"}, timeout=60)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["message"]
    assert len(response.content) < 12_000
    assert server.get("/health").status_code == 200


def worker_pid(server: RunningServer) -> int:
    """Return the id of the server's one descendant that is a worker."""
    waiting, found = [server.process.pid], []
    while waiting:
        pid = waiting.pop()
        waiting += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        if Path(f"/proc/{pid}/comm").read_text().startswith("latebranch-work"):
            found.append(pid)
    (worker,) = found
    return worker


def test_a_stream_outlives_its_worker(server: RunningServer, client: openai.OpenAI) -> None:
    """It pauses while the next one loads, and goes on with the text that it would have had."""

    def stream() -> Iterator[str]:
        chunks = client.completions.create(
            model=MODEL,
            prompt="The sea at night",
            max_tokens=48,
            seed=11,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        for chunk in chunks:
            yield chunk.choices[0].text if chunk.choices else f"<{chunk.usage.completion_tokens if chunk.usage else None}>"

    undisturbed = "".join(stream())
    num_restarts = server.metric("latebranch_engine_restarts_total")
    texts = stream()
    first = next(texts)
    os.kill(worker_pid(server), signal.SIGKILL)
    assert "".join([first, *texts]) == undisturbed
    assert undisturbed.endswith("<48>")
    assert server.get("/live").status_code == 200
    assert server.metric("latebranch_engine_restarts_total") == num_restarts + 1
    assert server.metric("latebranch_resumed_requests_total") >= 1


def test_an_unseeded_stream_outlives_its_worker(server: RunningServer, client: openai.OpenAI) -> None:
    """It goes on with the noise that it began with (tests/model/worker/test_client_faults.py compares the text)."""
    chunks = client.completions.create(
        model=MODEL,
        prompt="The sea at night",
        max_tokens=48,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    next(chunks)
    num_restarts = server.metric("latebranch_engine_restarts_total")
    os.kill(worker_pid(server), signal.SIGKILL)
    *_, last = chunks
    assert last.usage is not None
    assert last.usage.completion_tokens == 48
    assert server.metric("latebranch_engine_restarts_total") == num_restarts + 1
