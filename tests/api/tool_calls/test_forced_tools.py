"""Calls that must come, or match their schemas if they come, of a tiny real model that drafts trees."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import httpx
import jsonschema_rs
import pytest

from engine.core.config import SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.tree import Expansion
from engine.model.causal_lm import CausalModel
from engine.structured_output.grammars import CompiledGrammars, source_of
from engine.structured_output.json_bounds import MAX_DIGITS
from engine.testing import tiny_engine, tiny_pair
from engine.worker.inprocess import InProcessEngine
from server.schemas.chat import ChatRequest
from server.tool_calls.request_tools import tool_use
from server.tool_calls.support import ToolSupport
from server.tool_calls.syntaxes import SYNTAXES
from tests.api.harness import chat, data_of, in_process
from tests.api.tool_calls.test_tools import URL, streamed, without_ids
from tests.tokenizers_for_tests import calling

JSON = {"content-type": "application/json"}

V = 402  # tokens of `calling` with markup of its own
LIMITS = SchedulerConfig(num_slots=4096, max_model_len=1024)
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 20}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": SCHEMA,
    "time": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
STRICT = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL_TOKEN = calling(False).convert_tokens_to_ids("<tool_call>")


@cache
def _pair() -> tuple[CausalModel, CausalModel]:
    return tiny_pair(noise=0.05, vocab_size=V)


@asynccontextmanager
async def _served(special: bool | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a server whose model drafts by trees of two paths."""
    ends = list(_pair()[0].eos_token_ids)
    grammars = CompiledGrammars(source_of(calling(special), V, ends).load)
    engine = InProcessEngine(
        lambda: tiny_engine(*_pair(), FixedExpansion(Expansion(1, 2, 2)), config=LIMITS, grammars=grammars), LIMITS
    )
    async with in_process(engine, tokenizer=calling(special)) as client:
        yield client


async def _choice(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(URL, json=chat(**{"tools": TOOLS, "max_tokens": 100, **fields}))
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice  # type: ignore[no-any-return]


def _check_calls(choice: dict[str, Any]) -> list[str]:
    """Hold every call to its schema, but one that a limit broke off; return their names."""
    calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
    for call in calls if choice["finish_reason"] != "length" else calls[:-1]:
        jsonschema_rs.validate(SCHEMAS[call["name"]], json.loads(call["arguments"]))
        assert json.dumps(json.loads(call["arguments"])) == call["arguments"]
    return [call["name"] for call in calls]


@pytest.mark.parametrize("special", [None, False, True])
async def test_calls_that_must_come_match_their_schemas(special: bool | None):
    """Whether the markup is text, tokens, or special tokens; greedy and seeded; streamed, drafted for or not."""
    names: list[str] = []
    async with _served(special) as client:
        for distribution in ({"temperature": 0}, {"seed": 1, "temperature": 1.7}):
            choice = await _choice(client, tool_choice="required", **distribution)
            found = _check_calls(choice)
            assert found or choice["finish_reason"] == "length"
            if found:
                assert choice["message"]["content"] is None
            names += found
            named = await _choice(client, tool_choice=NAMED, **distribution)
            assert (_check_calls(named), named["finish_reason"]) == (["weather"], "tool_calls")
            plain = await _choice(client, tool_choice=NAMED, speculative={"enabled": False}, **distribution)
            assert without_ids(plain) == without_ids(named)
            body = chat(tools=TOOLS, tool_choice="required", stream=True, max_tokens=100, **distribution)
            assert without_ids(streamed(data_of((await client.post(URL, json=body)).text))) == without_ids(choice)
    assert names


async def test_single_call_without_parallel_calls():
    async with _served(False) as client:
        for seed in range(2):
            choice = await _choice(client, tool_choice="required", parallel_tool_calls=False, seed=seed)
            assert (len(_check_calls(choice)), choice["finish_reason"]) == (1, "tool_calls")


async def test_strict_functions_constrain_only_their_calls():
    """The token that opens a call is made likely, since a random model would not emit it."""
    async with _served(False) as client:
        choice = await _choice(client, tools=STRICT, seed=1, max_tokens=60, logit_bias={str(CALL_TOKEN): 8})
    assert _check_calls(choice)
    assert choice["message"]["content"]


async def test_unsupported_schema_is_refused_only_when_forced():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"not": {"type": "string"}}}}}}]
    async with _served(False) as client:
        response = await client.post(URL, json=chat(tools=tools, tool_choice="required"))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
        assert "not" in response.json()["error"]["message"]
        await _choice(client, tools=tools, max_tokens=2)
        for field, value in [("ignore_eos", True), ("min_tokens", 3)]:
            response = await client.post(URL, json=chat(tools=TOOLS, tool_choice="required", **{field: value}))
            assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        response = await client.post(URL, json=chat(tools=TOOLS, structured_outputs={"regex": "a"}))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "structured_outputs")


ANSWER = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}


@pytest.mark.parametrize("special", [None, False, True])
@pytest.mark.parametrize("tools", [TOOLS, STRICT])
async def test_answers_have_their_format_beside_tools(special: bool | None, tools: list[Any]):
    """The bug: a format beside tools was refused, as agents send it. The opening of a call is made likely, then impossible."""
    opening = calling(special).encode("<tool_call>")[0]
    async with _served(special) as client:
        for bias in (100, -100):
            fields = {"response_format": FORMAT, "logit_bias": {str(opening): bias}, "parallel_tool_calls": False}
            choice = await _choice(client, tools=tools, **fields, seed=1, max_tokens=200)
            called = [call["function"]["name"] for call in choice["message"].get("tool_calls", [])]
            if bias > 0:
                assert (len(called), choice["message"]["content"]) == (1, None)
                assert tools is TOOLS or _check_calls(choice)
            else:
                jsonschema_rs.validate(ANSWER, json.loads(choice["message"]["content"]))
                assert called == []
        anything = await _choice(client, tools=tools, **{**fields, "response_format": {"type": "json_object"}}, max_tokens=300)
        assert anything["finish_reason"] == "length" or isinstance(json.loads(anything["message"]["content"]), dict)
        forced = await _choice(client, tools=tools, tool_choice=NAMED, response_format=FORMAT, temperature=0)
        assert (_check_calls(forced), forced["message"]["content"]) == (["weather"], None)


async def test_unsupported_format_is_refused_beside_tools():
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"type": "string"}}}}
    async with _served(False) as client:
        for choice in ("auto", "required"):
            response = await client.post(URL, json=chat(tools=TOOLS, tool_choice=choice, response_format=wrong))
            assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")


@pytest.mark.parametrize("choice_of_tools", ["required", {"type": "function", "function": {"name": "f"}}])
async def test_numbers_of_forced_calls_end(choice_of_tools: Any):
    """A model that likes digits best wrote one number until the token limit, and the call had no end."""
    parameters = {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    biases = {**dict.fromkeys("0123456789", 50), **dict.fromkeys("eE", -50)}  # a large exponent is no number of Python's
    bias = {str(calling(False).convert_tokens_to_ids(char)): value for char, value in biases.items()}
    async with _served(False) as client:
        fields: dict[str, Any] = {"tool_choice": choice_of_tools, "parallel_tool_calls": False, "logit_bias": bias}
        choice = await _choice(client, tools=tools, max_tokens=200, seed=3, **fields)
    assert choice["finish_reason"] == "tool_calls"
    arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    jsonschema_rs.validate(parameters, json.loads(arguments))
    assert max(map(len, re.findall("[0-9]+", arguments))) == MAX_DIGITS


def test_json_is_known_where_calls_may_come():
    """Digits of free text are not counted, those of strict calls are."""
    body = ChatRequest.model_validate(chat(tools=STRICT))
    use = tool_use(ToolSupport(True, True, SYNTAXES["hermes"], {"<tool_call>": 400, "</tool_call>": 401}), body)
    assert use.grammar is not None
    assert use.grammar.json_marks == ("<tool_call>", "</tool_call>")
    spelled = tool_use(ToolSupport(True, True, SYNTAXES["hermes"], {"<tool_call>": 400}), body)
    assert spelled.grammar is not None
    assert spelled.grammar.json_marks is None


@pytest.mark.parametrize("number", ["12345678901234567890", "0.1000000000000000055"])
async def test_numbers_of_arguments_are_not_rounded(number: str):
    """Arguments of forced calls were held to a rounded number; where the model is free the schema is only shown."""
    parameters = f'{{"type":"object","properties":{{"id":{{"enum":[[{number}]]}}}}}}'
    tools = f'"tools":[{{"type":"function","function":{{"name":"f","parameters":{parameters}}}}}]'
    async with _served(False) as client:
        forced = f"{json.dumps(chat(tool_choice='required'))[:-1]},{tools}}}"
        response = await client.post(URL, content=forced, headers=JSON)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
        assert f"#/properties/id/enum/0/0: {number}" in response.json()["error"]["message"]
        free = f"{json.dumps(chat(max_tokens=2))[:-1]},{tools}}}"
        assert (await client.post(URL, content=free, headers=JSON)).status_code == 200
