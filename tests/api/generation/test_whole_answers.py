"""Which requests need each event at once: streams, and those that the front end may end."""

from typing import Any

import pytest

from tests.api.harness import in_process
from tests.fake_engine import FakeEngine
from tests.tokenizers_for_tests import calling

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


async def needs_each_event(path: str, **fields: Any) -> bool:
    engine = FakeEngine(max_model_len=1500)
    async with in_process(engine, tokenizer=calling()) as client:
        answer = await client.post(path, json={"model": "fake", **fields})
        assert answer.status_code == 200, answer.text
    return engine.requests[-1].needs_each_event


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", {**CHAT, "max_tokens": 5}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
async def test_only_streams_are_read_early(path: str, fields: dict[str, Any]) -> None:
    assert not await needs_each_event(path, **fields)
    assert await needs_each_event(path, **fields, stream=True)


async def test_stop_strings_are_looked_for_early() -> None:
    assert await needs_each_event("/v1/completions", prompt="hi", stop=["."])
    assert not await needs_each_event("/v1/completions", prompt="hi", stop=[])


async def test_a_last_call_is_looked_for_early() -> None:
    tools = {"tools": [TOOL], "parallel_tool_calls": False}
    assert await needs_each_event("/v1/chat/completions", **CHAT, **tools)
    assert not await needs_each_event("/v1/chat/completions", **CHAT, tools=[TOOL])
