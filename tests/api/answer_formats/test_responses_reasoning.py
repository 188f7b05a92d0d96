"""Reasoning in POST /v1/responses: an item of its own, streamed, counted, stored, and given back to the template."""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.api.answer_formats.test_responses_tools import TIME, URL, both, called, responses, text_of
from tests.api.harness import chat, in_process
from tests.api.tool_calls.test_reasoning import CALL, CONTENT, REASONING, TEXT, _engine
from tests.tokenizers_for_tests import CHAT_TEMPLATE, byte_level, thinking


@pytest.mark.parametrize("special", [None, False, True])
async def test_reasoning_comes_before_the_message(special: bool | None):
    tokenizer = thinking("qwen3", special)
    async with in_process(_engine(special=special), tokenizer=tokenizer) as client:
        answer = await both(client)
        same = (await client.post("/v1/chat/completions", json=chat())).json()
    reasoning, message = answer["output"]
    assert (reasoning["type"], reasoning["summary"], message["type"]) == ("reasoning", [], "message")
    assert (reasoning["content"], text_of(answer)) == ([{"type": "reasoning_text", "text": REASONING}], CONTENT)
    details = same["usage"]["completion_tokens_details"]
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": details["reasoning_tokens"]}


@pytest.mark.parametrize("stored", [False, True])
async def test_returned_reasoning_gives_same_prompt_as_chat(stored: bool):
    """An answer with reasoning, text and a call; its items are given back, or named by their response."""
    engine = _engine(f"<think>\n{REASONING}\n</think>\n\nhm\n{CALL}", max_model_len=2000)
    async with in_process(engine, tokenizer=thinking()) as client:
        first = await both(client, tools=[TIME])
        assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call"]
        call = first["output"][-1]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "noon"}
        fields: dict[str, Any] = {"input": [{"role": "user", "content": "hello"}, *first["output"], output]}
        if stored:
            fields = {"input": [output], "previous_response_id": first["id"]}
        assert (await client.post(URL, json=responses(tools=[TIME], **fields))).status_code == 200
        calls = [{"id": call["call_id"], "type": "function", "function": {"name": "time", "arguments": call["arguments"]}}]
        messages = [
            *chat()["messages"],
            {"role": "assistant", "reasoning_content": REASONING, "content": "hm", "tool_calls": calls},
            {"role": "tool", "tool_call_id": call["call_id"], "content": "noon"},
        ]
        tools = [{"type": "function", "function": {"name": "time"}}]
        assert (await client.post("/v1/chat/completions", json=chat(messages=messages, tools=tools))).status_code == 200
    mine, chats = engine.requests[-2:]
    assert mine.prompt_ids == chats.prompt_ids
    assert REASONING in thinking().decode(mine.prompt_ids)
    assert called(first)


async def test_reasoning_without_text_is_accepted():
    items = [{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}, {"role": "user", "content": "x"}]
    async with in_process(engine := _engine(), tokenizer=thinking()) as client:
        assert (await client.post(URL, json=responses(input=items))).status_code == 200
        assert (await client.post(URL, json=responses(input="x"))).status_code == 200
    assert engine.requests[0].prompt_ids == engine.requests[1].prompt_ids


async def test_reasoning_that_is_cut_has_no_message():
    async with in_process(_engine(TEXT), tokenizer=thinking()) as client:
        answer = await both(client, max_output_tokens=5)
    assert [(item["type"], item["status"]) for item in answer["output"]] == [("reasoning", "incomplete")]
    assert answer["status"] == "incomplete"


async def test_effort_is_reported_when_template_ignores_it():
    backend = byte_level().backend_tokenizer
    reading = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", chat_template="{{ reasoning_effort }}" + CHAT_TEMPLATE
    )
    for tokenizer, ignored in ((byte_level(), "reasoning.effort"), (reading, None)):
        async with in_process(engine := _engine(), tokenizer=tokenizer) as client:
            response = await client.post(URL, json=responses(reasoning={"effort": "low"}))
        assert response.json()["reasoning"] == {"effort": "low", "summary": None}
        assert response.headers.get("x-ignored-parameters") == ignored
        assert byte_level().decode(engine.requests[0].prompt_ids).startswith("low") == (ignored is None)
