"""POST /v1/messages: the prompt of a request, its answer whole and streamed, and the reason of its end."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from server.answer_formats.anthropic import MessagesFormat
from server.schemas.chat import ChatRequest
from tests.api.harness import MODEL, chat, in_process
from tests.fake_engine import FakeEngine, emits
from tests.tokenizers_for_tests import byte_level, calling, thinking

URL = "/v1/messages"
CHAT_URL = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"], "additionalProperties": False}
WEATHER = {"name": "weather", "description": "Reports it.", "input_schema": SCHEMA}
TIME = {"name": "time", "input_schema": {"type": "object", "properties": {}}}
TOOLS = [WEATHER, TIME]
FUNCTIONS = [
    {"type": "function", "function": {"name": "weather", "description": "Reports it.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def message(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 1000, "messages": HELLO, **fields}


def written(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def engine_of(text: str, **fields: Any) -> FakeEngine:
    """Return an engine that generates the text and ends."""
    ids = calling().encode(text + "<|end|>")
    return FakeEngine(script=emits(ids), **{"chunks": (1, 4, 2), "max_model_len": 1500, "eos_token_ids": (ids[-1],), **fields})


def events_of(body: str) -> list[dict[str, Any]]:
    """Return the events of a stream, each named by its type."""
    blocks = body.removesuffix("\n\n").split("\n\n")
    pairs = [block.split("\n") for block in blocks]
    events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {event['type']}" for event in events]
    return events


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the answer that the events of a stream add up to; check their order."""
    start, ping, *middle, end, stop = events
    assert (start["type"], ping, end["type"], stop) == (
        "message_start",
        {"type": "ping"},
        "message_delta",
        {"type": "message_stop"},
    )
    answer = start["message"]
    assert (answer["content"], answer["stop_reason"], answer["stop_sequence"]) == ([], None, None)
    is_open = False
    texts: dict[int, str] = {}
    for event in middle:
        if event["type"] == "content_block_start":
            assert (event["index"], is_open) == (len(answer["content"]), False)
            answer["content"].append(event["content_block"])
            is_open = True
        elif event["type"] == "content_block_delta":
            assert (event["index"], is_open) == (len(answer["content"]) - 1, True)
            block, delta = answer["content"][-1], event["delta"]
            if delta["type"] == "input_json_delta":
                assert block["input"] == {}
                texts[event["index"]] = texts.get(event["index"], "") + delta["partial_json"]
            else:
                field = delta["type"].removesuffix("_delta")
                block[field] = block[field] + delta[field]
        else:
            assert (event["type"], event["index"], is_open) == ("content_block_stop", len(answer["content"]) - 1, True)
            is_open = False
    assert not is_open
    for index, text in texts.items():
        answer["content"][index]["input"] = from_json(text, allow_partial=True)  # as the official client reads it
    return {**answer, **end["delta"], "usage": end["usage"]}


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    assert answer["id"].startswith("msg_")
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in answer["content"]]
    ids = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
    assert len({*ids}) == len(ids)
    assert all(name.startswith("toolu_") for name in ids)
    return {**answer, "id": None, "content": blocks}


PROMPTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"messages": HELLO}),
    ({"system": "be brief"}, {"messages": [{"role": "system", "content": "be brief"}, *HELLO]}),
    ({"system": ""}, {"messages": HELLO}),
    (
        {
            "system": [
                {"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
                {"type": "text", "text": "b"},
            ]
        },
        {"messages": [{"role": "system", "content": "a\nb"}, *HELLO]},
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}, {"role": "user", "content": "there"}]},
        {"messages": [{"role": "user", "content": "hello\nthere"}]},
    ),
    (
        {"messages": [*HELLO, {"role": "assistant", "content": []}, *HELLO]},
        {"messages": [*HELLO, {"role": "assistant", "content": ""}, *HELLO]},
    ),
    (
        {"messages": [*HELLO, {"role": "assistant", "content": "I am"}]},
        {"messages": [*HELLO, {"role": "assistant", "content": "I am"}], "continue_final_message": True},
    ),
    ({"tools": TOOLS}, {"messages": HELLO, "tools": FUNCTIONS}),
    ({"tools": TOOLS, "tool_choice": {"type": "none"}}, {"messages": HELLO}),
    ({"tools": [], "tool_choice": {"type": "auto"}}, {"messages": HELLO}),
    (
        {"tools": [{**TIME, "type": "custom", "input_examples": [{"a": 1}], "eager_input_streaming": True}]},
        {
            "messages": HELLO,
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "time", "parameters": {"type": "object", "properties": {}, "examples": [{"a": 1}]}},
                }
            ],
        },
    ),
]


@pytest.mark.parametrize(("fields", "same"), PROMPTS)
async def test_prompt_is_that_of_a_chat(fields: dict[str, Any], same: dict[str, Any]):
    async with in_process(engine := engine_of("x"), tokenizer=calling()) as client:
        response = await client.post(URL, json=message(**fields))
        assert response.status_code == 200, response.text
        assert (await client.post(CHAT_URL, json={"model": MODEL, **same})).status_code == 200
    one, two = engine.requests
    assert calling().decode(one.prompt_ids) == calling().decode(two.prompt_ids)


async def test_prompt_has_calls_and_results_in_order():
    turns = [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "abc"},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "text", "text": "Let me see.", "citations": None},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"place": "Oslo", "n": 1.5}},
                {"type": "tool_use", "id": "toolu_2", "name": "time", "input": {}, "caller": {"type": "direct"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain", "is_error": False},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "clock"}],
                    "is_error": True,
                },
                {"type": "text", "text": "so"},
                {"type": "text", "text": "what?"},
                {"type": "tool_result", "tool_use_id": "toolu_2"},
            ],
        },
    ]
    same = [
        turns[0],
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Oslo", "n": 1.5}'}},
                {"id": "2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "tool", "tool_call_id": "2", "content": "Error: no\nclock"},
        {"role": "user", "content": "so\nwhat?"},
        {"role": "tool", "tool_call_id": "2", "content": ""},
    ]
    async with in_process(engine := engine_of("x"), tokenizer=calling()) as client:
        assert (await client.post(URL, json=message(messages=turns, tools=TOOLS))).status_code == 200
        assert (await client.post(CHAT_URL, json=chat(messages=same, tools=FUNCTIONS))).status_code == 200
    one, two = engine.requests
    assert calling().decode(one.prompt_ids) == calling().decode(two.prompt_ids)
    assert "Let me see." in calling().decode(one.prompt_ids)


async def test_sampling_fields_are_honoured():
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "cache_salt": "s", "metadata": {"user_id": "u"}, "timeout_s": 30}
    async with in_process(engine := engine_of("x"), tokenizer=calling()) as client:
        assert (await client.post(URL, json=message(**fields, max_tokens=9))).status_code == 200
        assert (await client.post(CHAT_URL, json=chat(**{**fields, "metadata": {}}, max_tokens=9))).status_code == 200
    one, two = engine.requests
    assert one.sampling == two.sampling
    assert (one.sampling.temperature, one.sampling.top_k, one.cache_salt) == (0.5, 7, two.cache_salt)


async def test_answer_blocks_follow_text_order():
    text = "\n".join(["Let me see.", written("weather", '{"place": "Oslo 日😀"}'), "and", written("time", "{}"), "so"])
    async with in_process(engine_of(text), tokenizer=calling()) as client:
        answer = (await client.post(URL, json=message(tools=TOOLS))).json()
    assert list(answer) == ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"]
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", MODEL)
    assert without_ids(answer)["content"] == [
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "name": "weather", "input": {"place": "Oslo 日😀"}},
        {"type": "text", "text": "\nand"},
        {"type": "tool_use", "name": "time", "input": {}},
        {"type": "text", "text": "\nso"},
    ]
    assert answer["stop_reason"] == "tool_use"


ENDS: list[tuple[str, dict[str, Any], str, str | None]] = [
    ("hello there", {}, "end_turn", None),
    ("", {}, "end_turn", None),
    ("hello there", {"max_tokens": 1}, "max_tokens", None),
    ("hello there", {"stop_sequences": ["zzz", "the"]}, "stop_sequence", "the"),
    (written("time", "{}"), {"tools": TOOLS}, "tool_use", None),
    (written("time", "{}"), {"tools": TOOLS, "stop_sequences": ["time"]}, "stop_sequence", "time"),
    (written("weather", '{"place": "Oslo"}'), {"tools": TOOLS, "max_tokens": 70}, "max_tokens", None),
    ('<tool_call>\n{"name": "weather", "arguments": {"place": 12', {"tools": TOOLS}, "end_turn", None),
    (written("weather", "{'place': 12}"), {"tools": TOOLS}, "tool_use", None),
    (written("time", "{}"), {}, "end_turn", None),
    (
        "\n".join([written("time", "{}")] * 2),
        {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        "tool_use",
        None,
    ),
]


@pytest.mark.parametrize(("text", "fields", "reason", "sequence"), ENDS)
async def test_reason_of_an_end_is_reported(text: str, fields: dict[str, Any], reason: str, sequence: str | None):
    async with in_process(engine_of(text), tokenizer=calling()) as client:
        answer = (await client.post(URL, json=message(**fields))).json()
        stream = await client.post(URL, json=message(**fields, stream=True))
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    end = events_of(stream.text)[-2]
    assert (end["delta"], end["usage"]) == ({"stop_reason": reason, "stop_sequence": sequence}, answer["usage"])


@pytest.mark.parametrize(("end", "names"), [('", "arg', []), (', "arg', ["weather"]), ('{"place"', ["weather"])])
async def test_a_cut_beginning_is_no_text(end: str, names: list[str]):
    """The markup of a call that was cut before its arguments was a block of text."""
    text = "So.\n" + written("weather", '{"place": "Oslo"}')
    fields = {"tools": TOOLS, "max_tokens": len(calling().encode(text[: text.index(end)]))}
    async with in_process(engine_of(text), tokenizer=calling()) as client:
        answer = (await client.post(URL, json=message(**fields))).json()
        stream = events_of((await client.post(URL, json=message(**fields, stream=True))).text)
    blocks = [{"type": "text", "text": "So."}, *({"type": "tool_use", "name": name, "input": {}} for name in names)]
    assert (without_ids(answer)["content"], answer["stop_reason"]) == (blocks, "max_tokens")
    assert without_ids(joined(stream)) == without_ids(answer)


async def test_first_call_ends_answer_without_parallel_calls():
    text = "\n".join([written("time", "{}")] * 2)
    async with in_process(engine_of(text), tokenizer=calling()) as client:
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        answer = (await client.post(URL, json=message(tools=TOOLS, tool_choice=choice))).json()
    assert [block["type"] for block in answer["content"]] == ["tool_use"]


CUT = [
    ('{"place": "Os', {}),
    ('{"place": "Oslo", "days": [1, 2, 3, "unf', {"place": "Oslo", "days": [1, 2, 3]}),
    ("{", {}),
    ("{'place': 12}", {"INVALID_JSON": "{'place': 12}"}),
    ('{"place": 1e999}', {"INVALID_JSON": '{"place": 1e999}'}),
    ('{"place": NaN}', {"INVALID_JSON": '{"place": NaN}'}),
]


@pytest.mark.parametrize(("arguments", "value"), CUT)
async def test_tool_input_is_always_an_object(arguments: str, value: dict[str, Any]):
    """A number without limits in the arguments of a call cannot be written as JSON: it would be a 500."""
    text = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}'
    async with in_process(engine_of(text), tokenizer=calling()) as client:
        answer = (await client.post(URL, json=message(tools=TOOLS))).json()
    assert answer["content"][-1]["input"] == value


async def test_limit_above_the_room_is_lowered():
    """Clients of this API always send a limit, often one that exceeds the context of a small model."""
    async with in_process(engine := engine_of("x" * 2000, max_model_len=300), tokenizer=calling()) as client:
        answer = (await client.post(URL, json=message(max_tokens=32_000))).json()
        assert answer["stop_reason"] == "model_context_window_exceeded"
        assert answer["usage"]["output_tokens"] == 300 - answer["usage"]["input_tokens"]
        long = await client.post(URL, json=message(messages=[{"role": "user", "content": "x" * 300}]))
        assert (long.status_code, long.json()["error"]["details"]) == (400, {"error_code": "context_length_exceeded"})
        assert long.json()["error"]["message"].startswith("messages: prompt is too long: ")
    assert engine.requests[0].sampling.max_tokens == 300 - len(engine.requests[0].prompt_ids)
    async with in_process(engine := engine_of("x" * 2000), tokenizer=calling(), max_answer_tokens=7) as client:
        answer = (await client.post(URL, json=message(max_tokens=32_000))).json()
        assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", 7)


async def test_usage_counts_cached_tokens_apart():
    async with in_process(engine := engine_of("hello", num_cached_tokens=5), tokenizer=calling()) as client:
        usage = (await client.post(URL, json=message())).json()["usage"]
        start, *_ = events_of((await client.post(URL, json=message(stream=True))).text)
    num_prompt = len(engine.requests[0].prompt_ids)
    assert usage == {
        "input_tokens": num_prompt - 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 5,
        "output_tokens": len(calling().encode("hello")) + 1,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    assert {**start["message"]["usage"], "output_tokens": usage["output_tokens"]} == usage


CALLED = [
    written("weather", '{"place": "a } b <"}'),
    written("time", "{}"),
    written("weather", '{"days": [1, {}]}'),
    written("no", "{}"),
]
parts = st.lists(st.sampled_from([*CALLED, "hello", " there\n", "日本 😀", "<tool_call>", "</tool_call>\n", "stop"]), max_size=7)


@settings(max_examples=60, suppress_health_check=list(HealthCheck), deadline=None)
@given(parts, st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 400), st.booleans())
async def test_stream_is_the_whole_answer(parts: list[str], chunks: list[int], max_tokens: int, has_stop: bool):
    """Also the order of texts and calls: neither the stream nor the tokens of a step change it."""
    fields = {"tools": TOOLS, "max_tokens": max_tokens, **({"stop_sequences": ["stop"]} if has_stop else {})}
    answers = []
    for sizes in (chunks, [1]):
        async with in_process(engine_of("".join(parts), chunks=sizes), tokenizer=calling()) as client:
            whole = (await client.post(URL, json=message(**fields))).json()
            stream = await client.post(URL, json=message(**fields, stream=True))
        assert without_ids(joined(events_of(stream.text))) == without_ids(whole)
        answers.append(without_ids(whole))
    assert answers[0] == answers[1]


def thoughtful(text: str = "<think>\nhm\n</think>\n\nhello", **fields: Any) -> FakeEngine:
    ids = thinking().encode(text + "<|end|>")
    return FakeEngine(
        script=emits(ids), **{"chunks": (1, 4), "max_model_len": 1500, "vocab_size": 410, "eos_token_ids": (ids[-1],), **fields}
    )


async def test_thinking_is_a_block_before_the_text():
    """The block ends with a signature, without which clients do not give it back."""
    async with in_process(thoughtful(), tokenizer=thinking()) as client:
        whole = (await client.post(URL, json=message())).json()
        events = events_of((await client.post(URL, json=message(stream=True))).text)
        omitted = (await client.post(URL, json=message(thinking={"type": "adaptive", "display": "omitted"}))).json()
    assert whole["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "unsigned"},
        {"type": "text", "text": "hello"},
    ]
    assert without_ids(joined(events)) == without_ids(whole)
    assert omitted["content"] == whole["content"][1:]
    assert whole["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert next(kind for kind in deltas if kind != "thinking_delta") == "signature_delta"


@pytest.mark.parametrize(("kind", "is_switched"), [("qwen3", True), ("smollm3", True), ("deepseek", False)])
@pytest.mark.parametrize(
    ("config", "value"), [("enabled", True), ("adaptive", True), ("between_tools", True), ("disabled", False)]
)
async def test_thinking_is_switched_by_the_template(kind: str, is_switched: bool, config: str, value: bool):
    """A model whose template has no switch decides itself; the answer names the field."""
    fields = {"chat_template_kwargs": {"enable_thinking": value}} if is_switched else {}
    async with in_process(engine := thoughtful(), tokenizer=thinking(kind)) as client:
        response = await client.post(URL, json=message(thinking={"type": config, "budget_tokens": 2000}))
        assert response.status_code == 200, response.text
        assert (response.headers.get("x-ignored-parameters") is None) == is_switched
        await client.post(CHAT_URL, json=chat(**fields))
        counted = await client.post(f"{URL}/count_tokens", json={"model": MODEL, "messages": HELLO, "thinking": {"type": config}})
    one, two = engine.requests
    assert one.prompt_ids == two.prompt_ids
    assert counted.json()["input_tokens"] == len(one.prompt_ids)


async def test_template_receives_thinking_of_earlier_turns():
    """It was left out of the prompt, also where the template shows it."""
    block = {"type": "thinking", "thinking": "hm", "signature": "unsigned"}
    turns = [*HELLO, {"role": "assistant", "content": [block, {"type": "text", "text": "hello"}]}, *HELLO]
    same = [HELLO[0], {"role": "assistant", "content": "hello", "reasoning_content": "hm"}, HELLO[0]]
    async with in_process(engine := thoughtful(), tokenizer=thinking()) as client:
        assert (await client.post(URL, json=message(messages=turns))).status_code == 200
        alone = [*HELLO, {"role": "assistant", "content": [block]}, *HELLO]
        assert (await client.post(URL, json=message(messages=alone))).status_code == 200
        await client.post(CHAT_URL, json=chat(messages=same))
    one, _, two = engine.requests
    assert one.prompt_ids == two.prompt_ids
    assert "<think>\nhm" in thinking().decode(one.prompt_ids)


COUNTED: list[dict[str, Any]] = [
    {},
    {"system": "be brief", "tools": TOOLS},
    {"tools": TOOLS, "tool_choice": {"type": "none"}},
    {"messages": [*HELLO, {"role": "assistant", "content": "I am"}]},
    {"thinking": {"type": "adaptive"}, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
]


@pytest.mark.parametrize("fields", COUNTED)
async def test_count_is_the_usage_of_the_request(fields: dict[str, Any]):
    body = {name: value for name, value in message(**fields).items() if name != "max_tokens"}
    async with in_process(engine := engine_of("x", num_cached_tokens=2), tokenizer=calling()) as client:
        counted = await client.post(f"{URL}/count_tokens", json=body)
        assert engine.requests == []
        usage = (await client.post(URL, json=message(**fields))).json()["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


async def test_count_may_exceed_the_context():
    """A client counts to find out that a conversation is too long; an error would not give the number."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 300}]}
    async with in_process(engine_of("x", max_model_len=200), tokenizer=calling()) as client:
        counted = await client.post(f"{URL}/count_tokens", json=body)
    assert counted.status_code == 200
    assert counted.json()["input_tokens"] > 200


async def test_grammar_is_that_of_a_chat():
    """Forced calls, strict tools and schemas of the text: the grammars of the same chat."""
    schema = {"type": "object", "properties": {"n": {"type": "number", "minimum": 0.25}}}
    strict = [{**WEATHER, "strict": True}]
    function = {"type": "function", "function": {**FUNCTIONS[0]["function"], "strict": True}}  # type: ignore[dict-item]
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"tools": TOOLS, "tool_choice": {"type": "any"}}, {"tools": FUNCTIONS, "tool_choice": "required"}),
        (
            {"tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            {"tools": FUNCTIONS, "tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "time"}},
            {"tools": FUNCTIONS, "tool_choice": {"type": "function", "function": {"name": "time"}}},
        ),
        ({"tools": strict}, {"tools": [function]}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
        ),
    ]
    async with in_process(engine := engine_of("x", vocab_size=402), tokenizer=calling(False)) as client:
        for fields, same in pairs:
            engine.requests.clear()
            response = await client.post(URL, json=message(**fields, max_tokens=5))
            assert response.status_code == 200, response.text
            await client.post(CHAT_URL, json=chat(**same, max_tokens=5))
            one, two = engine.requests
            assert one.sampling.grammar == two.sampling.grammar is not None


async def test_numbers_of_schemas_are_not_rounded():
    """The number of a schema was rounded before it became a grammar."""
    config = '"output_config":{"format":{"type":"json_schema","schema":{"enum":[0.1000000000000000055]}}}'
    body = f"{json.dumps(message())[:-1]},{config}}}"
    async with in_process(engine_of("x")) as client:
        response = await client.post(URL, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "0.1000000000000000055" in response.json()["error"]["message"]


async def test_answers_of_a_plain_tokenizer_end_too():
    ids = byte_level().encode("hello 日本語 😀")
    async with in_process(FakeEngine(script=emits(ids), chunks=(1, 3))) as client:
        whole = (await client.post(URL, json=message())).json()
        events = events_of((await client.post(URL, json=message(stream=True))).text)
    assert whole["content"] == [{"type": "text", "text": "hello 日本語 😀"}]
    assert without_ids(joined(events)) == without_ids(whole)


def test_format_needs_running_usage():
    """The start of a stream reports the tokens of the prompt, so the chat behind it requests usage in every chunk."""
    body = ChatRequest.model_validate(chat(stream=True))
    with pytest.raises(KeyError):
        list(MessagesFormat(body.model, 1).chunks(None, {}))  # type: ignore[arg-type]
