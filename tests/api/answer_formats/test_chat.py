"""POST /v1/chat/completions: template, format, stream."""

import pytest

from tests.api.harness import MODEL, chat, data_of, in_process
from tests.fake_engine import FakeEngine, emits
from tests.tokenizers_for_tests import byte_fallback, byte_level

TEXT = "hello 日本語 😀, the quick fox"
IDS = byte_level().encode(TEXT)
URL = "/v1/chat/completions"


def _engine(**fields) -> FakeEngine:
    return FakeEngine(**{"script": emits(IDS), "chunks": (1, 4), **fields})


def _prompt(engine: FakeEngine) -> str:
    return str(byte_level().decode(engine.requests[-1].prompt_ids))


async def test_an_answer_has_the_openai_shape():
    engine = _engine()
    async with in_process(engine) as client:
        answer = (await client.post(URL, json=chat())).json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    message = {"role": "assistant", "content": TEXT, "refusal": None}
    rest = {"logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert answer["choices"] == [{"index": 0, "message": message, **rest}]
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert _prompt(engine) == "<|start|>user\nhello<|end|>\n<|start|>assistant\n"


async def test_usage_counts_cached_prompt_tokens_once():
    """A prompt counts once, however many choices it has."""
    async with in_process(_engine(num_cached_tokens=16)) as client:
        usages = [(await client.post(URL, json=chat(n=n))).json()["usage"] for n in (1, 3)]
        response = (await client.post("/v1/responses", json={"model": MODEL, "input": "hello"})).json()
    assert [usage["prompt_tokens_details"] for usage in usages] == [{"cached_tokens": 16}] * 2
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 16


async def test_answer_length_defaults_to_remaining_context():
    engine = _engine(max_model_len=100)
    async with in_process(engine) as client:
        await client.post(URL, json=chat())
        await client.post(URL, json=chat(max_tokens=9, max_completion_tokens=7))
    free, limited = engine.requests
    assert free.sampling.max_tokens == 100 - len(free.prompt_ids)
    assert limited.sampling.max_tokens == 7


async def test_end_token_is_counted_but_not_text():
    end = byte_level().convert_tokens_to_ids("<|end|>")
    async with in_process(_engine(script=emits([*IDS, end, *IDS]), eos_token_ids=(end,))) as client:
        answer = (await client.post(URL, json=chat(logprobs=True))).json()
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (TEXT, "stop")
    assert answer["usage"]["completion_tokens"] == len(IDS) + 1 == len(choice["logprobs"]["content"])


async def test_stream_starts_with_role_ends_with_finish():
    options = {"stream": True, "n": 2, "logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}}
    async with in_process(_engine()) as client:
        whole = (await client.post(URL, json=chat(n=2, logprobs=True, top_logprobs=2))).json()
        *chunks, last = data_of((await client.post(URL, json=chat(**options))).text)
    assert (last["choices"], last["usage"], last["metrics"]) == ([], whole["usage"], whole["metrics"])
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["usage"] is None for chunk in chunks)
    for choice in whole["choices"]:
        first, *parts, end = (part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"])
        assert (first["delta"], first["finish_reason"]) == ({"role": "assistant", "content": ""}, None)
        assert (end["delta"], end["finish_reason"]) == ({}, "length")
        assert "".join(part["delta"]["content"] for part in parts) == choice["message"]["content"]
        assert [entry for part in parts for entry in part["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]).decode() == TEXT


async def test_text_parts_are_lines_developer_is_system():
    engine = _engine()
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "three"},
    ]
    async with in_process(engine) as client:
        assert (await client.post(URL, json=chat(messages=messages))).status_code == 200
    first, second, third, *_ = _prompt(engine).split("<|start|>")[1:]
    assert (first, second, third) == ("system\nbe brief<|end|>\n", "user\none\ntwo<|end|>\n", "assistant\n<|end|>\n")


NEUTRAL = {
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "service_tier": "auto",
    "store": False,
    "metadata": {"a": "b"},
    "user": "someone",
    "modalities": ["text"],
    "presence_penalty": 0.5,
    "frequency_penalty": -1.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": -100},
    "allowed_token_ids": [5, 6],
    "min_tokens": 3,
    "prediction": {"type": "content", "content": "hello"},
    "add_generation_prompt": False,
    "continue_final_message": True,
    "add_special_tokens": True,
    "chat_template": None,
    "chat_template_kwargs": {"enable_thinking": False},
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "truncate_prompt_tokens": 3,
    "request_id": "mine",
}
REFUSED = {
    "response_format": {"type": "yaml"},
    "tools": [{"type": "function"}],
    "tool_choice": "required",
    "service_tier": 5,
    "store": "yes",
    "metadata": {"a": 5},
    "verbosity": "x" * 1025,
    "safety_identifier": ["x"],
    "prompt_cache_key": "x" * 1025,
    "prompt_cache_retention": {},
    "reasoning_effort": "x" * 1025,
    "modalities": ["text", "audio"],
    "messages": [],
    "top_logprobs": 2,
    "presence_penalty": 2.5,
    "logit_bias": {"5": 101},
    "allowed_token_ids": [400],
    "min_tokens": 1000,
    "max_completion_tokens": 0,
    "logprobs": 5,
    "functions": [{"name": "f", "extra": 1}],
    "function_call": {"name": "f"},
    "prediction": {"type": "content", "content": [{"type": "image"}]},
    "prompt": "x",
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"messages": []},
    "truncate_prompt_tokens": 0,
    "request_id": "not mine",
}


async def test_neutral_values_accepted_others_refused_by_name():
    async with in_process(_engine()) as client:
        for name, value in NEUTRAL.items():
            assert (await client.post(URL, json=chat(**{name: value}))).status_code == 200, name
        for name, value in REFUSED.items():
            response = await client.post(URL, json=chat(**{name: value}))
            assert (response.status_code, response.json()["error"]["param"].split(".")[0]) == (400, name)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages.0.content"),
        ({"role": "user", "content": None}, "messages.0.content"),
        ({"role": "user"}, "messages.0.content"),
        ({"role": "tool", "content": "x"}, "messages.0.tool_call_id"),
        ({"role": "user", "content": "x", "name": 5}, "messages.0.name"),
        ({"role": "user", "content": "x", "name": "x" * 1025}, "messages.0.name"),
    ],
)
async def test_unsupported_messages_are_refused(message: dict[str, object], param: str):
    async with in_process(_engine()) as client:
        response = await client.post(URL, json=chat(messages=[message]))
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param)


async def test_answer_continues_last_message_or_opens_new():
    engine = _engine()
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello "}]
    conversation = "<|start|>user\nhi<|end|>\n<|start|>assistant\nhello "
    async with in_process(engine) as client:
        for options, prompt in [
            ({}, f"{conversation}<|end|>\n<|start|>assistant\n"),
            ({"add_generation_prompt": False}, f"{conversation}<|end|>\n"),
            ({"continue_final_message": True}, conversation),
            ({"continue_final_message": True, "add_generation_prompt": False}, conversation),
        ]:
            assert (await client.post(URL, json=chat(messages=messages, **options))).status_code == 200
            assert _prompt(engine) == prompt
        both = chat(messages=messages, continue_final_message=True, add_generation_prompt=True)
        assert (await client.post(URL, json=both)).json()["error"]["param"] == "continue_final_message"


async def test_refusal_by_template_is_client_error():
    messages = [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]
    async with in_process(_engine()) as client:
        response = await client.post(URL, json=chat(messages=messages))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
    assert "system must come first" in response.json()["error"]["message"]


async def test_chat_without_template_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.api.harness.byte_level", byte_fallback)
    async with in_process(_engine()) as client:
        response = await client.post(URL, json=chat())
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]
