"""Functions in the form before tools: `functions`, `function_call` and messages of functions."""

import json
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.api.harness import MODEL, chat, data_of, in_process, over_loopback
from tests.api.tool_calls.test_tools import _FRAGMENTS, ARGUMENTS, TOOLS, URL, _engine, _prompt, written
from tests.fake_engine import FakeEngine
from tests.tokenizers_for_tests import calling

FUNCTIONS: list[Any] = [tool["function"] for tool in TOOLS]
CALL = {"name": "weather", "arguments": ARGUMENTS[0]}


def _whole(chunks: list[Any]) -> tuple[dict[str, Any], str]:
    """Return the message that chunks add up to, and its finish; check the shape of the deltas."""
    first, *middle, end = [chunk["choices"][0] for chunk in chunks]
    message: dict[str, Any] = {"role": "assistant", "content": first["delta"]["content"]}
    for part in middle:
        (field,) = part["delta"]
        if field == "content":
            message["content"] = (message["content"] or "") + part["delta"]["content"]
            continue
        call = part["delta"]["function_call"]
        if "name" in call:
            assert call == {"name": call["name"], "arguments": ""}
            assert "function_call" not in message
            message["function_call"] = dict(call)
        else:
            message["function_call"]["arguments"] += call["arguments"]
    return message, end["finish_reason"]


async def test_calls_whole_and_streamed():
    """The form holds only one call: the first of the text."""
    for chunks in ((1,), (2, 5), (1000,)):
        async with in_process(_engine(chunks=chunks), tokenizer=calling()) as client:
            whole = (await client.post(URL, json=chat(functions=FUNCTIONS))).json()
            *parts, last = data_of(
                (await client.post(URL, json=chat(functions=FUNCTIONS, stream=True, stream_options={"include_usage": True}))).text
            )
        (choice,) = whole["choices"]
        assert choice["message"] == {"role": "assistant", "content": "Let me see.", "refusal": None, "function_call": CALL}
        assert choice["finish_reason"] == "function_call"
        message, finish = _whole(parts)
        assert ({**message, "refusal": None}, finish, last["usage"]) == (choice["message"], "function_call", whole["usage"])


@settings(max_examples=40, suppress_health_check=list(HealthCheck), deadline=None)
@given(
    st.lists(st.sampled_from(_FRAGMENTS), max_size=8).map("".join),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 200),
    st.sampled_from([{}, {"stop": ["}"]}, {"function_call": {"name": "time"}}]),
)
async def test_any_stream_is_the_answer(text: str, chunks: list[int], max_tokens: int, fields: dict[str, Any]):
    """However the tokens are spread over steps, and wherever a stop string or a limit ends them."""
    body = chat(functions=FUNCTIONS, max_tokens=max_tokens, **fields)
    async with in_process(_engine(text, chunks=chunks), tokenizer=calling()) as client:
        (choice,) = (await client.post(URL, json=body)).json()["choices"]
        message, finish = _whole(data_of((await client.post(URL, json={**body, "stream": True})).text))
    assert ({**message, "refusal": None}, finish) == (choice["message"], choice["finish_reason"])


async def test_answers_without_a_call():
    for text, content, finish in (("hello", "hello", "stop"), ("", None, "stop")):
        async with in_process(_engine(text), tokenizer=calling()) as client:
            (choice,) = (await client.post(URL, json=chat(functions=FUNCTIONS))).json()["choices"]
        assert (choice["message"], choice["finish_reason"]) == (
            {"role": "assistant", "content": content, "refusal": None},
            finish,
        )
    async with in_process(_engine(max_living=9), tokenizer=calling()) as client:
        (choice,) = (await client.post(URL, json=chat(functions=FUNCTIONS, max_tokens=30))).json()["choices"]
    assert choice["finish_reason"] == "length"


async def test_engine_requests_equal_those_of_tools():
    engine = _engine()
    named = {"type": "function", "function": {"name": "weather"}}
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"function_call": "auto"}, {"tool_choice": "auto"}),
        ({"function_call": "none"}, {"tool_choice": "none"}),
        ({"function_call": {"name": "weather"}}, {"tool_choice": named}),
    ]
    async with in_process(engine, tokenizer=calling()) as client:
        for legacy, tools in pairs:
            for body in (chat(functions=FUNCTIONS, **legacy), chat(tools=TOOLS, parallel_tool_calls=False, **tools)):
                assert (await client.post(URL, json=body)).status_code == 200
            one, two = engine.requests[-2:]
            assert (one.prompt_ids, one.sampling) == (two.prompt_ids, two.sampling)
    assert engine.requests[-1].sampling.grammar is not None


async def test_messages_of_functions_reach_the_template():
    engine = _engine("fine")
    legacy: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "function_call": CALL},
        {"role": "function", "name": "weather", "content": "rain"},
        {"role": "assistant", "content": "And?", "function_call": {"name": "time", "arguments": "{}"}},
        {"role": "function", "name": "time", "content": "5"},
    ]
    calls = [{"id": f"c{k}", "type": "function", "function": legacy[at]["function_call"]} for k, at in enumerate((1, 3))]
    tools = [
        legacy[0],
        {"role": "assistant", "content": None, "tool_calls": calls[:1]},
        {"role": "tool", "tool_call_id": "c0", "name": "weather", "content": "rain"},
        {"role": "assistant", "content": "And?", "tool_calls": calls[1:]},
        {"role": "tool", "tool_call_id": "c1", "name": "time", "content": "5"},
    ]
    async with in_process(engine, tokenizer=calling()) as client:
        assert (await client.post(URL, json=chat(messages=legacy, functions=FUNCTIONS))).status_code == 200
        assert (await client.post(URL, json=chat(messages=tools, tools=TOOLS))).status_code == 200
    one, two = engine.requests
    assert one.prompt_ids == two.prompt_ids
    assert written("weather", ARGUMENTS[0]) in _prompt(engine)


async def test_ids_of_mapped_calls_fit_mistral(monkeypatch: pytest.MonkeyPatch):
    """Templates of Mistral refuse other ids."""
    calls = "{% for c in m.tool_calls or [] %}{{ c.id ~ c.function.name }}{% endfor %}"
    template = "{% for m in messages %}{{ m.tool_call_id }}" + calls + "|{% endfor %}"
    monkeypatch.setattr(calling(), "chat_template", template + "{{ tools | tojson if tools }}")
    engine = _engine("fine")
    messages = [
        {"role": "function", "name": "f", "content": "of no call"},
        {"role": "assistant", "content": None, "function_call": {"name": "probed", "arguments": "{"}},
        {"role": "function", "name": "f", "content": "x"},
    ]
    async with in_process(engine, tokenizer=calling()) as client:
        assert (await client.post(URL, json=chat(messages=messages))).status_code == 200
    assert _prompt(engine) == "call00000|call00001probed|call00001|"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"functions": [{"name": "a b"}]}, "functions.0.name"),
    ({"functions": [{"name": "f"}, {"name": "f"}]}, "functions.1.name"),
    ({"functions": [{"name": "f", "parameters": {"type": "objekt"}}]}, "functions.0.parameters"),
    ({"functions": [{"type": "function", "function": {"name": "f"}}]}, "functions.0.type"),
    ({"functions": [{"name": f"f{at}"} for at in range(129)]}, "functions"),
    ({"functions": [{"name": "f", "parameters": {"description": "x" * 70_000}}]}, "functions.0.parameters"),
    ({"functions": FUNCTIONS, "tools": TOOLS}, "tools"),
    ({"functions": FUNCTIONS, "tool_choice": "auto"}, "tool_choice"),
    ({"functions": FUNCTIONS, "parallel_tool_calls": True}, "parallel_tool_calls"),
    ({"functions": FUNCTIONS, "function_call": {"name": "missing"}}, "function_call.name"),
    ({"functions": FUNCTIONS, "function_call": "required"}, "function_call"),
    ({"function_call": {"name": "f"}}, "function_call.name"),
    ({"tools": TOOLS, "function_call": {"name": "weather"}}, "function_call.name"),
    ({"functions": [{**FUNCTIONS[0], "strict": True}]}, "functions"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.name"),
    ({"messages": [{"role": "function", "name": "f"}]}, "messages.0.content"),
    ({"messages": [{"role": "function", "name": "f", "content": "x", "tool_call_id": "c"}]}, "messages.0.tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "function_call": CALL}]}, "messages.0.function_call"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages.0.function_call.arguments"),
    (
        {
            "messages": [
                {"role": "assistant", "function_call": CALL, "tool_calls": [{"id": "c", "type": "function", "function": CALL}]}
            ]
        },
        "messages.0.function_call",
    ),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
async def test_misfits_are_refused_by_name(fields: dict[str, Any], param: str):
    async with in_process(_engine(), tokenizer=calling()) as client:
        response = await client.post(URL, json=chat(**fields))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_empty_functions_change_nothing():
    async with in_process(FakeEngine()) as client:
        cases: list[dict[str, Any]] = [
            {"functions": []},
            {"function_call": "none"},
            {"function_call": "auto"},
            {"functions": [], "function_call": "auto"},
        ]
        for fields in cases:
            response = await client.post(URL, json=chat(**fields))
            assert (response.status_code, "x-ignored-parameters" in response.headers) == (200, False)
        refused = await client.post(URL, json=chat(functions=FUNCTIONS))  # its template shows no tools
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "functions")


async def test_numbers_of_functions_are_not_rounded():
    """As those of tools: a grammar of a rounded number would force another argument."""
    big = "12345678901234567890.5"
    body = json.dumps(
        chat(functions=[{"name": "f", "parameters": {"properties": {"x": {"const": 0.25}}}}], function_call={"name": "f"})
    )
    engine = _engine()
    async with in_process(engine, tokenizer=calling()) as client:
        response = await client.post(URL, content=body.replace("0.25", big), headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["param"], big in response.text) == (400, "functions", True)


async def test_the_openai_client_calls_functions():
    messages: Any = chat()["messages"]
    fields: Any = {"model": MODEL, "messages": messages, "functions": FUNCTIONS}
    async with (
        over_loopback(_engine(), tokenizer=calling()) as url,
        openai.AsyncOpenAI(base_url=url + "/v1", api_key="x") as client,
    ):
        whole = await client.chat.completions.create(**fields)
        chunks = [chunk async for chunk in await client.chat.completions.create(**fields, stream=True)]
    message = whole.choices[0].message
    assert message.function_call is not None
    assert (message.function_call.name, message.function_call.arguments) == ("weather", ARGUMENTS[0])
    assert (whole.choices[0].finish_reason, chunks[-1].choices[0].finish_reason) == ("function_call",) * 2
    deltas = [chunk.choices[0].delta.function_call for chunk in chunks]
    assert "".join(delta.arguments or "" for delta in deltas if delta) == ARGUMENTS[0]
