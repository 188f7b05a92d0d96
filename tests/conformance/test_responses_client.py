"""The official client's Responses helpers, unchanged, against a real engine with random weights."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.conformance.served import MODEL, app_of, real_engine, served
from tests.conformance.test_structured_client import Answer
from tests.tokenizers_for_tests import calling


class weather(BaseModel):  # noqa: N801 (the name of the function)
    unit: Literal["C", "F"]
    is_now: bool


PARSED: Any = openai.pydantic_function_tool(weather)  # the helpers make it flat
TOOLS: list[Any] = [{"type": "function", **PARSED["function"]}]
FORCED: dict[str, Any] = {"tools": [PARSED], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    app = app_of(real_engine(), calling())
    with served(app) as url, openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_model_of_pydantic_is_parsed(client: openai.OpenAI) -> None:
    whole = client.responses.parse(model=MODEL, input="which?", text_format=Answer, temperature=0)
    assert isinstance(whole.output_parsed, Answer)
    with client.responses.stream(model=MODEL, input="which?", text_format=Answer, temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_parsed == whole.output_parsed
    assert kinds[-2:] == ["response.output_item.done", "response.completed"]
    assert (final.status, whole.status) == ("completed", "completed")


def test_a_forced_call_is_parsed_and_answered(client: openai.OpenAI) -> None:
    first = client.responses.parse(model=MODEL, input="hm?", **FORCED)
    (call,) = first.output
    assert call.type == "function_call"
    assert isinstance(call.parsed_arguments, weather)
    with client.responses.stream(model=MODEL, input="hm?", **FORCED) as stream:
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call"
    assert streamed.parsed_arguments == call.parsed_arguments
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": json.dumps({"is": 7})}
    rest: dict[str, Any] = {"model": MODEL, "tools": TOOLS, "tool_choice": "none", "max_output_tokens": 5, "temperature": 0}
    by_id = client.responses.create(input=[output], previous_response_id=first.id, **rest)
    by_items: Any = [{"role": "user", "content": "hm?"}, call, output]
    whole = client.responses.create(input=by_items, **rest)
    assert by_id.usage is not None
    assert whole.usage is not None
    assert by_id.usage.input_tokens == whole.usage.input_tokens
    assert by_id.output_text == whole.output_text


def test_a_stream_is_the_stored_response(client: openai.OpenAI) -> None:
    """A stream that the token limit ends has no final response in the client; its last event has it.

    Texts without a seed could end before the limit.
    """
    events = list(client.responses.create(model=MODEL, input="hm?", max_output_tokens=5, temperature=0, stream=True))
    last = events[-1]
    assert last.type == "response.incomplete"
    stored = client.responses.retrieve(last.response.id)
    assert stored == last.response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    client.responses.delete(stored.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(stored.id)


def test_log_probabilities_are_typed(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=MODEL, input="hm?", max_output_tokens=4, temperature=0, include=["message.output_text.logprobs"], top_logprobs=3
    )
    (message,) = response.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [len(one.top_logprobs) for one in part.logprobs] == [3] * 4
    assert all(one.top_logprobs[0].logprob >= one.logprob for one in part.logprobs)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "missing"}}, "tool_choice.name"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no such type"}}}}, "text.format"),
    ({"input": [{"type": "computer_call_output", "call_id": "c", "output": {}}]}, "input.0.type"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_refusals_are_bad_requests(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": MODEL, "input": "hm?", **fields})
    assert caught.value.param == param
