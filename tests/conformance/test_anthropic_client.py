"""The official client of Anthropic's API, unchanged: answers and events of its types, its stream helper, errors and retries."""

from collections.abc import Iterator
from typing import Any, Literal

import httpx
import pytest
from pydantic import BaseModel, TypeAdapter

from tests.api.answer_formats.test_messages import TIME, WEATHER, events_of, written
from tests.api.answer_formats.test_messages_refused import AGENT, BETAS
from tests.conformance.served import MODEL, PATIENCE_S, app_of, real_engine, served
from tests.fake_engine import FakeEngine, emits
from tests.tokenizers_for_tests import calling

anthropic = pytest.importorskip("anthropic")
types = pytest.importorskip("anthropic.types")

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
TEXT = "Let me see 日本語 😀.\n" + written("weather", '{"place": "Oslo"}') + "\n" + written("time", "{}")
KEY = "a-secret-of-the-test"


def engine_of(text: str = TEXT, **fields: Any) -> FakeEngine:
    ids = calling().encode(text + "<|end|>")
    return FakeEngine(script=emits(ids), **{"chunks": (1, 3), "max_model_len": 2000, "eos_token_ids": (ids[-1],), **fields})


@pytest.fixture
def engine() -> FakeEngine:
    return engine_of()


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    with served(app_of(engine, calling())) as address:
        yield address


def client_of(url: str, **fields: Any) -> Any:
    return anthropic.Anthropic(**{"base_url": url, "api_key": KEY, "max_retries": 0, **fields})


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with client_of(url) as client:
        yield client


def wanted(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 500, "messages": HELLO, "tools": [WEATHER, TIME], **fields}


def test_an_answer_is_of_the_clients_types(client: Any) -> None:
    answer = client.messages.create(**wanted())
    types.Message.model_validate(answer.model_dump(warnings="error"), strict=False)
    text, weather, time = answer.content
    assert (text.type, text.text) == ("text", "Let me see 日本語 😀.")
    assert (weather.type, weather.name, weather.input, time.input) == ("tool_use", "weather", {"place": "Oslo"}, {})
    assert (answer.stop_reason, answer.role, answer.model) == ("tool_use", "assistant", MODEL)
    assert (
        answer.usage.input_tokens == client.messages.count_tokens(model=MODEL, messages=HELLO, tools=[WEATHER, TIME]).input_tokens
    )


def test_every_event_is_of_the_clients_types(url: str) -> None:
    """The client reads events without validating them, so they are validated here."""
    event_type: TypeAdapter[Any] = TypeAdapter(types.RawMessageStreamEvent)
    variants: list[dict[str, Any]] = [{}, {"max_tokens": 5}, {"stop_sequences": ["see"]}, {"tools": []}]
    for fields in variants:
        body = wanted(**fields, stream=True)
        events = events_of(httpx.post(f"{url}/v1/messages", json=body, timeout=PATIENCE_S).text)
        assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
        for event in events[:1] + events[2:]:
            read = event_type.validate_python(event, strict=False)
            assert read.model_extra in (None, {}), "a field that the client does not know"
            assert read.model_dump(exclude_unset=True, mode="json") == event


def test_stream_helper_equals_whole_answer(client: Any) -> None:
    variants: list[dict[str, Any]] = [{}, {"tools": []}, {"max_tokens": 5}, {"max_tokens": 90}, {"stop_sequences": ["see"]}]
    for fields in variants:
        whole = client.messages.create(**wanted(**fields))
        with client.messages.stream(**wanted(**fields)) as stream:
            final = stream.get_final_message()
        mine, other = (one.model_dump() for one in (final, whole))
        for answer in (mine, other):
            answer.pop("id")
            for block in answer["content"]:
                block.pop("id", None)
                block.pop("parsed_output", None)
        assert mine == other


def test_beta_methods_read_the_same(client: Any) -> None:
    answer = client.beta.messages.create(**wanted(), betas=["context-management-2025-06-27"])
    assert [block.type for block in answer.content] == ["text", "tool_use", "tool_use"]
    with client.beta.messages.stream(**wanted()) as stream:
        assert stream.get_final_message().stop_reason == "tool_use"
    assert client.beta.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens > 0


async def test_the_async_client_streams_text(url: str) -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0) as client,
        client.messages.stream(**wanted(tools=[])) as stream,
    ):
        text = "".join([text async for text in stream.text_stream])
    assert text == TEXT


def test_the_tool_runner_ends_with_an_answer(client: Any, engine: FakeEngine) -> None:
    """The client requests a thread first; only the code of the refusal makes it send whole conversations."""
    called: list[str] = []

    @anthropic.beta_tool  # type: ignore[untyped-decorator, unused-ignore]
    def weather(place: str) -> str:
        """Report it."""
        called.append(place)
        engine.script = emits(calling().encode("It rains.<|end|>"))
        return "rain"

    engine.script = emits(calling().encode(written("weather", '{"place": "Oslo"}') + "<|end|>"))
    runner = client.beta.messages.tool_runner(model=MODEL, max_tokens=300, messages=HELLO, tools=[weather])
    assert runner.until_done().content[0].text == "It rains."
    assert called == ["Oslo"]
    assert "rain" in calling().decode(engine.requests[-1].prompt_ids)


def test_errors_are_the_clients_own(client: Any) -> None:
    wrong: list[tuple[dict[str, Any], type[Exception], str, str]] = [
        ({"extra_body": {"temperature": 9}}, anthropic.BadRequestError, "invalid_request_error", "temperature: "),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            anthropic.BadRequestError,
            "invalid_request_error",
            "messages.0",
        ),
        ({"model": "other"}, anthropic.NotFoundError, "not_found_error", "model: "),
    ]
    for fields, kind, name, words in wrong:
        with pytest.raises(kind) as caught:
            client.messages.create(**wanted(**fields))
        error: Any = caught.value
        assert (error.type, error.request_id) == (name, error.response.headers["request-id"])
        assert error.body["error"]["message"].startswith(words)
        types.ErrorResponse.model_validate(error.body)


def test_keys_of_the_client_are_read() -> None:
    with served(app_of(engine_of("hello"), calling(), api_keys=KEY)) as url:
        with client_of(url) as client:
            assert client.messages.create(**wanted()).content[0].text == "hello"
            assert [model.id for model in client.models.list()] == [MODEL]
        with client_of(url, api_key=None, auth_token=KEY) as client:
            assert client.messages.create(**wanted()).content[0].text == "hello"
        with client_of(url, default_headers={"X-Api-Key": KEY, "Authorization": anthropic.Omit()}) as client:
            assert client.messages.create(**wanted()).content[0].text == "hello"
        with client_of(url, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                client.messages.create(**wanted())
            assert caught.value.type == "authentication_error"
            with pytest.raises(anthropic.AuthenticationError):
                client.models.list()


def test_models_are_of_the_clients_types(client: Any) -> None:
    (model,) = client.models.list()
    types.ModelInfo.model_validate(model.model_dump())
    assert client.models.retrieve(MODEL) == model
    assert model.max_tokens == 2000


def test_a_full_server_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("anthropic._base_client.time.sleep", waits.append)
    with served(app_of(engine_of(max_living=0), calling())) as url, client_of(url, max_retries=2) as client:
        with pytest.raises(anthropic.OverloadedError) as caught:
            client.messages.create(**wanted())
        assert (caught.value.status_code, caught.value.type, caught.value.error_code) == (529, "overloaded_error", "engine_busy")
    assert waits == [pytest.approx(3.0)] * 2, "Retry-After, rounded up"


def test_failure_in_stream_is_an_error(client: Any, engine: FakeEngine) -> None:
    engine.fail_after = 2
    with pytest.raises(anthropic.APIStatusError, match="the step failed"), client.messages.stream(**wanted()) as stream:
        stream.get_final_message()
    with pytest.raises(anthropic.InternalServerError):
        client.messages.create(**wanted())


def test_an_agents_request_is_answered(client: Any) -> None:
    body = {name: value for name, value in AGENT.items() if name not in ("model", "max_tokens", "messages", "stream")}
    fields = {"model": MODEL, "max_tokens": AGENT["max_tokens"], "messages": AGENT["messages"], "extra_body": body}
    events = [event.type for event in client.beta.messages.create(**fields, stream=True, extra_headers=BETAS)]
    assert (events[0], events[-1]) == ("message_start", "message_stop")


class Reading(BaseModel):
    """What a text of JSON is read into."""

    unit: Literal["C", "F"]
    is_now: bool


class choice(BaseModel):  # noqa: N801 (the name of the tool)
    zone: Literal["UTC", "CET"]


@pytest.fixture(scope="module")
def real_client() -> Iterator[Any]:
    with served(app_of(real_engine(), calling())) as url, client_of(url) as client:
        yield client


def test_parsed_outputs_are_of_the_schema(real_client: Any) -> None:
    """Of a model with random weights: the grammar decides."""
    answer = real_client.messages.parse(model=MODEL, max_tokens=500, messages=HELLO, output_format=Reading)
    assert isinstance(answer.parsed_output, Reading)
    with real_client.messages.stream(model=MODEL, max_tokens=500, messages=HELLO, output_format=Reading) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Reading)


@pytest.mark.parametrize("chosen", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "choice"}])
def test_forced_calls_are_of_their_schema(real_client: Any, chosen: dict[str, Any]) -> None:
    tool = {"name": "choice", "input_schema": choice.model_json_schema()}
    fields = {
        "model": MODEL,
        "max_tokens": 500,
        "messages": HELLO,
        "tools": [tool],
        "tool_choice": chosen,
        "extra_body": {"temperature": 0},
    }
    answer = real_client.messages.create(**fields)
    (call,) = answer.content
    assert answer.stop_reason == "tool_use"
    choice.model_validate(call.input)
    with real_client.messages.stream(**fields) as stream:
        assert stream.get_final_message().content[0].input == call.input
    found = {"type": "tool_result", "tool_use_id": call.id, "content": "7"}
    turns = [*HELLO, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [found]}]
    more = real_client.messages.create(**{**fields, "messages": turns, "tool_choice": {"type": "auto"}, "max_tokens": 5})
    assert more.usage.input_tokens + (more.usage.cache_read_input_tokens or 0) > answer.usage.input_tokens
