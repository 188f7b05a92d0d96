"""Tool calls as the official client requests them, forced out of a real engine with random weights: they fit the schema."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.conformance.served import MODEL, app_of, real_engine, served
from tests.tokenizers_for_tests import calling


class weather(BaseModel):  # noqa: N801 (the name of the function)
    unit: Literal["C", "F"]
    is_now: bool


class clock(BaseModel):  # noqa: N801
    zone: Literal["UTC", "CET"]


FUNCTIONS: dict[str, type[BaseModel]] = {"weather": weather, "clock": clock}
TOOLS: list[Any] = [openai.pydantic_function_tool(function) for function in FUNCTIONS.values()]
HELLO: list[Any] = [{"role": "user", "content": "hm?"}]
# Random weights would write whitespace for ever, which a schema allows.
NO_SPACE = {str(token_id): -100 for token_id in range(3, len(calling())) if not calling().decode([token_id]).strip()}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    app = app_of(real_engine(), calling())
    with served(app) as url, openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def request_fields(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO, "tools": TOOLS, "seed": 3, "logit_bias": NO_SPACE, **fields}


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"weather", "clock"}), ({"type": "function", "function": {"name": "clock"}}, {"clock"})],
)
def test_forced_call_matches_schema_streamed_or_whole(client: openai.OpenAI, choice: Any, names: set[str]) -> None:
    fields = request_fields(tool_choice=choice, parallel_tool_calls=False)
    whole = client.chat.completions.parse(**fields)
    (call,) = whole.choices[0].message.tool_calls or []
    assert whole.choices[0].finish_reason == "tool_calls"
    assert call.function.name in names
    assert isinstance(call.function.parsed_arguments, FUNCTIONS[call.function.name])
    with client.chat.completions.stream(**fields) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert streamed.function.parsed_arguments == call.function.parsed_arguments


def test_conversation_continues_after_tool_result(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(**request_fields(tool_choice="required", parallel_tool_calls=False))
    (call,) = first.choices[0].message.tool_calls or []
    found = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"is": 7})}
    messages = [*HELLO, first.choices[0].message.model_dump(exclude_none=True), found]
    second = client.chat.completions.create(**request_fields(messages=messages, tool_choice="none", max_tokens=5))
    assert second.choices[0].finish_reason in ("stop", "length")
    assert second.choices[0].message.tool_calls is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "missing"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ],
)
def test_uncallable_tool_is_a_bad_request(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**request_fields(**fields))
    assert str(caught.value.param).startswith(param)
