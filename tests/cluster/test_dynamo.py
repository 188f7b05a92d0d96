"""Workers behind Dynamo's frontend: texts are those of `latebranch serve`, and a lost or stopped worker changes none.

DYNAMO_STREAMS and DYNAMO_KILLS set the length of the longest test.
"""

import itertools
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.cluster.dynamo_nodes import MODEL, Cluster, DynamoWorker, dynamo_python, running_cluster
from tests.e2e.server import RunningServer, running_server

NUM_STREAMS = int(os.environ.get("DYNAMO_STREAMS", "40"))
NUM_KILLS = int(os.environ.get("DYNAMO_KILLS", "4"))
LIMIT = 64
# Fields of requests, in turn. Each is resumed in the middle by the tests of deaths.
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 0},
    {"temperature": 1.0, "top_p": 0.9, "stop": [" and then", "."]},
    {"temperature": 0.8, "frequency_penalty": 0.6, "presence_penalty": 0.3},
    {"temperature": 1.1, "extra_body": {"min_tokens": 40, "top_k": 50, "repetition_penalty": 1.1}},
]
PROMPTS = ("Once upon a time", "The sea was", "A good recipe needs", "In 1850 the emoji 🦜 was", "def fibonacci(n):")


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    dynamo_python()  # skip before a model is loaded
    with running_server(tmp_path_factory.mktemp("direct") / "server.log", "--model", MODEL) as server:
        yield server


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path, 3) as running:
        yield running


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=300)


def fields(index: int) -> dict[str, Any]:
    kind = KINDS[index % len(KINDS)]
    return {
        "model": MODEL,
        "prompt": PROMPTS[index // len(KINDS) % len(PROMPTS)],
        "max_tokens": LIMIT,
        "seed": 1000 + index,
        **kind,
    }


def for_dynamo(request: dict[str, Any]) -> dict[str, Any]:
    """Return the request with the annotation that penalties need."""
    annotations = {"nvext": {"annotations": [f"max_tokens:{request['max_tokens']}"]}}
    return {**request, "extra_body": {**request.get("extra_body", {}), **annotations}}


def whole(url: str, request: dict[str, Any]) -> str:
    return str(client_of(url).completions.create(**request).choices[0].text)


def streamed(url: str, request: dict[str, Any]) -> tuple[str, float, int]:
    """Return a stream's text, its longest gap between chunks, and its prompt tokens."""
    text, gap, last, num_prompt = "", 0.0, None, 0
    for chunk in client_of(url).completions.create(**request, stream=True, stream_options={"include_usage": True}):
        now = time.monotonic()
        gap = max(gap, now - last) if last is not None else gap
        last = now
        text += "".join(choice.text for choice in chunk.choices)
        num_prompt = chunk.usage.prompt_tokens if chunk.usage else num_prompt
    return text, gap, num_prompt


def expected_of(direct: RunningServer, requests: list[dict[str, Any]]) -> list[str]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda request: whole(direct.url, request), requests))


def test_texts_are_those_of_serve(cluster: Cluster, direct: RunningServer) -> None:
    """Seeds, stop strings, penalties and temperature 0, whole and streamed, by OpenAI's client."""
    requests = [fields(index) for index in range(10)]
    expected = expected_of(direct, requests)
    assert [whole(cluster.url, for_dynamo(request)) for request in requests] == expected
    assert [streamed(cluster.url, for_dynamo(request))[0] for request in requests] == expected
    messages: Any = [{"role": "user", "content": "Name a colour."}]
    chat = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 16, "logprobs": True, "top_logprobs": 2}
    answers = [client_of(url).chat.completions.create(**chat).choices[0] for url in (cluster.url, direct.url)]
    assert answers[0].message.content == answers[1].message.content
    rows = [[[(top.token, round(top.logprob, 4)) for top in row.top_logprobs] for row in one.logprobs.content] for one in answers]
    assert rows[0] == rows[1]
    guided = {**fields(0), "extra_body": {"guided_regex": "[a-f]{4}"}}
    vllms = {**fields(0), "extra_body": {"structured_outputs": {"regex": "[a-f]{4}"}}}
    assert whole(cluster.url, guided) == whole(direct.url, vllms)


@pytest.mark.parametrize(
    ("name", "request_fields"),
    [
        ("n", {"n": 2}),
        ("best_of", {"best_of": 2}),
        ("prompt_logprobs", {"echo": True}),
        ("frequency_penalty", {"frequency_penalty": 0.5}),
        ("presence_penalty", {"presence_penalty": -0.5}),
        ("max_thinking_tokens", {"extra_body": {"nvext": {"max_thinking_tokens": 5}}}),
        ("at most", {"max_tokens": 10_000}),
    ],
)
def test_refusals_reach_the_client(one_worker: Cluster, name: str, request_fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match=name):
        whole(one_worker.url, {**fields(0), **request_fields})


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("one"), 1) as running:
        yield running


def test_a_dropped_client_frees_its_place(one_worker: Cluster) -> None:
    (worker,) = one_worker.workers
    request = {**fields(0), "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    stream = client_of(one_worker.url).completions.create(**request, stream=True)
    next(iter(stream))
    assert worker.metric("vllm:num_requests_running") == 1
    stream.close()
    end = time.monotonic() + 5
    while worker.metric("vllm:num_requests_running") and time.monotonic() < end:
        time.sleep(0.1)
    assert worker.metric("vllm:num_requests_running") == 0
    assert worker.metric("vllm:request_success_total") >= 1


@pytest.mark.timeout(1800)
def test_killed_workers_change_no_text(cluster: Cluster, direct: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    """`kill -9` of one worker after another, under streams: every text is that of an undisturbed server.

    The streams are repeated until there were enough kills.
    """
    requests = [fields(index) for index in range(NUM_STREAMS)]
    expected = expected_of(direct, requests)
    num_kills, num_streams, gaps, num_prompts = 0, 0, list[float](), set[tuple[str, int]]()

    def kill_in_turn() -> None:
        nonlocal num_kills
        for worker in itertools.cycle(cluster.workers):
            if num_kills == NUM_KILLS:
                return
            others = [other for other in cluster.workers if other is not worker]
            if worker.is_ready and worker.metric("vllm:num_requests_running") and any(other.is_ready for other in others):
                worker.kill()
                num_kills += 1
                worker.start()
            time.sleep(0.1)

    killer = threading.Thread(target=kill_in_turn)
    killer.start()
    with ThreadPoolExecutor(6) as pool:
        while killer.is_alive() or not num_streams:
            answers = list(pool.map(lambda request: streamed(cluster.url, for_dynamo(request)), requests))
            assert [text for text, _, _ in answers] == expected
            num_streams += len(answers)
            gaps += [gap for _, gap, _ in answers]
            num_prompts |= {(request["prompt"], answer[2]) for request, answer in zip(requests, answers, strict=True)}
    killer.join()
    with capsys.disabled():
        sys.stdout.write(f"\n{num_streams} streams, {num_kills} kills, {cluster.num_migrated():g} migrated; ")
        sys.stdout.write(f"longest gap {max(gaps):.2f} s, median of streams {statistics.median(gaps):.2f} s\n")
    assert len(num_prompts) == len({request["prompt"] for request in requests})  # generated tokens are not counted as prompt
    assert cluster.num_migrated() >= 1


@pytest.mark.parametrize("drain_s", [60, 0])
def test_a_stopped_worker_changes_no_text(tmp_path: Path, direct: RunningServer, drain_s: int) -> None:
    """SIGTERM: streams end where they are, or, beyond `drain_s`, on another worker. No client sees an error."""
    requests = [{**fields(index), "max_tokens": 400, "extra_body": {"ignore_eos": True}} for index in (0, 1, 5, 6)]
    expected = expected_of(direct, requests)
    with running_cluster(tmp_path, 2, "--drain-s", str(drain_s)) as cluster, ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(streamed, cluster.url, for_dynamo(request)) for request in requests]
        leaving = _busy(cluster.workers)
        leaving.process.send_signal(signal.SIGTERM)
        assert [answer.result()[0] for answer in answers] == expected
        assert leaving.process.wait(90) == 0
        assert whole(cluster.url, for_dynamo(fields(0)))


def _busy(workers: list[DynamoWorker]) -> DynamoWorker:
    while True:
        for worker in workers:
            if worker.metric("vllm:num_requests_running"):
                return worker
        time.sleep(0.05)
