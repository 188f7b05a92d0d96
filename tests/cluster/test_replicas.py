"""Three replicas of the default model behind smg: prefixes stay with their replica, and a death or a drain costs no answer."""

import contextlib
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.gateway import running_gateway
from tests.e2e.server import RunningServer, running_server

MODEL = "smollm2-135m"
NUM_REPLICAS = 3
ROUTED = "x-smg-routed-worker-id"
NAMES = ("Amber", "Birch", "Cedar", "Delta", "Ember", "Fjord")
PREFIXES = [f"Report {name}. " + f"The {name} team met to discuss its plan for the coming season. " * 16 for name in NAMES]


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[RunningServer]]:
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        starting = [running_server(tmp_path / f"replica{index}.log", "--model", MODEL) for index in range(NUM_REPLICAS)]
        yield list(pool.map(stack.enter_context, starting))


@pytest.fixture
def gateway(replicas: list[RunningServer], tmp_path: Path) -> Iterator[str]:
    with running_gateway(tmp_path / "smg.log", [replica.url for replica in replicas]) as url:
        yield url


def body(prompt: str, seed: int) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 16, "seed": seed, "ignore_eos": True}


def post(url: str, request: dict[str, Any]) -> httpx.Response:
    return httpx.post(url + "/v1/completions", json=request, timeout=120)


def texts(url: str, requests: list[dict[str, Any]]) -> list[str]:
    return [post(url, request).json()["choices"][0]["text"] for request in requests]


def test_prefixes_return_to_their_replica(gateway: str, replicas: list[RunningServer]) -> None:
    requests = [(index, body(f"{prefix} Summary {turn}:", turn)) for turn in range(16) for index, prefix in enumerate(PREFIXES)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda one: post(gateway, one[1]), requests))
    assert {answer.status_code for answer in answers} == {200}
    workers = defaultdict(list)
    for (index, _), answer in zip(requests, answers, strict=True):
        workers[index].append(answer.headers[ROUTED])
    at_home = sum(max(Counter(seen).values()) for seen in workers.values())
    assert at_home >= 0.95 * len(requests), workers
    assert len({seen[0] for seen in workers.values()}) > 1  # the prefixes are shared out
    cached = sum(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
    assert cached >= 0.8 * sum(answer.json()["usage"]["prompt_tokens"] for answer in answers)
    assert sum(replica.get("/v1/loads").json()["loads"][0]["num_used_tokens"] for replica in replicas) == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_ending_replica_costs_no_answer(gateway: str, replicas: list[RunningServer], number: signal.Signals) -> None:
    """Whole answers are given again by another replica after a kill, and seeds give the same texts there."""
    requests = [body(f"{prefix} Question {turn}:", 100 + turn) for turn in range(8) for prefix in PREFIXES]
    expected = texts(replicas[0].url, requests)
    leaving = replicas[1]

    def send(numbered: tuple[int, dict[str, Any]]) -> httpx.Response:
        index, request = numbered
        if index == len(requests) // 3:
            leaving.process.send_signal(number)
        return post(gateway, request)

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(send, enumerate(requests)))
    assert Counter(answer.status_code for answer in answers) == {200: len(requests)}
    assert [answer.json()["choices"][0]["text"] for answer in answers] == expected
    assert len({answer.json()["id"] for answer in answers}) == len(requests)
    assert leaving.process.wait(60) == (-signal.SIGKILL if number == signal.SIGKILL else 0)
    later = [post(gateway, request).headers[ROUTED] for request in requests[:6]]
    assert leaving.url not in later


def test_streams_of_a_draining_replica_end_whole(gateway: str, replicas: list[RunningServer]) -> None:
    requests = [{**body(prefix, 7), "max_tokens": 96, "stream": True} for prefix in PREFIXES]
    expected = texts(replicas[0].url, [{**request, "stream": False} for request in requests])
    stopped: list[RunningServer] = []

    def read(request: dict[str, Any]) -> tuple[str, str]:
        with httpx.stream("POST", gateway + "/v1/completions", json=request, timeout=120) as answer:
            lines: list[str] = []
            home = answer.headers[ROUTED]
            for line in answer.iter_lines():
                if len(lines) == 8 and not stopped:  # the first stream that is under way stops its replica
                    stopped.append(next(replica for replica in replicas if replica.url == home))
                    stopped[0].process.send_signal(signal.SIGTERM)
                lines.append(line)
        return home, "\n".join(lines)

    with ThreadPoolExecutor(len(requests)) as pool:
        streams = list(pool.map(read, requests))
    assert stopped[0].url in {home for home, _ in streams}
    for (_, stream), text in zip(streams, expected, strict=True):
        events = [line for line in stream.splitlines() if line.startswith("data: {")]
        assert stream.rstrip().endswith("data: [DONE]")
        assert "error" not in stream
        assert "".join(_text(event) for event in events) == text


def _text(event: str) -> str:
    choices = httpx.Response(200, text=event.removeprefix("data: ")).json()["choices"]
    return "".join(choice["text"] for choice in choices)
