"""POST /v1/responses: a chat in other words, spoken to by the official client."""

from typing import Any

import openai
import pytest

from tests.api.harness import MODEL, chat, in_process, over_loopback
from tests.fake_engine import FakeEngine, emits
from tests.tokenizers_for_tests import byte_level

URL = "/v1/responses"
TEXT = "hello 日本語 😀 fox"
IDS = byte_level().encode(TEXT)
END = byte_level().convert_tokens_to_ids("<|start|>")


def _engine(**fields: Any) -> FakeEngine:
    return FakeEngine(**{"script": emits([*IDS, END]), "chunks": (1, 3), "eos_token_ids": (END,), **fields})


async def test_official_client_reads_and_continues_answers():
    async with (
        over_loopback(engine := _engine()) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = await client.responses.create(model=MODEL, input="hi", instructions="be brief", metadata={"a": "b"})
        assert (answer.output_text, answer.status, answer.incomplete_details) == (TEXT, "completed", None)
        assert answer.usage is not None
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(engine.requests[0].prompt_ids), len(IDS) + 1)
        assert answer.metadata == {"a": "b"}
        turns: list[Any] = [{"role": "user", "content": "hi"}, *answer.output, {"role": "user", "content": "more"}]
        await client.responses.create(model=MODEL, input=turns, store=False)
        messages: list[Any] = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": TEXT},
            {"role": "user", "content": "more"},
        ]
        await client.chat.completions.create(model=MODEL, messages=messages)
    one, two, three = engine.requests
    assert byte_level().decode(one.prompt_ids).startswith("<|start|>system\nbe brief<|end|>\n<|start|>user\nhi")
    assert two.prompt_ids == three.prompt_ids


@pytest.mark.parametrize(("most", "status"), [(None, "completed"), (4, "incomplete")])
async def test_stream_equals_whole_answer(most: int | None, status: str):
    async with (
        over_loopback(_engine()) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        whole = await client.responses.create(model=MODEL, input="hi", max_output_tokens=most)
        events = [e async for e in await client.responses.create(model=MODEL, input="hi", max_output_tokens=most, stream=True)]
    names = [event.type.removeprefix("response.") for event in events]
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", status]
    deltas = events[4:-4]
    assert names == [*begin, *["output_text.delta"] * len(deltas), *end]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(delta.delta for delta in deltas if delta.type == "response.output_text.delta") == whole.output_text
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    mine, other = (one.model_dump(exclude={"id", "created_at", "completed_at", "output"}) for one in (last.response, whole))
    assert mine == other
    assert (whole.status, last.response.output_text) == (status, whole.output_text)
    assert (whole.incomplete_details is not None) == (status == "incomplete")


async def test_events_are_named():
    async with in_process(_engine()) as client:
        text = (await client.post(URL, json={"model": MODEL, "input": "hi", "stream": True})).text
    blocks = text.removesuffix("\n\n").split("\n\n")
    assert blocks.pop() == "data: [DONE]"
    for block in blocks:
        name, data = block.split("\n")
        assert data.startswith('data: {"type":"' + name.removeprefix("event: ") + '"')


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ({"background": True}, "background"),
    ({"reasoning": {"effort": 1}}, "reasoning.effort"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
    ({"input": "x" * 5000}, "input"),
    ({"input": []}, "input"),
    ({"max_output_tokens": 5000}, "input"),
    ({"temperature": 3}, "temperature"),
    ({"n": 2}, "n"),
    ({"speculative": {"trace": True}}, "speculative.trace"),
    ({"speculative": {"trace": True}, "stream": True}, "speculative.trace"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
async def test_unsupported_fields_are_refused_by_name(fields: dict[str, Any], param: str):
    async with in_process(_engine(), strict=True) as client:
        response = await client.post(URL, json={"model": MODEL, "input": "hi", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_failure_midstream_raises_client_exception():
    async with (
        over_loopback(_engine(fail_after=1)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.APIError, match="the step failed"):
            _ = [event async for event in await client.responses.create(model=MODEL, input="hi", stream=True)]


async def test_the_numbers_are_those_of_a_chat():
    async with in_process(_engine()) as client:
        answer = (await client.post(URL, json={"model": MODEL, "input": "hello"})).json()
        same = (await client.post("/v1/chat/completions", json=chat())).json()
    assert answer["metrics"] == same["metrics"]
    assert answer["usage"]["total_tokens"] == same["usage"]["total_tokens"]


async def test_truncation_auto_drops_nothing():
    """The bug: `auto`, which frameworks send by default, was refused although it changes nothing while the prompt fits."""
    async with in_process(_engine()) as client:
        body = {"model": MODEL, "input": "hi", "truncation": "auto"}
        answer = await client.post(URL, json=body)
        too_long = await client.post(URL, json=body | {"input": "word " * 20_000})
    assert (answer.status_code, answer.json()["truncation"]) == (200, "auto")
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")
