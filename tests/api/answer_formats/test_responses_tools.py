"""Function tools of POST /v1/responses: calls in answers and streams, calls and outputs as input, forced calls, formats."""

import asyncio
import json
from typing import Any

import httpx
import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.types import FinishReason, RequestDefaults
from server.answer_formats.responses import ResponsesFormat
from server.generation.sample import Piece
from server.schemas.responses import ResponsesRequest
from server.text.parsed_text import ReadText
from tests.api.harness import MODEL, chat, in_process
from tests.api.responses_events import events_of, folded, without_ids
from tests.api.tool_calls.test_forced_tools import SCHEMA, _served
from tests.api.tool_calls.test_tools import CALLS, TEXT, _engine, _prompt, written
from tests.fake_engine import FakeEngine
from tests.tokenizers_for_tests import calling

URL = "/v1/responses"
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"], "additionalProperties": False}
WEATHER = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": PLACE, "strict": False}
TIME: dict[str, Any] = {"type": "function", "name": "time", "description": None}
TOOLS: list[dict[str, Any]] = [WEATHER, TIME]


def responses(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hello", **fields}


async def both(client: httpx.AsyncClient, has_cache: bool = False, **fields: Any) -> dict[str, Any]:
    """Return the answer of a request, after comparing it with the stream of the same request."""
    whole = await client.post(URL, json=responses(**fields))
    assert whole.status_code == 200, whole.text
    stream = await client.post(URL, json=responses(**fields, stream=True))
    assert without_ids(folded(events_of(stream.text)), has_cache) == without_ids(whole.json(), has_cache)
    return whole.json()  # type: ignore[no-any-return]


def called(response: dict[str, Any]) -> list[tuple[str, str]]:
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    assert len({call["call_id"] for call in calls}) == len(calls)
    assert all(call["id"].startswith("fc_") and call["call_id"].startswith("call_") for call in calls)
    return [(call["name"], call["arguments"]) for call in calls]


def text_of(response: dict[str, Any]) -> str:
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)


@pytest.mark.parametrize("special", [None, False, True])
@pytest.mark.parametrize("chunks", [(1,), (2, 1, 7), (1000,)])
async def test_calls_follow_the_message(special: bool | None, chunks: tuple[int, ...]):
    async with in_process(_engine(special=special, chunks=chunks), tokenizer=calling(special)) as client:
        answer = await both(client, tools=TOOLS)
    assert [item["type"] for item in answer["output"]] == ["message", *["function_call"] * 3]
    assert (text_of(answer), called(answer)) == ("Let me see.", CALLS)
    assert {item["status"] for item in answer["output"]} == {answer["status"]} == {"completed"}
    assert (answer["tools"], answer["tool_choice"], answer["parallel_tool_calls"]) == (TOOLS, "auto", True)
    assert answer["usage"]["output_tokens"] == len(calling(special).encode(TEXT)) + 1


async def test_calls_alone_have_no_message():
    for text, kinds in [(written("time", "{}"), ["function_call"]), ("hello", ["message"]), ("", ["message"])]:
        async with in_process(_engine(text), tokenizer=calling()) as client:
            answer = await both(client, tools=TOOLS)
        assert [item["type"] for item in answer["output"]] == kinds


_FRAGMENTS = [
    "hello ",
    "日",
    "\n",
    " ",
    "<tool_call>",
    "</tool_call>",
    "{",
    "}",
    '"name"',
    written("time", "{}"),
    *map(json.dumps, "ab"),
]
_TEXTS = st.lists(
    st.sampled_from([*_FRAGMENTS, written("weather", '{"place": "日"}'), '{"name": "time", "arguments": {']), max_size=8
)


def test_a_stream_adds_up_to_the_answer():
    """Any text that may have calls, cut into any events, with and without an end of its own."""

    @settings(max_examples=40, deadline=None)
    @given(_TEXTS.map("".join), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from([None, 3, 11]))
    def check(text: str, chunks: list[int], most: int | None) -> None:
        async def compare() -> None:
            async with in_process(_engine(text, chunks=chunks), tokenizer=calling()) as client:
                await both(client, tools=TOOLS, max_output_tokens=most)

        asyncio.run(compare())

    check()


async def test_a_call_that_is_cut_is_incomplete():
    most = len(calling().encode(TEXT.split(" 日")[0]))
    async with in_process(_engine(), tokenizer=calling()) as client:
        answer = await both(client, tools=TOOLS, max_output_tokens=most)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in answer["output"]] == ["completed", "incomplete"]
    assert called(answer) == [("weather", '{"place": "Oslo')]


@pytest.mark.parametrize(("end", "calls"), [('", "arg', []), (', "arg', [("weather", "")]), ('{"place"', [("weather", "")])])
async def test_a_cut_beginning_is_no_message(end: str, calls: list[tuple[str, str]]):
    """The markup of a call that was cut before its arguments was the text of a message."""
    most = len(calling().encode(TEXT[: TEXT.index(end)]))
    async with in_process(_engine(), tokenizer=calling()) as client:
        answer = await both(client, tools=TOOLS, max_output_tokens=most)
    assert (answer["status"], text_of(answer), called(answer)) == ("incomplete", "Let me see.", calls)
    assert answer["output"][-1]["status"] == "incomplete"


async def test_parallel_false_ends_behind_one_call():
    async with in_process(_engine(), tokenizer=calling()) as client:
        answer = await both(client, tools=TOOLS, parallel_tool_calls=False)
        unlimited = await both(client, tools=TOOLS, parallel_tool_calls=True)
    assert (called(answer), called(unlimited)) == (CALLS[:1], CALLS)
    assert answer["parallel_tool_calls"] is False


async def test_answer_as_input_gives_chat_prompt():
    """The items of an output, given back whole, and their results: the prompt is that of the chat with the same messages."""
    engine = _engine()
    async with in_process(engine, tokenizer=calling()) as client:
        answer = (await client.post(URL, json=responses(tools=TOOLS, instructions="be brief"))).json()
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        outputs = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": f"r{at}"} for at, call in enumerate(calls)
        ]
        outputs[1]["output"] = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
        turns = [{"role": "user", "content": "hello"}, *answer["output"], *outputs]
        assert (await client.post(URL, json=responses(tools=TOOLS, instructions="be brief", input=turns))).status_code == 200
        given_calls = [
            {"id": call["call_id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in calls
        ]
        messages = [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "Let me see.", "tool_calls": given_calls},
            *(
                {"role": "tool", "tool_call_id": call["call_id"], "content": text}
                for call, text in zip(calls, ["r0", "a\nb", "r2"], strict=True)
            ),
        ]
        tools = [{"type": "function", "function": {name: tool[name] for name in tool if name != "type"}} for tool in TOOLS]
        assert (await client.post("/v1/chat/completions", json=chat(messages=messages, tools=tools))).status_code == 200
    _, mine, chats = engine.requests
    assert mine.prompt_ids == chats.prompt_ids


async def test_allowed_tools_are_the_only_ones():
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]}
    engine = _engine()
    async with in_process(engine, tokenizer=calling()) as client:
        answer = await both(client, tools=TOOLS, tool_choice=choice)
        assert (called(answer), answer["tool_choice"], answer["tools"]) == (CALLS[2:], choice, TOOLS)
        assert '"name": "weather", "description"' not in _prompt(engine)
        none = await both(client, tools=TOOLS, tool_choice="none")
    assert (text_of(none), called(none)) == (TEXT, [])


FORCED_TOOLS = [
    {"type": "function", "name": "weather", "parameters": SCHEMA},
    {"type": "function", "name": "time", "strict": None},
]
FORCED: list[Any] = [
    "required",
    {"type": "function", "name": "weather"},
    {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
]


@pytest.mark.parametrize("choice", FORCED)
async def test_forced_calls_match_their_schemas(choice: Any):
    async with _served(False) as client:
        answer = await both(client, True, tools=FORCED_TOOLS, tool_choice=choice, parallel_tool_calls=False, temperature=0)
    ((name, arguments),) = called(answer)
    assert name == "weather" or choice == "required"
    if name == "weather":
        jsonschema_rs.validate(SCHEMA, json.loads(arguments))
    assert len(answer["output"]) == 1


@pytest.mark.parametrize(
    "text_format",
    [{"type": "json_object"}, {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True, "description": None}],
)
async def test_texts_match_their_format(text_format: dict[str, Any]):
    async with _served() as client:
        answer = await both(client, True, text={"format": text_format}, temperature=0, max_output_tokens=300)
        plain = await both(client, True, text={"format": {"type": "text"}}, temperature=0, max_output_tokens=5)
    assert answer["text"] == {"format": text_format}
    assert plain["text"] == {"format": {"type": "text"}}
    if answer["status"] == "completed":
        value = json.loads(text_of(answer))
        jsonschema_rs.validate(text_format.get("schema", {"type": "object"}), value)
    assert answer["status"] == "completed" or text_format["type"] == "json_object"


async def test_a_format_holds_beside_tools():
    """As agents with an output type and tools send it."""
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    async with _served(False) as client:
        free = await both(client, True, tools=FORCED_TOOLS, text=text, temperature=0, max_output_tokens=200)
        forced = await both(client, True, tools=FORCED_TOOLS, text=text, tool_choice=FORCED[1], temperature=0)
    if not called(free):
        jsonschema_rs.validate(schema, json.loads(text_of(free)))
    assert [name for name, _ in called(forced)] == ["weather"]


async def test_numbers_of_a_format_are_not_rounded():
    """The bug: decimals of `text` were rounded before they became a grammar, and the answer had another number."""
    number = "0.1000000000000000055"
    schema = f'{{"type":"json_schema","name":"n","schema":{{"enum":[[{number}]]}}}}'
    async with _served() as client:
        body = f'{json.dumps(responses())[:-1]},"text":{{"format":{schema}}}}}'
        response = await client.post(URL, content=body, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "text.format")
    assert number in response.json()["error"]["message"]


async def test_logprobs_are_those_of_a_chat():
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    engine = _engine("hello 日")
    async with in_process(engine, tokenizer=calling()) as client:
        answer = await both(client, **fields)
        alone = await both(client, include=["message.output_text.logprobs"])
        same = (await client.post("/v1/chat/completions", json=chat(logprobs=True, top_logprobs=2))).json()
        none = await both(client)
        shown = await both(client, tools=TOOLS, tool_choice="none", **fields)
    logprobs = answer["output"][0]["content"][0]["logprobs"]
    assert logprobs == same["choices"][0]["logprobs"]["content"] == shown["output"][0]["content"][0]["logprobs"]
    assert [one["top_logprobs"] for one in alone["output"][0]["content"][0]["logprobs"]] == [[]] * len(logprobs)
    assert (none["output"][0]["content"][0]["logprobs"], answer["top_logprobs"], none["top_logprobs"]) == ([], 2, 0)


def test_reasoning_is_an_item_of_its_own():
    """Pieces with reasoning, as a model with a reasoning block gives them; logprobs of the block are sent with the message."""
    form = ResponsesFormat(ResponsesRequest.model_validate(responses()), RequestDefaults(), is_stored=True)
    pieces = [
        Piece(0, reasoning="a"),
        Piece(0, reasoning="b", text="c", parts=(ReadText("c"),)),
        Piece(0, text="d", parts=(ReadText("d"),)),
        Piece(0, finish=FinishReason.LENGTH),
    ]
    events = [json.loads(event.model_dump_json()) for piece in pieces for event in form.events(piece)]
    kinds = [event["type"].removeprefix("response.") for event in events[2:]]
    assert kinds == [
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
    ]
    reasoning, message = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert (reasoning["type"], reasoning["summary"], reasoning["status"]) == ("reasoning", [], "completed")
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "ab"}]
    assert (message["content"][0]["text"], message["status"]) == ("cd", "incomplete")


def test_reasoning_that_is_cut_has_no_message():
    form = ResponsesFormat(ResponsesRequest.model_validate(responses()), RequestDefaults(), is_stored=True)
    events = list(form.events(Piece(0, reasoning="a", finish=FinishReason.LENGTH)))
    assert [item for item in form.item_ids if not item.startswith("rs_")] == []
    assert events[-1].model_dump()["item"]["status"] == "incomplete"


_MESSAGE = {"role": "user", "content": "x"}
_CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
_OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "1"}
_LOGPROBS = {"include": ["message.output_text.logprobs"]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        ({"tools": [{"type": kind}]}, "tools.0.type")
        for kind in ("web_search", "file_search", "mcp", "code_interpreter", "custom")
    ),
    ({"tools": [TIME, {"type": "web_search_preview", "search_context_size": "low"}]}, "tools.1.type"),
    ({"tools": [{"name": "f"}]}, "tools.0.type"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.function"),
    ({"tools": [{"type": "function"}]}, "tools.0.name"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
    ({"tools": [TIME, TIME]}, "tools.1.name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]}, "tools.0.parameters"),
    ({"tools": [{"type": "function", "name": "f", "defer_loading": True}]}, "tools.0.defer_loading"),
    ({"tools": [{"type": "function", "name": f"f{at}"} for at in range(129)]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "any", "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "missing"}, "tools": TOOLS}, "tool_choice.name"),
    ({"tool_choice": {"type": "function", "function": {"name": "time"}}, "tools": TOOLS}, "tool_choice.function"),
    ({"tool_choice": {"type": "web_search"}, "tools": TOOLS}, "tool_choice.type"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}, "tools": TOOLS}, "tool_choice.tools"),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "z"}]}, "tools": TOOLS},
        "tool_choice.tools.0.name",
    ),
    ({"tools": TOOLS, "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}}, "text.format"),
    ({"tools": TOOLS, **_LOGPROBS}, "include.0"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, **_LOGPROBS}, "top_logprobs"),
    ({"include": ["a b"]}, "include.0"),
    ({"include": ["x", "a, b"]}, "include.1"),
    ({"include": ["x"] * 17}, "include"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "text", "name": "a"}}}, "text.format.name"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {"type": "string"}}}}}, "text.format"),
    ({"input": [_MESSAGE, {"type": "web_search_call", "id": "ws_1"}]}, "input.1.type"),
    (
        {"input": [_MESSAGE, {**_MESSAGE, "content": [{"type": "input_text", "text": "a"}, {"type": "input_image"}]}]},
        "input.1.content.1.type",
    ),
    ({"input": [_MESSAGE, {**_CALL, "arguments": {}}]}, "input.1.arguments"),
    ({"input": [_CALL, {**_OUTPUT, "output": [{"type": "input_file"}]}]}, "input.1.output.0.type"),
    ({"input": [_MESSAGE, _OUTPUT]}, "input.1.call_id"),
    ({"input": [_OUTPUT, _CALL]}, "input.0.call_id"),
    ({"input": [{"type": "message", "role": "tool", "content": "x"}]}, "input.0.role"),
    ({"input": [_MESSAGE, *[{**_CALL, "call_id": f"c{at}"} for at in range(129)]]}, "input.1.type"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.id"),
    ({"input": [_MESSAGE, {"id": "msg_1"}]}, "input.1.id"),
    ({"reasoning": {"effort": 3}}, "reasoning.effort"),
    ({"max_tool_calls": 1}, "max_tool_calls"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"background": True}, "background"),
    ({"truncation": "last"}, "truncation"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
async def test_refusals_name_the_field(fields: dict[str, Any], param: str):
    async with in_process(_engine(), tokenizer=calling()) as client:
        for stream in ({}, {"stream": True}):
            response = await client.post(URL, json=responses(**(stream | fields)))
            error = response.json()["error"]
            status = 404 if param.endswith(".id") else 400
            assert (response.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
            assert "messages" not in error["message"]


async def test_stream_options_need_a_stream():
    async with in_process(_engine(), tokenizer=calling()) as client:
        for stream, status in ((False, 400), (None, 400), (True, 200)):
            body = responses(stream=stream, stream_options={"include_obfuscation": False})
            assert (await client.post(URL, json=body)).status_code == status


async def test_calls_need_a_template_that_shows_them():
    """The field of the item is named, not that of the chat message that it becomes."""
    items = [_MESSAGE, {"role": "assistant", "content": "hm"}, _CALL, _OUTPUT]
    async with in_process(FakeEngine()) as client:
        for given, param in ((items, "input.2.type"), (items[:2] + items[3:], "input.2.call_id")):
            response = await client.post(URL, json=responses(input=given, instructions="x"))
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        response = await client.post(URL, json=responses(tools=TOOLS))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize("stream", [False, True])
async def test_options_without_effect_are_named(stream: bool):
    fields: dict[str, Any] = {
        "text": {"verbosity": "low"},
        "reasoning": {"effort": "none", "summary": "auto"},
        "include": ["reasoning.encrypted_content", "web_search_call.results", "web_search_call.results"],
        "prompt_cache_key": "k",
    }
    included = {f"include.{name}" for name in fields["include"]}
    names = {*included, "text.verbosity", "reasoning.effort", "reasoning.summary", "prompt_cache_key"}
    async with in_process(_engine(), tokenizer=calling()) as client:
        response = await client.post(URL, json=responses(**fields, stream=stream))
        assert response.status_code == 200, response.text
        assert sorted(response.headers["x-ignored-parameters"].split(", ")) == sorted(names)
        plain = await client.post(URL, json=responses(stream=stream, include=[], tools=[], text={}, reasoning={}))
        assert "x-ignored-parameters" not in plain.headers
