"""Steps in streams, by the real app over a real tiny engine: each once, in chunks that OpenAI's client reads as before."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from engine.core.config import SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.tree import Expansion
from engine.testing import tiny_engine, tiny_pair
from engine.worker.inprocess import InProcessEngine
from tests.api.harness import MODEL, chat, completion, data_of, in_process, over_loopback
from tests.fake_engine import FakeEngine
from tests.tokenizers_for_tests import byte_level

TRACED = {"stream": True, "max_tokens": 12, "seed": 5, "ignore_eos": True, "speculative": {"trace": True}}
PARTS = {"root", "trunk", "branch", "cached", "prediction"}


@pytest.fixture
def engine() -> InProcessEngine:
    """A tiny pair that knows every token of the test tokenizer."""
    limits = SchedulerConfig(num_slots=2048, max_model_len=256)
    pair = tiny_pair(vocab_size=len(byte_level().get_vocab()))
    return InProcessEngine(lambda: tiny_engine(*pair, FixedExpansion(Expansion(2, 2, 2)), config=limits), limits)


@pytest.fixture
async def client(engine: InProcessEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with in_process(engine) as client:
        yield client


async def chunks_of(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return data_of(response.text)


def traces_in(chunks: list[Any]) -> list[Any]:
    choices = [one for chunk in chunks for one in chunk["choices"]]
    return [one["speculative_trace"] for one in choices if one.get("speculative_trace")]


def emitted(traces: list[Any]) -> list[int]:
    """Return the tokens of the text: those of each accepted path and the extra one, cut where the text ends."""
    ids: list[int] = []
    for trace in traces:
        path = [node["token_id"] for node in trace["nodes"] if node["accepted"]][1:]
        ids.extend([*path, trace["extra"]["token_id"]][: trace["num_emitted"]])
    return ids


def check_trace(trace: Any) -> None:
    """Check that a step is a tree with an accepted path, probabilities everywhere but at the root, and a sum of seconds."""
    root, *nodes = trace["nodes"]
    assert (root["part"], root["parent"], root["depth"], root["accepted"]) == ("root", None, 0, True)
    last = 0
    for place, node in enumerate(nodes, start=1):
        assert 0 <= node["parent"] < place
        assert node["depth"] == trace["nodes"][node["parent"]]["depth"] + 1
        assert node["part"] in PARTS - {"root"}
        assert 0.0 < node["draft_prob"] <= 1.0
        assert 0.0 <= node["target_prob"] <= 1.0
        if node["accepted"]:
            assert node["parent"] == last
            last = place
    assert 0.0 < trace["extra"]["target_prob"] <= 1.0
    assert sum(trace["stage_s"].values()) == pytest.approx(trace["step_s"])


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", completion(**TRACED)), ("/v1/chat/completions", chat(**TRACED))])
async def test_streamed_steps_are_unique_and_complete(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    traces = traces_in(await chunks_of(client, path, body))
    for trace in traces:
        check_trace(trace)
    steps = [trace["step"] for trace in traces]
    assert steps == sorted(set(steps))
    assert len(emitted(traces)) == 12
    assert max(trace["num_emitted"] for trace in traces) > 1
    whole = {**body, "stream": False, "speculative": {}}
    answer = (await client.post(path, json=whole)).json()["choices"][0]
    text = answer["text"] if "text" in answer else answer["message"]["content"]
    assert byte_level().decode(emitted(traces), skip_special_tokens=True) == text


async def test_step_without_text_yet_is_streamed(client: httpx.AsyncClient) -> None:
    """Half a letter has no text yet; its chunk is empty and has the step."""
    always = {"temperature": 0, "logit_bias": {str(byte_level().convert_tokens_to_ids("ð")): 100}}
    body = completion(**{**TRACED, **always, "speculative": {"trace": True, "enabled": False}})
    first, *_ = await chunks_of(client, "/v1/completions", body)
    assert first["choices"][0]["text"] == ""
    assert traces_in([first])[0]["extra"]["bytes"] == [0xF0]


async def test_each_sample_reports_its_own_steps(client: httpx.AsyncClient) -> None:
    chunks = await chunks_of(client, "/v1/completions", completion(**TRACED, n=2))
    traces_by_choice = {at: traces_in([chunk for chunk in chunks if chunk["choices"][0]["index"] == at]) for at in (0, 1)}
    assert [len(emitted(traces)) for traces in traces_by_choice.values()] == [12, 12]
    assert emitted(traces_by_choice[0]) != emitted(traces_by_choice[1])


async def test_plain_decoding_trace_has_same_tokens(client: httpx.AsyncClient) -> None:
    """The same seed: the same tokens, one a step."""
    traces = traces_in(await chunks_of(client, "/v1/completions", completion(**TRACED)))
    plain = {**TRACED, "speculative": {"trace": True, "enabled": False}}
    plain_traces = traces_in(await chunks_of(client, "/v1/completions", completion(**plain)))
    assert emitted(plain_traces) == emitted(traces)
    assert [len(trace["nodes"]) for trace in plain_traces] == [1] * 12


@pytest.mark.parametrize("speculative", [None, {}, {"trace": False}])
async def test_untraced_request_receives_no_trace(client: httpx.AsyncClient, speculative: dict[str, Any] | None) -> None:
    chunks = await chunks_of(client, "/v1/completions", completion(**{**TRACED, "speculative": speculative}))
    assert "speculative_trace" not in json.dumps(chunks)


async def test_file_trace_is_not_streamed(monkeypatch: pytest.MonkeyPatch, engine: InProcessEngine) -> None:
    """An engine that traces every request for a file also sends steps of requests without a trace to the front end."""
    monkeypatch.setattr("engine.scheduler.scheduler.Scheduler.traces_all", True, raising=False)

    def fail(*_: object) -> None:
        raise AssertionError("the request has no trace")

    monkeypatch.setattr("server.generation.sample.step_trace_of", fail)
    async with in_process(engine) as client:
        chunks = await chunks_of(client, "/v1/completions", completion(**{**TRACED, "speculative": {}}))
    assert traces_in(chunks) == []


@pytest.mark.parametrize("stream", [None, False])
async def test_without_a_stream_it_is_refused(stream: bool | None) -> None:
    async with in_process(FakeEngine()) as client:
        answer = await client.post("/v1/completions", json=completion(stream=stream, speculative={"trace": True}))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "speculative.trace"


async def test_openai_client_reads_traced_streams(engine: InProcessEngine) -> None:
    """The client's loop over chunks reads the same text, and the steps are fields of the chunks."""
    fields: dict[str, Any] = {"model": MODEL, "messages": chat()["messages"], "max_tokens": 12, "seed": 5, "stream": True}
    texts, traces = [], []
    async with over_loopback(engine) as url, openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:  # type: ignore[arg-type]
        for trace in (False, True):
            stream = await client.chat.completions.create(**fields, extra_body={"speculative": {"trace": trace}})
            chunks = [chunk async for chunk in stream]
            texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
            traces.append([found for chunk in chunks if (found := getattr(chunk.choices[0], "speculative_trace", None))])
        stream = await client.completions.create(
            model=MODEL, prompt="hello", max_tokens=12, stream=True, extra_body={"speculative": {"trace": True}}
        )
        assert "".join([chunk.choices[0].text async for chunk in stream])
    assert texts[0] == texts[1]
    assert not traces[0]
    for one in traces[1]:
        check_trace(one)
