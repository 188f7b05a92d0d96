"""Grammars of models that reason: they begin behind the block, in texts of a tiny real model that drafts trees."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import httpx
import jsonschema_rs
import numpy as np
import pytest

from engine.core.config import SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.tree import Expansion
from engine.core.types import FreeBlock, Grammar, GrammarKind
from engine.model.causal_lm import CausalModel
from engine.structured_output.grammars import BadGrammar, CompiledGrammars, compiled, source_of
from engine.structured_output.json_bounds import MAX_DIGITS
from engine.structured_output.number_lengths import NumberLimit, TokenDigits
from engine.testing import tiny_engine, tiny_pair
from engine.worker.inprocess import InProcessEngine
from server.grammar.process import GrammarProcess
from tests.api.harness import chat, data_of, in_process
from tests.api.tool_calls.test_forced_tools import NAMED, SCHEMA, SCHEMAS, STRICT, TOOLS
from tests.api.tool_calls.test_reasoning import URL, streamed
from tests.fake_engine import FakeEngine
from tests.tokenizers_for_tests import thinking

V = len(thinking())
LIMITS = SchedulerConfig(num_slots=4096, max_model_len=1024)
OPEN_TOKEN, CLOSE_TOKEN, CALL_TOKEN = (thinking().convert_tokens_to_ids(text) for text in ("<think>", "</think>", "<tool_call>"))
ENDS_SOON = {str(CLOSE_TOKEN): 6}  # a random model would reason until the limit
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
BLOCKS = {
    "qwen3": FreeBlock("<think>", "</think>"),
    "smollm3": FreeBlock("<think>", "</think>"),
    "deepseek": FreeBlock(None, "</think>"),
}
REGEX = Grammar(GrammarKind.REGEX, "a+")


@cache
def _pair() -> tuple[CausalModel, CausalModel]:
    return tiny_pair(noise=0.05, vocab_size=V)


@asynccontextmanager
async def _served(kind: str, special: bool = False) -> AsyncIterator[httpx.AsyncClient]:
    tokenizer = thinking(kind, special)
    grammars = CompiledGrammars(source_of(tokenizer, V, list(_pair()[0].eos_token_ids)).load)
    engine = InProcessEngine(
        lambda: tiny_engine(*_pair(), FixedExpansion(Expansion(1, 2, 2)), config=LIMITS, grammars=grammars), LIMITS
    )
    async with in_process(engine, tokenizer=tokenizer) as client:
        yield client


async def _choice(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    body = chat(**{"max_tokens": 200, "logit_bias": ENDS_SOON, "return_token_ids": True, **fields})
    response = await client.post(URL, json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "special"), [("deepseek", False), ("deepseek", True), ("qwen3", False)])
async def test_json_begins_behind_the_block(kind: str, special: bool):
    """Greedy and seeded, streamed, drafted for or not. The JSON was in the reasoning, and the content was empty."""
    bias = {**ENDS_SOON, str(OPEN_TOKEN): 20}
    async with _served(kind, special) as client:
        for distribution in ({"temperature": 0}, {"seed": 1}, {"seed": 2, "temperature": 1.5}):
            fields = {"response_format": FORMAT, "logit_bias": bias, **distribution}
            choice = await _choice(client, **fields)
            assert choice["finish_reason"] == "stop"
            jsonschema_rs.validate(SCHEMA, json.loads(choice["message"]["content"]))
            assert choice["token_ids"].count(CLOSE_TOKEN) == 1
            plain = await _choice(client, speculative={"enabled": False}, **fields)
            assert plain == choice
            body = chat(stream=True, max_tokens=200, return_token_ids=True, **fields)
            parts = streamed(data_of((await client.post(URL, json=body)).text))
            assert parts["ids"] == choice["token_ids"]
            assert parts["message"]["content"] == choice["message"]["content"]
            assert parts["message"].get("reasoning") == choice["message"].get("reasoning")


async def test_a_model_may_leave_the_block_out():
    async with _served("qwen3") as client:
        choice = await _choice(client, response_format=FORMAT, logit_bias={str(OPEN_TOKEN): -100}, seed=3)
    assert "reasoning" not in choice["message"]
    jsonschema_rs.validate(SCHEMA, json.loads(choice["message"]["content"]))


KINDS_OF_GRAMMARS: list[tuple[dict[str, Any], str]] = [
    ({"regex": r"\n?[ab]{2,4}/x"}, r"\n?[ab]{2,4}/x"),  # a line break of the text itself is no part of the markup
    ({"regex": "\n\n\n a"}, "\n\n\n a"),
    ({"choice": ["\nyes", "no", " né"]}, "\nyes|no| né"),
    ({"grammar": 'start: "x" start | "y"'}, "x*y"),  # its rules have the names of the outer grammar's
    ({"grammar": "start: FREE\nFREE: /[ab]{3}/"}, "[ab]{3}"),
    ({"grammar": 'root ::= "a" root | "b"'}, "a*b"),
    ({"grammar": 'start: "n=" %json {"enum": [1, 2]}'}, "n=[12]"),
    ({"json": {"enum": [1, "b", {"a": 2}]}, "disable_any_whitespace": True}, r'1|"b"|\{"a":2\}'),
]


async def test_every_grammar_begins_behind_the_block():
    bias = {**ENDS_SOON, **dict.fromkeys(map(str, thinking().encode("xa", add_special_tokens=False)), -3)}  # recursion ends
    async with _served("deepseek") as client:
        for grammar, pattern in KINDS_OF_GRAMMARS:
            choice = await _choice(client, structured_outputs=grammar, seed=4, logit_bias=bias)
            assert (re.fullmatch(pattern, choice["message"]["content"]) is not None, choice["finish_reason"]) == (True, "stop"), (
                choice
            )


async def test_forced_calls_begin_behind_the_block():
    async with _served("deepseek") as client:
        choice = await _choice(client, tools=TOOLS, tool_choice=NAMED, seed=1)
        (call,) = choice["message"]["tool_calls"]
        jsonschema_rs.validate(SCHEMAS["weather"], json.loads(call["function"]["arguments"]))
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
        bias = {**ENDS_SOON, str(CALL_TOKEN): 8}
        strict = await _choice(client, tools=STRICT, seed=1, logit_bias=bias, max_tokens=300)
        calls = [one["function"] for one in strict["message"].get("tool_calls", [])]
        for one in calls if strict["finish_reason"] != "length" else calls[:-1]:
            jsonschema_rs.validate(SCHEMAS[one["name"]], json.loads(one["arguments"]))


async def test_numbers_end_behind_a_block_too():
    """Digits of reasoning are not counted."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
    digits = dict.fromkeys(map(str, thinking().convert_tokens_to_ids([*"0123456789"])), 30)
    for kind, more in (("deepseek", {str(CLOSE_TOKEN): 29}), ("qwen3", {str(OPEN_TOKEN): -100})):
        async with _served(kind) as client:
            fields = {"structured_outputs": {"json": schema}, "logit_bias": {**digits, **more}, "max_tokens": 300}
            choice = await _choice(client, seed=5, temperature=2, **fields)
        number = str(json.loads(choice["message"]["content"])["n"]).lstrip("-")
        assert len(number) == MAX_DIGITS, choice


async def test_splitting_changes_no_token():
    """The ids of a seed are the same with the reasoning split off, left out, left in, and by a server that knows none."""
    found = []
    for kind, fields in (("qwen3", {"logit_bias": {**ENDS_SOON, str(OPEN_TOKEN): 20}}), ("deepseek", {})):
        async with _served(kind) as client:
            for switch in ({}, {"include_reasoning": False}, {"separate_reasoning": False}):
                for distribution in ({"temperature": 0}, {"seed": 7}, {"seed": 8, "temperature": 1.6}):
                    choice = await _choice(client, max_tokens=60, **fields, **distribution, **switch)
                    found.append((kind, str(distribution), tuple(choice["token_ids"])))
    assert len(set(found)) == 6
    assert len(found) == 18


async def test_reasoning_block_reaches_the_engine():
    engine = FakeEngine(max_model_len=900, vocab_size=V, eos_token_ids=(0,))
    fields = {"structured_outputs": {"regex": "a+"}}
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    cases: list[tuple[str, bool | None, dict[str, Any], Grammar]] = [
        *((kind, False, {}, replace(REGEX, block=block)) for kind, block in BLOCKS.items()),
        ("qwen3", False, off, REGEX),
        ("smollm3", True, off, REGEX),
        ("qwen3", None, {}, REGEX),  # its markers are no tokens: it does not reason
        ("qwen3", False, {"separate_reasoning": False}, REGEX),
        ("deepseek", False, {"include_reasoning": False}, replace(REGEX, block=BLOCKS["deepseek"])),
    ]
    for kind, special, more, grammar in cases:
        async with in_process(engine, tokenizer=thinking(kind, special)) as client:
            assert (await client.post(URL, json=chat(**fields, **more))).status_code == 200
        assert engine.requests[-1].sampling.grammar == grammar, (kind, special, more)


async def test_a_constraint_is_never_dropped():
    """Where a grammar can begin nowhere it is refused."""
    engine = FakeEngine(max_model_len=900, vocab_size=V, eos_token_ids=(0,))
    forced = {"tools": TOOLS, "tool_choice": "required"}
    for fields, param in (({"structured_outputs": {"regex": "a+"}}, "structured_outputs"), (forced, "tools")):
        async with in_process(engine, tokenizer=thinking("deepseek", None)) as client:
            response = await client.post(URL, json=chat(**fields))
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
            assert "no single token" in response.json()["error"]["message"]
        async with in_process(engine, tokenizer=thinking("deepseek")) as client:
            response = await client.post(URL, json=chat(**fields, separate_reasoning=False))
            assert (response.status_code, response.json()["error"]["param"]) == (400, "separate_reasoning")
    assert not engine.requests


async def test_a_constrained_text_is_not_split():
    """A grammar of the whole text may spell the markers."""
    text = "<think>a</think>b"
    ids = thinking("qwen3", None).encode(text)
    engine = FakeEngine(script=lambda _: ids, max_model_len=900, vocab_size=V, eos_token_ids=(0,))
    async with in_process(engine, tokenizer=thinking("qwen3", None)) as client:
        response = await client.post(URL, json=chat(structured_outputs={"regex": ".*"}, max_tokens=len(ids)))
    assert response.json()["choices"][0]["message"]["content"] == text


def test_bad_grammars_are_refused_behind_blocks():
    vocabulary = source_of(thinking(), V, [0]).load()
    for grammar in (
        Grammar(GrammarKind.REGEX, "("),
        Grammar(GrammarKind.LARK, "start: ("),
        Grammar(GrammarKind.JSON_SCHEMA, '{"not": {}}'),
    ):
        for block in (None, *BLOCKS.values()):
            with pytest.raises(BadGrammar):
                compiled(vocabulary, replace(grammar, block=block))


def test_a_block_cannot_spell_its_end():
    """A reader of the text would find another end than the grammar."""
    matcher = compiled(source_of(thinking(), V, [0]).load(), replace(REGEX, block=BLOCKS["deepseek"]))
    spelled = thinking().convert_tokens_to_ids([*"</think>"])
    assert matcher.try_consume_tokens(spelled) == len(spelled) - 1


def test_digits_are_counted_outside_the_block():
    vocabulary = source_of(thinking(), V, [0]).load()
    all_W = np.full((V + 31) // 32, -1, dtype=np.int32)
    (five,) = thinking().encode("5")

    def may_go_on(text: str, block: FreeBlock | None, kind: GrammarKind = GrammarKind.JSON_OBJECT) -> bool:
        limit = NumberLimit(TokenDigits(vocabulary), Grammar(kind, "", None, block), 3)
        limit.move_to(thinking().encode(text))
        return bool(limit.restricted(all_W, ())[five // 32] >> five % 32 & 1)

    for block in (BLOCKS["qwen3"], None):
        assert may_go_on("55", block)
        assert not may_go_on("555", block)
    assert may_go_on("555", BLOCKS["deepseek"])
    assert may_go_on("<think>555", BLOCKS["qwen3"])
    assert may_go_on("5</think>55", BLOCKS["deepseek"])
    for text, block in (("5</think>555", BLOCKS["deepseek"]), ("<think>5</think>555", BLOCKS["qwen3"])):
        assert not may_go_on(text, block)


async def test_a_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch):
    """It was compiled without its block first, then with it; and a format beside calls was compiled by itself first."""
    tried: list[Grammar] = []
    monkeypatch.setattr(GrammarProcess, "check", lambda _process, _source, grammar: tried.append(grammar))
    cases: list[dict[str, Any]] = [
        {"response_format": FORMAT},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "response_format": FORMAT},
    ]
    for fields in cases:
        engine = FakeEngine(max_model_len=900, vocab_size=V, eos_token_ids=(0,))
        async with in_process(engine, tokenizer=thinking("deepseek")) as client:
            assert (await client.post(URL, json=chat(**fields))).status_code == 200
        assert tried == [engine.requests[0].sampling.grammar]
        assert tried.pop().block is not None


@pytest.mark.parametrize("kind", ["qwen3", "deepseek"])
async def test_bad_grammars_are_named_behind_blocks(kind: str):
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"type": "string"}}}}
    function: dict[str, Any] = {"name": "f", "parameters": {"properties": {"x": {"not": {"type": "string"}}}}}
    tools = [{"type": "function", "function": function}]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"response_format": wrong}, "response_format"),
        ({"tools": tools, "tool_choice": "required"}, "tools"),
        ({"tools": TOOLS, "response_format": wrong}, "response_format"),
        (
            {"tools": [{"type": "function", "function": {**function, "strict": True}}], "response_format": FORMAT},
            "tools",
        ),
    ]
    async with in_process(FakeEngine(max_model_len=900, vocab_size=V, eos_token_ids=(0,)), tokenizer=thinking(kind)) as client:
        for fields, param in cases:
            response = await client.post(URL, json=chat(**fields))
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), fields
            assert "not" in response.json()["error"]["message"]
