"""The official client, unchanged: sync and async, whole and streamed, its retries, its exceptions, its raw answers."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest

from engine.core.types import Request
from tests.conformance.served import PATIENCE_S, app_of, served
from tests.fake_engine import FakeEngine, emits
from tests.tokenizers_for_tests import byte_level, infilling

TEXT = "hello 日本語 😀 there"
IDS = byte_level().encode(TEXT)
MODEL = "tiny"
HELLO: list[Any] = [{"role": "user", "content": "hi"}]


def engine_of(**fields: Any) -> FakeEngine:
    return FakeEngine(**{"script": emits(IDS), "chunks": (1, 3), **fields})


@pytest.fixture
def engine() -> FakeEngine:
    return engine_of()


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    with served(app_of(engine)) as address:
        yield address + "/v1"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_whole_answers_and_their_types(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2)
    (choice,) = chat.choices
    assert (chat.object, choice.message.role, choice.message.content, choice.finish_reason) == (
        "chat.completion",
        "assistant",
        TEXT,
        "length",
    )
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert bytes(b for entry in choice.logprobs.content for b in entry.bytes or []).decode() == TEXT
    assert chat.usage is not None
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
    completion = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, logprobs=1, echo=True)
    assert [one.index for one in completion.choices] == [0, 1, 2, 3]
    assert [one.text for one in completion.choices] == ["a" + TEXT, "a" + TEXT, "b" + TEXT, "b" + TEXT]


def test_a_middle_is_filled_in() -> None:
    """`suffix`, as the client and Vercel's `completion` send it."""
    app = app_of(engine := engine_of(vocab_size=500), infilling("qwen"))
    options: Any = {"model": MODEL, "prompt": "hello", "suffix": " world", "max_tokens": 40}
    with served(app) as address, openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        assert client.completions.create(**options).choices[0].text == TEXT
        assert "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True)) == TEXT
    assert infilling("qwen").decode(engine.requests[0].prompt_ids) == "<|fim_prefix|>hello<|fim_suffix|> world<|fim_middle|>"


def test_stream_ends_with_usage_on_request(client: openai.OpenAI) -> None:
    for stream_options in (None, {"include_usage": True}):
        options: Any = {} if stream_options is None else {"stream_options": stream_options}
        with client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, **options) as stream:
            chunks = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
        assert (chunks[-1].usage is not None) == (stream_options is not None)
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    texts = [chunk.choices[0].text for chunk in client.completions.create(model=MODEL, prompt="x", stream=True)]
    assert "".join(texts) == TEXT


def test_the_streaming_helper_adds_chunks_up(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script, engine.eos_token_ids = emits([*IDS, 0]), (0,)  # the helper takes a text that a limit cut for an error
    with client.chat.completions.stream(model=MODEL, messages=HELLO) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == TEXT


async def test_many_at_once(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

        async def streamed() -> str:
            stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async def whole() -> str | None:
            return (await client.chat.completions.create(model=MODEL, messages=HELLO)).choices[0].message.content

        assert set(await asyncio.gather(*(streamed() for _ in range(6)), *(whole() for _ in range(6)))) == {TEXT}


def test_raw_answer_has_headers_and_parses(client: openai.OpenAI) -> None:
    raw = client.with_raw_response.chat.completions.create(model=MODEL, messages=HELLO, extra_headers={"X-Request-Id": "mine-1"})
    assert raw.headers["x-request-id"] == "mine-1"
    parsed = raw.parse()
    assert parsed.choices[0].message.content == TEXT
    assert parsed._request_id == "mine-1"
    with client.with_streaming_response.completions.create(model=MODEL, prompt="x", stream=True) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert list(response.iter_lines())[-2:] == ["data: [DONE]", ""]


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_vllms_fields_come_through_extra_body(client: openai.OpenAI, engine: FakeEngine) -> None:
    completion = client.completions.create(
        model=MODEL, prompt="x", extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "prompt_logprobs": 0}
    )
    sampling = engine.requests[-1].sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (5, 0.1, 1.2)
    assert completion.model_extra is not None
    assert "speculative_decoding" in completion.model_extra["metrics"]


WRONG: list[tuple[dict[str, Any], type[openai.APIStatusError], str | None, str | None]] = [
    ({"temperature": 9}, openai.BadRequestError, "temperature", None),
    ({"max_tokens": 100_000}, openai.BadRequestError, "messages", "context_length_exceeded"),
    ({"extra_body": {"mirostat": 2}}, openai.BadRequestError, "mirostat", None),
    ({"messages": []}, openai.BadRequestError, "messages", None),
    ({"model": "other"}, openai.NotFoundError, "model", "model_not_found"),
]


@pytest.mark.parametrize(("fields", "kind", "param", "code"), WRONG)
def test_errors_are_the_clients_own(
    client: openai.OpenAI, fields: dict[str, Any], kind: type[openai.APIStatusError], param: str | None, code: str | None
) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": HELLO, **fields})
    assert (caught.value.param, caught.value.code, caught.value.type) == (param, code, "invalid_request_error")
    assert caught.value.request_id


def test_a_wrong_key_is_an_authentication_error() -> None:
    with served(app_of(engine_of(), api_keys="right")) as url:
        for key, kind in (("wrong", openai.AuthenticationError), ("right", None)):
            with openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0) as client:
                if kind is None:
                    assert client.chat.completions.create(model=MODEL, messages=HELLO).choices
                else:
                    with pytest.raises(kind):
                        client.chat.completions.create(model=MODEL, messages=HELLO)


def test_failure_in_stream_is_api_error(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.fail_after = 1
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="the step failed"):
        list(stream)
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model=MODEL, messages=HELLO)


class _Busy(FakeEngine):
    """Full for its first `num_refusals` requests."""

    num_refusals = 2

    def submit(self, requests: Sequence[Request]) -> Any:
        self.max_living = 0 if self.num_refusals else 1000
        self.num_refusals -= bool(self.num_refusals)
        return super().submit(requests)


@pytest.mark.parametrize("stream", [False, True])
def test_busy_server_is_retried_after_requested_wait(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 503 comes before any of the stream, so that the client may retry it; it waits as long as Retry-After demands."""
    waits: list[float] = []
    monkeypatch.setattr("openai._base_client.time.sleep", waits.append)
    engine = _Busy(script=emits(IDS))
    with served(app_of(engine)) as url, openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=2) as client:
        answer: Any = client.completions.create(model=MODEL, prompt="x", stream=stream)
        text = "".join(chunk.choices[0].text for chunk in answer) if stream else answer.choices[0].text
    assert text == TEXT
    assert len(waits) == 2
    assert all(wait == pytest.approx(3.0) for wait in waits), "Retry-After: 2.5 seconds, rounded up"


def test_exhausted_retries_raise_the_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._base_client.time.sleep", lambda seconds: None)
    with served(app_of(_Busy(script=emits(IDS)))) as url:
        with (
            openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=1) as client,
            pytest.raises(openai.InternalServerError) as caught,
        ):
            client.completions.create(model=MODEL, prompt="x")
        assert (caught.value.status_code, caught.value.code) == (503, "engine_busy")
        assert caught.value.response.headers["retry-after"] == "3"


def test_client_timeout_aborts_its_request() -> None:
    engine = engine_of(gate=asyncio.Event(), num_free_events=1)
    with served(app_of(engine)) as url, openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        for patience_s in (0.5, 2.0, 8.0, PATIENCE_S):  # on a busy machine a client may give up before the engine has its request
            with pytest.raises(openai.APITimeoutError):
                client.completions.create(model=MODEL, prompt="x", timeout=patience_s)
            if engine.requests:
                break
        while engine.living:
            httpx.get(url + "/live", timeout=PATIENCE_S)
        assert engine.aborted == [request.request_id for request in engine.requests] != []


def test_every_stream_data_line_is_json(url: str) -> None:
    body = {"model": MODEL, "messages": HELLO, "stream": True}
    with httpx.stream("POST", url + "/chat/completions", json=body, timeout=PATIENCE_S) as response:
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert [json.loads(line[6:])["object"] for line in lines[:-1]] == ["chat.completion.chunk"] * (len(lines) - 1)
    assert lines[-1] == "data: [DONE]"
