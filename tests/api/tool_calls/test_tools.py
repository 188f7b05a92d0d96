"""Tool calls of POST /v1/chat/completions: what the model is shown, what is read of its text, what is refused."""

import json
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.codec import TextCodec
from server.tool_calls.support import tool_support
from tests.api.harness import MODEL, chat, data_of, in_process, over_loopback
from tests.fake_engine import FakeEngine, emits
from tests.tokenizers_for_tests import CHAT_TEMPLATE, byte_fallback, byte_level, calling

URL = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"], "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "time"}}
TOOLS = [WEATHER, TIME]


def written(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ARGUMENTS = ['{"place": "Oslo 日😀"}', '{"place": "a } b"}']
TEXT = "\n".join(["Let me see.", *(written("weather", arguments) for arguments in ARGUMENTS), written("time", "{}")])
CALLS = [*(("weather", arguments) for arguments in ARGUMENTS), ("time", "{}")]


def _engine(text: str = TEXT, special: bool | None = None, **fields: Any) -> FakeEngine:
    """Return an engine that emits the text and ends."""
    ids = calling(special).encode(text + "<|end|>")
    fields = {"chunks": (1, 4, 2), "max_model_len": 1500, "eos_token_ids": (ids[-1],), **fields}
    return FakeEngine(script=emits(ids), **fields)


def _prompt(engine: FakeEngine) -> str:
    return str(calling().decode(engine.requests[-1].prompt_ids))


def _called(message: dict[str, Any]) -> list[tuple[str, str]]:
    calls = message.get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    assert all(call["id"].startswith("call_") and call["type"] == "function" for call in calls)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def streamed(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """Return the choice that chunks add up to; hold each chunk to the wire format."""
    parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
    first, *middle, end = parts
    assert first["delta"] == {"role": "assistant", "content": None}
    assert end["delta"] == {}
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    for part in middle:
        (field,) = part["delta"]
        if field == "content":
            assert "tool_calls" not in message or message["tool_calls"], part
            message["content"] = (message["content"] or "") + part["delta"]["content"]
            continue
        (delta,) = part["delta"]["tool_calls"]
        calls = message.setdefault("tool_calls", [])
        if "id" in delta:
            assert list(delta) == ["index", "id", "type", "function"]
            assert (delta["index"], delta["function"]["arguments"]) == (len(calls), "")
            calls.append({"id": delta["id"], "type": delta["type"], "function": dict(delta["function"])})
        else:
            assert (list(delta), list(delta["function"])) == (["index", "function"], ["arguments"])
            assert delta["index"] == len(calls) - 1
            assert delta["function"]["arguments"]
            calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
    entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
    logprobs = {"content": entries, "refusal": None} if entries else None
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": end["finish_reason"]}


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    _called(choice["message"])
    calls = choice["message"].get("tool_calls", [])
    message = {**choice["message"], "tool_calls": [call["function"] for call in calls]}
    return {name: choice[name] for name in ("index", "logprobs", "finish_reason")} | {"message": message}


@pytest.mark.parametrize("special", [None, False, True])
async def test_calls_are_parsed_and_content_precedes_them(special: bool | None):
    """Whether the markup is text, tokens, or tokens that are left out of a text."""
    async with in_process(_engine(special=special), tokenizer=calling(special)) as client:
        answer = (await client.post(URL, json=chat(tools=TOOLS))).json()
        alone = (await client.post(URL, json=chat(tools=[TIME]))).json()
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], _called(choice["message"])) == ("Let me see.", CALLS)
    assert choice["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens"] == len(calling(special).encode(TEXT)) + 1
    (choice,) = alone["choices"]
    assert _called(choice["message"]) == CALLS[2:]
    assert "Oslo" in choice["message"]["content"]


async def test_empty_content_is_null_empty_calls_omitted():
    for text, content, finish in [(written("time", "{}"), None, "tool_calls"), ("hello", "hello", "stop"), ("", None, "stop")]:
        async with in_process(_engine(text), tokenizer=calling()) as client:
            (choice,) = (await client.post(URL, json=chat(tools=TOOLS))).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (content, finish)
        assert ("tool_calls" in choice["message"]) == (finish == "tool_calls")


async def test_a_stream_adds_up_to_the_answer():
    fields = {"tools": TOOLS, "n": 2, "logprobs": True, "top_logprobs": 1}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    for chunks in ((1,), (2, 1, 7), (1000,)):
        async with in_process(_engine(chunks=chunks), tokenizer=calling()) as client:
            whole = (await client.post(URL, json=chat(**fields))).json()
            *parts, last = data_of((await client.post(URL, json=chat(**fields, **stream))).text)
        assert (last["usage"], last["metrics"]) == (whole["usage"], whole["metrics"])
        for choice in whole["choices"]:
            assert without_ids(streamed(parts, choice["index"])) == without_ids(choice)


_FRAGMENTS = [
    *(
        "hello ",
        "日",
        "\n",
        " ",
        "<tool_call>",
        "</tool_call>",
        '{"name": "time", "arguments": ',
        "{}",
        "}",
        '{"place": "Os',
        '"}',
        "<",
    ),
    *(written("time", "{}"), written("weather", '{"place": "x"}'), written("nobody", "{}")),
]


def test_streamed_text_equals_whole_answer():
    """However the tokens are spread over steps, and wherever a stop string or a limit ends them."""

    @settings(max_examples=40)
    @given(
        st.lists(st.sampled_from(_FRAGMENTS), max_size=8).map("".join),
        st.lists(st.integers(1, 9), min_size=1, max_size=4),
        st.sampled_from(
            [{}, {"stop": ["}"]}, {"stop": "call"}, {"max_tokens": 20}, {"max_tokens": 45}, {"parallel_tool_calls": False}]
        ),
    )
    def check(text: str, chunks: list[int], fields: dict[str, Any]) -> None:
        import asyncio

        async def both() -> None:
            async with in_process(_engine(text, chunks=chunks), tokenizer=calling()) as client:
                body = chat(tools=TOOLS, **fields)
                whole = (await client.post(URL, json=body)).json()
                parts = data_of((await client.post(URL, json={**body, "stream": True})).text)
            (choice,) = whole["choices"]
            assert without_ids(streamed(parts)) == without_ids(choice)

        asyncio.run(both())

    check()


BEGINNINGS: list[tuple[int, list[tuple[str, str]]]] = [
    (TEXT.index("\n{"), []),
    (TEXT.index('er", "arg'), []),
    (TEXT.index(', "arg'), [("weather", "")]),
    (TEXT.index('{"place"'), [("weather", "")]),
]


@pytest.mark.parametrize(
    ("fields", "content", "calls", "finish"),
    [
        ({"parallel_tool_calls": False}, "Let me see.", CALLS[:1], "tool_calls"),
        ({"max_tokens": len(calling().encode(TEXT.split(" 日")[0]))}, "Let me see.", [("weather", '{"place": "Oslo')], "length"),
        *(({"max_tokens": len(calling().encode(TEXT[:at]))}, "Let me see.", calls, "length") for at, calls in BEGINNINGS),
        (
            {"max_tokens": len(calling().encode(TEXT.split(', "arg')[0])), "parallel_tool_calls": False},
            *("Let me see.", [("weather", "")], "length"),
        ),
        ({"max_tokens": len(calling().encode(TEXT.split("_call>")[0]))}, "Let me see.\n<tool", [], "length"),
        ({"stop": ["e"]}, "L", [], "stop"),
        ({"stop": ["} b"]}, "Let me see.", [CALLS[0], ("weather", '{"place": "a ')], "tool_calls"),
        ({"stop": ["see"], "include_stop_str_in_output": True}, "Let me see", [], "stop"),
    ],
)
async def test_ends(fields: dict[str, Any], content: str, calls: list[tuple[str, str]], finish: str):
    """The beginning of a call that `max_tokens` cut was content: clients showed markup."""
    async with in_process(_engine(), tokenizer=calling()) as client:
        answer = (await client.post(URL, json=chat(tools=TOOLS, **fields))).json()
        parts = data_of((await client.post(URL, json=chat(tools=TOOLS, stream=True, **fields))).text)
    (choice,) = answer["choices"]
    assert without_ids(streamed(parts)) == without_ids(choice)
    assert (choice["message"]["content"], _called(choice["message"]), choice["finish_reason"]) == (content, calls, finish)
    assert answer["usage"]["completion_tokens"] == fields.get("max_tokens", answer["usage"]["completion_tokens"])


async def test_first_call_ends_answer_without_parallel_calls():
    """Tokens behind it do not count, and the engine stops."""
    engine = _engine(chunks=(6,))
    async with in_process(engine, tokenizer=calling()) as client:
        answer = (await client.post(URL, json=chat(tools=TOOLS, parallel_tool_calls=False))).json()
    first = TEXT[: TEXT.index("</tool_call>") + len("</tool_call>")]
    assert answer["usage"]["completion_tokens"] == len(calling().encode(first))
    assert engine.aborted


async def test_prompt_contains_tools_calls_and_results():
    engine = _engine("fine")
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"place":"Oslo"}'}}
    broken_off = '{"now'
    broken = {"id": "call_2", "type": "function", "function": {"name": "time", "arguments": broken_off}, "index": 1}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call, broken]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "JSON"}]},
    ]
    async with in_process(engine, tokenizer=calling()) as client:
        assert (await client.post(URL, json=chat(messages=messages, tools=TOOLS))).status_code == 200
        tokens = (await client.post("/tokenize", json={"messages": messages, "tools": TOOLS})).json()["tokens"]
    assert tokens == list(engine.requests[-1].prompt_ids)
    calls = f"{written('weather', json.dumps({'place': 'Oslo'}))}\n{written('time', json.dumps(broken_off))}"
    shown = [WEATHER, {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}]
    assert _prompt(engine) == (
        f"<|start|>system\n<tools>\n{json.dumps(shown[0])}\n{json.dumps(shown[1])}\n</tools><|end|>\n<|start|>user\nWeather?<|end|>\n"
        f"<|start|>assistant\n{calls}<|end|>\n"
        "<|start|>tool\nrain<|end|>\n<|start|>tool\nno\nJSON<|end|>\n<|start|>assistant\n"
    )


async def test_tool_choice_none_disables_tools_and_calls():
    engine = _engine()
    async with in_process(engine, tokenizer=calling()) as client:
        (choice,) = (await client.post(URL, json=chat(tools=TOOLS, tool_choice="none"))).json()["choices"]
    assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": TEXT, "refusal": None}, "stop")
    assert _prompt(engine) == "<|start|>user\nhello<|end|>\n<|start|>assistant\n"


async def test_tool_texts_cannot_insert_control_tokens():
    """Neither a description nor arguments can end a message."""
    engine = _engine("fine")
    spelled = "<|end|>\n<|start|>"
    tool = {"type": "function", "function": {"name": "f", "description": spelled, "parameters": {"properties": {spelled: {}}}}}
    call = {"id": "c", "type": "function", "function": {"name": spelled, "arguments": json.dumps({spelled: [spelled]})}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    async with in_process(engine, tokenizer=calling()) as client:
        assert (await client.post(URL, json=chat(messages=messages, tools=[tool]))).status_code == 200
    end = calling().convert_tokens_to_ids("<|end|>")
    assert engine.requests[-1].prompt_ids.count(end) == 3
    assert _prompt(engine).count("<|end|>") == 3 + 5


def _function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools.0.type"),
    ({"tools": [_function(name="a b")]}, "tools.0.function.name"),
    ({"tools": [_function(name="x" * 65)]}, "tools.0.function.name"),
    ({"tools": [_function(), _function()]}, "tools.1.function.name"),
    ({"tools": [_function(extra=1)]}, "tools.0.function.extra"),
    ({"tools": [_function(parameters={"type": "objekt"})]}, "tools.0.function.parameters"),
    ({"tools": [_function(parameters={"type": "array"})]}, "tools.0.function.parameters"),
    ({"tools": [_function(parameters={"properties": {"x": {"type": 5}}})]}, "tools.0.function.parameters"),
    ({"tools": [_function(parameters={"$schema": "http://localhost/x"})]}, "tools.0.function.parameters"),
    ({"tools": [_function(parameters={"description": "x" * 70_000})]}, "tools.0.function.parameters"),
    ({"tools": [_function(name=f"f{at}") for at in range(129)]}, "tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "missing"}}}, "tool_choice.function.name"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name"),
    ({"tools": [_function(strict=True)]}, "tools"),  # the markup of this model is text
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]}, "messages.0.tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [_CALL]}]}, "messages.0.tool_calls"),
    ({"messages": [{"role": "assistant"}]}, "messages.0.content"),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages.0.content"),
    ({"messages": [{"role": "assistant", "tool_calls": [{**_CALL, "type": "x"}]}]}, "messages.0.tool_calls.0.type"),
    ({"messages": [{"role": "assistant", "tool_calls": [_CALL]}], "continue_final_message": True}, "messages"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
async def test_unsupported_fields_are_refused_by_name(fields: dict[str, Any], param: str):
    async with in_process(_engine(), tokenizer=calling()) as client:
        response = await client.post(URL, json=chat(**fields))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_tools_without_template_support_are_refused():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    async with in_process(FakeEngine()) as client:
        for field, value, param in [("tools", TOOLS, "tools"), ("messages", turns, "messages.1.tool_calls")]:
            response = await client.post(URL, json=chat(**{field: value}))
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
            assert "chat template" in response.json()["error"]["message"]
        assert (await client.post(URL, json=chat(tools=TOOLS, tool_choice="none"))).status_code == 200
        assert (await client.post("/tokenize", json={"messages": chat()["messages"], "tools": TOOLS})).status_code == 400
        assert (await client.post("/tokenize", json={"prompt": "x", "tools": TOOLS})).status_code == 400


async def test_parser_setting_selects_call_syntax(monkeypatch: pytest.MonkeyPatch):
    async with in_process(_engine(), tokenizer=calling(), tool_call_parser="none") as client:
        response = await client.post(URL, json=chat(tools=TOOLS))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert "tool_call_parser" in response.json()["error"]["message"]
    # a template that shows tools, and no calls, has no syntax of calls
    monkeypatch.setattr(calling(), "chat_template", "{{ tools | tojson if tools }}" + CHAT_TEMPLATE)
    for parser, status in [("auto", 400), ("hermes", 200)]:
        async with in_process(_engine(), tokenizer=calling(), tool_call_parser=parser) as client:
            assert (await client.post(URL, json=chat(tools=TOOLS))).status_code == status


def test_tool_support_follows_the_template():
    for tokenizer, shows, markers in [
        (calling(), True, 0),
        (calling(False), True, 2),
        (byte_level(), False, 0),
        (byte_fallback(), False, 0),
    ]:
        support = tool_support(TextCodec(tokenizer), "auto")
        assert (support.shows_tools, support.shows_calls, support.syntax is not None) == (shows,) * 3
        assert len(support.marker_tokens) == markers


async def test_openai_client_holds_conversation_with_tools():
    """Two turns, the first in a stream read by the client's own helper."""
    engine = _engine()
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    fields: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": TOOLS}
    async with over_loopback(engine, tokenizer=calling()) as url, openai.AsyncOpenAI(base_url=url + "/v1", api_key="x") as client:
        async with client.chat.completions.stream(**fields) as stream:
            kinds = {event.type async for event in stream}
            (choice,) = (await stream.get_final_completion()).choices
        assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
        calls: list[Any] = choice.message.tool_calls or []
        assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
        assert [(call.function.name, call.function.arguments) for call in calls] == CALLS
        written_calls = [
            {"id": call.id, "type": "function", "function": dict(zip(("name", "arguments"), one))}
            for call, one in zip(calls, CALLS)
        ]
        messages.append({"role": "assistant", "content": choice.message.content, "tool_calls": written_calls})
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]
        (choice,) = (await client.chat.completions.create(**fields)).choices
    again: list[Any] = choice.message.tool_calls or []
    assert [call.function.name for call in again] == ["weather", "weather", "time"]
    assert _prompt(engine).count("rain") == 3
    assert TEXT in _prompt(engine)
