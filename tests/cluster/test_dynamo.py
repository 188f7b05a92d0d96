"""Workers behind Dynamo's frontend: texts are those of `latebranch serve`, and a lost or stopped worker changes none.

DYNAMO_STREAMS and DYNAMO_KILLS set the length of the longest test, DYNAMO_TRIALS that of the one which measures moves.
"""

import itertools
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.cluster.dynamo_nodes import MODEL, Cluster, DynamoWorker, dynamo_python, running_cluster
from tests.cluster.test_replicas import PREFIXES
from tests.conformance.folder import served_folder
from tests.e2e.server import RunningServer, running_server

NUM_STREAMS = int(os.environ.get("DYNAMO_STREAMS", "40"))
NUM_KILLS = int(os.environ.get("DYNAMO_KILLS", "4"))
NUM_TRIALS = int(os.environ.get("DYNAMO_TRIALS", "1"))
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


@dataclass
class Stream:
    """What a client received: the text, when each chunk arrived, and the prompt's tokens as they are counted."""

    request_id: str = ""
    text: str = ""
    times: list[float] = field(default_factory=list)
    num_prompt: int = 0

    @property
    def longest_gap(self) -> float:
        return max(after - before for before, after in itertools.pairwise(self.times))


def streamed(url: str, request: dict[str, Any]) -> Stream:
    found = Stream()
    for chunk in client_of(url).completions.create(**request, stream=True, stream_options={"include_usage": True}):
        found.times.append(time.monotonic())
        found.request_id = chunk.id.removeprefix("cmpl-")
        found.text += "".join(choice.text for choice in chunk.choices)
        found.num_prompt = chunk.usage.prompt_tokens if chunk.usage else found.num_prompt
    return found


def moves(cluster: Cluster, streams: list[Stream], kills: list[float]) -> list[tuple[float, float]]:
    """Return, for each move, the seconds from the kill until another worker had the request, and from then to its next chunk."""
    arrivals = defaultdict(list)
    for worker in cluster.workers:
        for arrival in worker.arrivals():
            arrivals[arrival.request_id].append(arrival.at_s)
    found = []
    for stream in streams:
        for at_s in sorted(arrivals[stream.request_id])[1:]:
            killed_s = max(kill for kill in kills if kill < at_s)
            found.append((at_s - killed_s, min(time_s for time_s in stream.times if time_s > at_s) - at_s))
    return found


def described(found: list[tuple[float, float]]) -> str:
    to_arrival, to_chunk = ([move[part] for move in found] for part in (0, 1))
    parts = [f"median {statistics.median(one):.2f} s, longest {max(one):.2f} s" for one in (to_arrival, to_chunk)]
    return f"{len(found)} moves; from the kill to another worker {parts[0]}; from there to the next chunk {parts[1]}"


def expected_of(direct: RunningServer, requests: list[dict[str, Any]]) -> list[str]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda request: whole(direct.url, request), requests))


def test_texts_are_those_of_serve(cluster: Cluster, direct: RunningServer) -> None:
    """Seeds, stop strings, penalties and temperature 0, whole and streamed, by OpenAI's client."""
    requests = [fields(index) for index in range(10)]
    expected = expected_of(direct, requests)
    assert [whole(cluster.url, for_dynamo(request)) for request in requests] == expected
    assert [streamed(cluster.url, for_dynamo(request)).text for request in requests] == expected
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
    kills, streams = list[float](), list[Stream]()

    def kill_in_turn() -> None:
        for worker in itertools.cycle(cluster.workers):
            if len(kills) == NUM_KILLS:
                return
            others = [other for other in cluster.workers if other is not worker]
            if worker.is_ready and worker.metric("vllm:num_requests_running") and any(other.is_ready for other in others):
                kills.append(time.monotonic())
                worker.kill()
                worker.start()
            time.sleep(0.1)

    killer = threading.Thread(target=kill_in_turn)
    killer.start()
    with ThreadPoolExecutor(6) as pool:
        while killer.is_alive() or not streams:
            answers = list(pool.map(lambda request: streamed(cluster.url, for_dynamo(request)), requests))
            assert [answer.text for answer in answers] == expected
            streams += answers
    killer.join()
    found = moves(cluster, streams, kills)
    with capsys.disabled():
        longest = max(stream.longest_gap for stream in streams)
        sys.stdout.write(f"\n{len(streams)} streams, {len(kills)} kills, longest gap {longest:.2f} s; {described(found)}\n")
    counts = {(request["prompt"], stream.num_prompt) for request, stream in zip(itertools.cycle(requests), streams, strict=False)}
    assert len(counts) == len({request["prompt"] for request in requests})  # generated tokens are not counted as prompt
    assert cluster.num_migrated() >= 1


def test_moved_streams_go_on_soon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A killed worker is started again once all streams have ended, so that it takes no time from the other."""
    found = []
    with running_cluster(tmp_path, 2) as cluster, ThreadPoolExecutor(4) as pool:
        for trial in range(NUM_TRIALS):
            requests = [
                {**fields(5 * (4 * trial + index)), "max_tokens": 160, "extra_body": {"ignore_eos": True}} for index in range(4)
            ]
            answers = [pool.submit(streamed, cluster.url, request) for request in requests]
            leaving = _busy(cluster.workers)
            time.sleep(1)
            killed_s = time.monotonic()
            leaving.process.kill()
            found += moves(cluster, [answer.result() for answer in answers], [killed_s])
            leaving.kill()
            leaving.start()
            leaving.wait_ready()
            time.sleep(4)  # until the frontend knows it
    with capsys.disabled():
        sys.stdout.write(f"\n{described(found)}\n")
    assert len(found) >= NUM_TRIALS


def test_stopped_process_changes_no_text(tmp_path: Path, direct: RunningServer) -> None:
    """A worker that is silent, and does not close its connections: a lost machine."""
    request = {**fields(0), "max_tokens": 400, "extra_body": {"ignore_eos": True}}
    (expected,) = expected_of(direct, [request])
    with running_cluster(tmp_path, 2, variables={"DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS": "2"}) as cluster:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(streamed, cluster.url, for_dynamo(request))
            _busy(cluster.workers).process.send_signal(signal.SIGSTOP)
            assert answer.result().text == expected
        assert answer.result().longest_gap > 1.5
        assert cluster.num_migrated() == 1


@pytest.mark.parametrize("drain_s", [60, 0])
def test_a_stopped_worker_changes_no_text(tmp_path: Path, direct: RunningServer, drain_s: int) -> None:
    """SIGTERM: streams end where they are, or, beyond `drain_s`, on another worker. No client sees an error."""
    requests = [{**fields(index), "max_tokens": 400, "extra_body": {"ignore_eos": True}} for index in (0, 1, 5, 6)]
    expected = expected_of(direct, requests)
    with running_cluster(tmp_path, 2, "--drain-s", str(drain_s)) as cluster, ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(streamed, cluster.url, for_dynamo(request)) for request in requests]
        leaving = _busy(cluster.workers)
        leaving.process.send_signal(signal.SIGTERM)
        assert [answer.result().text for answer in answers] == expected
        assert leaving.process.wait(90) == 0
        assert whole(cluster.url, for_dynamo(fields(0)))


def _busy(workers: list[DynamoWorker]) -> DynamoWorker:
    while True:
        for worker in workers:
            if worker.metric("vllm:num_requests_running"):
                return worker
        time.sleep(0.05)


def test_router_knows_cached_prefixes(tmp_path: Path) -> None:
    """Dynamo's router takes up all events of the caches, without NATS, and sends a prompt where its beginning is cached."""
    with running_cluster(tmp_path, 2, "--kv-routing", frontend_flags=("--router-mode", "kv")) as cluster:
        prefixes = {}
        for turn, prefix in itertools.product(range(3), PREFIXES):
            stream = streamed(cluster.url, {**fields(0), "prompt": f"{prefix} Summary {turn}:", "max_tokens": 8})
            prefixes[stream.request_id] = prefix
            time.sleep(0.2)  # until the events have arrived
        homes = [Counter(prefixes[arrival.request_id] for arrival in worker.arrivals()) for worker in cluster.workers]
        assert sorted(count for home in homes for count in home.values()) == [3] * len(PREFIXES)
        assert all(homes)
        events = cluster.cache_events()
        assert events.keys() == {("stored", "ok")}
        assert events["stored", "ok"] >= len(PREFIXES)


def test_model_without_template_serves_completions(tmp_path: Path) -> None:
    """The bug: the model was offered for chats too."""
    folder = served_folder(tmp_path / "plain")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": None}))
    with running_cluster(tmp_path, 1, model=str(folder)) as cluster:
        assert whole(cluster.url, {**fields(0), "max_tokens": 4})
        with pytest.raises(openai.NotFoundError):
            client_of(cluster.url).chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hello"}])
