"""Tool calls of real weights over HTTP, by the openai client: forced ones keep their schemas, and drafting changes none."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.server import running_server

PRESET = "qwen2.5-coder-0.5b"
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    }
]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
QUESTION: Any = [{"role": "user", "content": "What is the weather in Oslo, in celsius?"}]

pytestmark = [pytest.mark.weights, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    log = tmp_path_factory.mktemp("tools") / "server.log"
    with running_server(log, "--model", PRESET, "--drafter", "ngram", "--num-slots", "4096", "--max-model-len", "2048") as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


def calls(client: openai.OpenAI, **fields: Any) -> list[tuple[str, str]]:
    """Return names and arguments of the calls, whose arguments keep the schema."""
    answer = client.chat.completions.create(
        model=PRESET, messages=QUESTION, tools=TOOLS, max_tokens=120, parallel_tool_calls=False, **fields
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    found = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or () if call.type == "function"]
    for _, arguments in found:
        values = json.loads(arguments)
        assert set(values) == {"city", "unit"}
        assert values["unit"] in ("celsius", "fahrenheit")
    return found


@pytest.mark.parametrize(
    ("choice", "distribution"),
    [("required", {"temperature": 0}), (NAMED, {"temperature": 0.7, "seed": 3})],
    ids=["greedy", "seeded"],
)
def test_forced_calls_match_schema_at_any_drafting(client: openai.OpenAI, choice: Any, distribution: dict[str, Any]):
    drafted = calls(client, tool_choice=choice, **distribution)
    assert drafted
    assert drafted == calls(client, tool_choice=choice, extra_body={"speculative": {"enabled": False}}, **distribution)


def test_call_is_streamed_and_result_read(client: openai.OpenAI):
    (whole,) = calls(client, tool_choice=NAMED, temperature=0)
    with client.chat.completions.stream(
        model=PRESET, messages=QUESTION, tools=TOOLS, tool_choice=NAMED, temperature=0, max_tokens=120, parallel_tool_calls=False
    ) as stream:
        (call,) = list(stream.get_final_completion().choices[0].message.tool_calls or [])
    assert (call.function.name, call.function.arguments) == whole
    conversation = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump(include={"id", "type", "function"})]},
        {"role": "tool", "tool_call_id": call.id, "content": "It is 4 degrees and it rains."},
    ]
    answer = client.chat.completions.create(model=PRESET, messages=conversation, tools=TOOLS, temperature=0, max_tokens=40)
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


@pytest.mark.parametrize("strict", [False, True])
def test_free_calls_are_read_from_fenced_json(client: openai.OpenAI, strict: bool):
    """The model writes a fenced object, and not the markup of its template: no agent framework saw a call."""
    tools: Any = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": strict}}]
    fields: dict[str, Any] = {"model": PRESET, "messages": QUESTION, "tools": tools, "temperature": 0, "max_tokens": 120}
    (choice,) = client.chat.completions.create(**fields).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo", "unit": "celsius"})
    with client.chat.completions.stream(**fields) as stream:
        num_deltas = sum(event.type == "tool_calls.function.arguments.delta" for event in stream)
        (streamed,) = list(stream.get_final_completion().choices[0].message.tool_calls or [])
    assert num_deltas > 3
    assert streamed.function.arguments == call.function.arguments
    plain = client.chat.completions.create(**fields, extra_body={"speculative": {"enabled": False}})
    (undrafted,) = plain.choices[0].message.tool_calls or []
    assert undrafted.type == "function"
    assert undrafted.function.arguments == call.function.arguments
