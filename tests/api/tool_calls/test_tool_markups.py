"""Tool calls in each markup: found from the template, read, streamed, forced and strict by a grammar, from a tiny real model."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import httpx
import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from engine.core.config import SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.tree import Expansion
from engine.core.types import Grammar, GrammarKind
from engine.model.causal_lm import CausalModel
from engine.structured_output.grammars import CompiledGrammars, compiled, source_of
from engine.testing import tiny_engine, tiny_pair
from engine.worker.inprocess import InProcessEngine
from server.text.codec import TextCodec
from server.tool_calls.grammars import forced_calls, free_text_with_calls
from server.tool_calls.markup_reader import MarkupReader
from server.tool_calls.support import CallShape, tool_support
from server.tool_calls.syntaxes import SYNTAXES
from tests.api.harness import chat, data_of, in_process
from tests.api.tool_calls.test_tools import URL, streamed, without_ids
from tests.fake_engine import FakeEngine, emits
from tests.tool_templates import rendered_calls, template, tokenizer_of

V = 341  # tokens of the largest tokenizer
LIMITS = SchedulerConfig(num_slots=4096, max_model_len=1024)
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "place": {"enum": ["Oslo", 'a "b"\n日']},
            "days": {"type": "integer", "minimum": 1, "maximum": 20},
            "note": {"type": "string", "maxLength": 3},
            "at": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        "required": ["place", "days"],
        "additionalProperties": False,
    },
    "time": {"type": "object", "properties": {"zone": {"anyOf": [{"enum": ["C", "null"]}, {"type": "null"}]}}},
}
SCHEMAS["time"]["additionalProperties"] = False
TOOLS: list[Any] = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
STRICT = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("weather", {"place": "Oslo", "days": 3, "note": '"日\\n', "at": [True]}),
    ("time", {"zone": None}),
]
MARKUPS = list(SYNTAXES)
_BARE = ("llama3_json", "json")  # their calls have no beginning that text could not have
AT_START = [markup for markup, syntax in SYNTAXES.items() if syntax.forms[0].is_at_start]


@cache
def _pair() -> tuple[CausalModel, CausalModel]:
    return tiny_pair(noise=0.05, vocab_size=V)


@asynccontextmanager
async def _served(markup: str, has_tokens: bool) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a server whose model drafts by trees of two paths."""
    grammars = CompiledGrammars(source_of(tokenizer_of(markup, has_tokens), V, list(_pair()[0].eos_token_ids)).load)
    engine = InProcessEngine(
        lambda: tiny_engine(*_pair(), FixedExpansion(Expansion(1, 2, 2)), config=LIMITS, grammars=grammars), LIMITS
    )
    async with in_process(engine, tokenizer=tokenizer_of(markup, has_tokens)) as client:
        yield client


async def _choice(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(URL, json=chat(**{"tools": TOOLS, "max_tokens": 200, **fields}))
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice  # type: ignore[no-any-return]


def _checked_names(choice: dict[str, Any]) -> list[str]:
    """Check each call against its schema, except a call that the limit cut; return their names."""
    calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
    for call in calls if choice["finish_reason"] != "length" else calls[:-1]:
        jsonschema_rs.validate(SCHEMAS[call["name"]], json.loads(call["arguments"]))
    return [call["name"] for call in calls]


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("markup", MARKUPS)
def test_templates_show_their_markup(markup: str, has_tokens: bool):
    support = tool_support(TextCodec(tokenizer_of(markup, has_tokens)), "auto")
    assert support.syntax is SYNTAXES[markup]
    assert (support.shows_tools, support.shows_calls) == (True, True)
    assert support.marker_tokens.keys() == (set(SYNTAXES[markup].markers) if has_tokens else set())


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("markup", MARKUPS)
async def test_calls_are_read_whole_and_streamed(markup: str, has_tokens: bool):
    """Whether markers are special tokens, which are left out of other text, or text."""
    tokenizer = tokenizer_of(markup, has_tokens)
    ids = tokenizer.encode(rendered_calls(markup, CALLS) + "<|end|>")
    for chunks in ((1,), (3, 1, 5)):
        engine = FakeEngine(script=emits(ids), chunks=chunks, max_model_len=2000, eos_token_ids=(ids[-1],))
        async with in_process(engine, tokenizer=tokenizer) as client:
            choice = await _choice(client, max_tokens=1000)
            body = chat(tools=TOOLS, stream=True, max_tokens=1000)
            assert without_ids(streamed(data_of((await client.post(URL, json=body)).text))) == without_ids(choice)
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
        called = [call["function"] for call in choice["message"]["tool_calls"]]
        assert [(call["name"], json.loads(call["arguments"])) for call in called] == CALLS


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("markup", MARKUPS)
async def test_forced_calls_match_their_schemas(markup: str, has_tokens: bool):
    """With drafts and without, greedy and seeded, streamed and whole; one named function, or any."""
    named = {"type": "function", "function": {"name": "weather"}}
    async with _served(markup, has_tokens) as client:
        for distribution in ({"temperature": 0}, {"seed": 1, "temperature": 1.7}):
            choice = await _choice(client, tool_choice="required", **distribution)
            assert _checked_names(choice) or choice["finish_reason"] == "length"
            forced = await _choice(client, tool_choice=named, **distribution)
            assert (_checked_names(forced), forced["finish_reason"]) == (["weather"], "tool_calls")
            assert forced["message"]["content"] is None
            plain = await _choice(client, tool_choice=named, speculative={"enabled": False}, **distribution)
            assert without_ids(plain) == without_ids(forced)
            body = chat(tools=TOOLS, tool_choice=named, stream=True, max_tokens=200, **distribution)
            assert without_ids(streamed(data_of((await client.post(URL, json=body)).text))) == without_ids(forced)


@pytest.mark.parametrize("markup", [markup for markup in MARKUPS if markup not in _BARE])
async def test_strict_calls_match_their_schemas(markup: str):
    """The token that begins a call is made likely, since a random model would not write it."""
    tokenizer, opening = tokenizer_of(markup), SYNTAXES[markup].writing.begin or SYNTAXES[markup].writing.head
    marker = next((marker for marker in SYNTAXES[markup].markers if opening.startswith(f"«{marker}»")), None)
    (first, *_) = tokenizer.encode(marker or SYNTAXES[markup].opening)
    called = []
    async with _served(markup, True) as client:
        for seed in range(3):
            choice = await _choice(client, tools=STRICT, seed=seed, max_tokens=100, logit_bias={str(first): 9})
            called += _checked_names(choice)
    assert called


async def test_strict_calls_need_a_token():
    for markup in MARKUPS:
        async with in_process(
            FakeEngine(max_model_len=2000, eos_token_ids=(0,)), tokenizer=tokenizer_of(markup, False)
        ) as client:
            response = await client.post(URL, json=chat(tools=STRICT))
        assert (response.status_code == 400) == (markup not in AT_START), response.text


_UNFIT = [
    {"anyOf": [{"properties": {"x": {}}}]},
    {"properties": {"x": {}}, "minProperties": 1},
    {"properties": {"x": {"$ref": "#/properties/y"}, "y": {}}},
    {"properties": {"<x>": {}, "a b>": {}}},
    {"properties": {"x": False}, "required": ["x"]},
    {"properties": {"x": {"type": "string", "pattern": "(a"}}},
]


@pytest.mark.parametrize("schema", _UNFIT)
@pytest.mark.parametrize("markup", ["qwen3_coder", "pythonic"])
async def test_schemas_that_fields_cannot_keep_are_refused(markup: str, schema: dict[str, Any]):
    """Where calls must match; a model that is free to call is shown the schema."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    async with _served(markup, False) as client:
        response = await client.post(URL, json=chat(tools=tools, tool_choice="required"))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
        await _choice(client, tools=tools, max_tokens=2)


def test_grammars_of_fields_have_a_limit():
    """Each argument with a reference has a copy of the definitions: a function of 64 KiB had a grammar of 16 MiB."""
    schema = {"properties": {f"x{at}": {"$ref": "#/$defs/d"} for at in range(100)}, "$defs": {"d": {"description": "x" * 9000}}}
    for markup in ("qwen3_coder", "pythonic"):
        with pytest.raises(ValueError, match="too many arguments"):
            forced_calls(SYNTAXES[markup], {"f": schema}, True, {})
    assert forced_calls(SYNTAXES["hermes"], {"f": schema}, True, {})


_FIELDS = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "b": {"$ref": "#/$defs/b"},
        "c": {"type": "string", "pattern": "^x+$"},
        "d": {"type": "string", "minLength": 2},
        "e": {"enum": ["1", "x"]},
        "f": {"type": "number"},
        "g": {"enum": ['"q"', "x"]},
        "h": {"type": ["string", "null"]},
    },
    "required": ["b", "z"],
    "$defs": {
        "b": {"type": "object", "properties": {"k": {"type": "boolean"}}, "required": ["k"], "additionalProperties": False}
    },
    "additionalProperties": {"type": "null"},
}


@pytest.mark.parametrize(
    ("markup", "values", "is_kept"),
    [
        ("qwen3_coder", {"b": '{"k": true}', "z": "null"}, True),
        ("qwen3_coder", {"a": "", "b": '{"k": true}', "z": "null"}, True),
        (
            "qwen3_coder",
            {"a": "\n<tool_call>", "b": '{"k": true}', "c": '"xx"', "d": "12", "e": "1", "f": "-1.5e3", "z": "null"},
            True,
        ),
        ("qwen3_coder", {"b": '{"k": true}', "e": '"x"', "z": "null"}, False),
        ("qwen3_coder", {"b": '{"k": true}', "g": '"\\"q\\""', "z": "null"}, True),  # raw, it would be read without its quotes
        ("qwen3_coder", {"b": '{"k": true}', "g": '"q"', "z": "null"}, False),
        ("qwen3_coder", {"b": '{"k": true}', "h": '"x"', "z": "null"}, True),
        ("qwen3_coder", {"b": '{"k": 1}', "z": "null"}, False),
        ("qwen3_coder", {"b": '{"k": true}'}, False),
        ("qwen3_coder", {"b": '{"k": true}', "d": "1", "z": "null"}, False),
        ("qwen3_coder", {"b": '{"k": true}', "c": "xx", "z": "null"}, False),
        ("qwen3_coder", {"a": "</parameter>", "b": '{"k": true}', "z": "null"}, False),
        ("qwen3_coder", {"b": '{"k": true}', "f": "1" * 25, "z": "null"}, False),
        ("qwen3_coder", {"b": '{"k": true}', "y": "1", "z": "null"}, False),
        ("pythonic", {"b": '{"k": true}', "z": "null"}, True),
        ("pythonic", {"a": '"x"', "b": '{"k": true}', "c": '"xx"', "z": "null"}, True),
        ("pythonic", {"a": "'x'", "b": '{"k": true}', "z": "null"}, False),
        ("pythonic", {"z": "null", "b": '{"k": true}'}, False),
    ],
)
def test_grammars_of_fields(markup: str, values: dict[str, str], is_kept: bool):
    """Optional fields may be left out anywhere, and what the grammar accepts is read as arguments that match."""
    tokenizer = tokenizer_of(markup, False)
    text = forced_calls(SYNTAXES[markup], {"f": _FIELDS}, True, {})
    vocabulary = source_of(tokenizer, V, [tokenizer.eos_token_id]).load()
    matcher = compiled(vocabulary, Grammar(GrammarKind.LARK, text, None))
    if markup == "pythonic":
        call = f"[f({', '.join(f'{key}={value}' for key, value in values.items())})]"
    else:
        fields = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        call = f"<tool_call>\n<function=f>\n{fields}</function>\n</tool_call>"
    ids = tokenizer.encode(call)
    assert (matcher.validate_tokens(ids) == len(ids)) == is_kept
    if is_kept:
        reader = MarkupReader(SYNTAXES[markup].forced_forms, {"f": _FIELDS}, 1)
        read = reader.feed(call)
        jsonschema_rs.validate(_FIELDS, json.loads("".join(piece.arguments for piece in read.calls)))
        assert (read.content, reader.is_done) == ("", True)


_STRICT_SCHEMAS: dict[str, dict[str, Any]] = {
    name: {"type": "object", "properties": {key: {"type": "integer"}}, "required": [key], "additionalProperties": False}
    for name, key in (("f", "x"), ("g", "y"))
}
_OBJECTS = [
    f'{{"name": "{name}", "{word}": {{"{key}": {value}}}}}'
    for name, key, value, word in [
        *(("f", "x", 1, "arguments"), ("f", "x", 2, "parameters"), ("g", "y", 3, "arguments")),
        *(("f", "y", 1, "arguments"), ("g", "x", 3, "arguments"), ("h", "x", 1, "arguments")),
    ]
]
_PIECES = [
    *_OBJECTS,
    *_OBJECTS,
    *("```json\n", "\n```", "```", "[", "]", ", ", "; ", "\n", " ", "}", "{", "hello", '"', '{"name": "f"', "<|"),
]


@cache
def _strict_matcher(markup: str, mutation: tuple[str, str] = ("", "")) -> LLMatcher:
    tokenizer = tokenizer_of(markup)
    support = tool_support(TextCodec(tokenizer), "auto")
    text = free_text_with_calls(SYNTAXES[markup], _STRICT_SCHEMAS, support.marker_tokens)
    assert mutation[0] in text
    vocabulary = source_of(tokenizer, V, [tokenizer.eos_token_id]).load()
    return compiled(vocabulary, Grammar(GrammarKind.LARK, text.replace(*mutation), None))


def _accepted_calls(
    markup: str, text: str, mutation: tuple[str, str] = ("", ""), is_spelled: bool = False
) -> list[list[str]] | None:
    """Return names and arguments of the calls that are read from a text that the strict grammar accepts, else None.

    With `is_spelled` its markers are not tokens.
    """
    ids = tokenizer_of(markup).encode(text, split_special_tokens=is_spelled)
    matcher = _strict_matcher(markup, mutation).deep_copy()
    if not matcher.consume_tokens(ids) or not matcher.is_accepting():
        return None
    reader = MarkupReader(SYNTAXES[markup].strict_forms, _STRICT_SCHEMAS)
    calls: list[list[str]] = []
    for piece in (*reader.feed(text).calls, *reader.close().calls):
        calls += [[piece.name, ""]] if piece.name else []
        calls[-1][1] += piece.arguments
    return calls


def _check_strict(markup: str, num_examples: int, mutation: tuple[str, str] = ("", "")) -> None:
    natives = [rendered_calls(markup, [(name, {key: 1})]) for name in "fg" for key in "xy"]
    natives += [f"{native}\n```json\n{_OBJECTS[0]}" for native in natives]

    @settings(max_examples=num_examples, report_multiple_bugs=False)
    @given(st.lists(st.sampled_from([*_PIECES, *natives]), max_size=6).map("".join), st.booleans())
    def accepted_calls_match(text: str, is_spelled: bool) -> None:
        for name, arguments in _accepted_calls(markup, text, mutation, is_spelled) or ():
            jsonschema_rs.validate(_STRICT_SCHEMAS[name], json.loads(arguments))

    accepted_calls_match()


@pytest.mark.parametrize("markup", MARKUPS)
def test_strict_grammars_hold_every_call(markup: str):
    """In the markup and as JSON without it, which models write instead."""
    _check_strict(markup, 100)


_MUTATIONS = [
    *((" | first", ""), (" | more", ""), ("start: TEXT (calls any)? | fenced", "start: TEXT (calls any)?")),
    *(("fenced_text[suffix=FENCE]: TEXT", "fenced_text[suffix=FENCE]: /(?s:.*)/"), ("TEXT: /(?s:.*)/ & ~", "TEXT: /(?s:.*)/ | ")),
    ('"required": ["x"], "additionalProperties": false', '"required": ["x"]'),
]


@pytest.mark.parametrize("mutation", _MUTATIONS)
def test_grammars_that_let_calls_through_fail(mutation: tuple[str, str]):
    with pytest.raises((AssertionError, jsonschema_rs.ValidationError)):
        _check_strict("hermes", 1000, mutation)


@pytest.mark.parametrize("markup", MARKUPS)
def test_strict_grammars_accept_written_calls(markup: str):
    """The bug: strict functions, as openai-agents sends them, left Qwen2.5-Coder's fenced calls without a reader."""
    fenced, (call, _, other, *_), unknown = "```json\n{}\n```", _OBJECTS, _OBJECTS[5]
    texts = {
        **{"hello": 0, "So:\n" + fenced.format(call) + "\nDone.": 1, fenced.format(call + "\n" + other): 2},
        **{call: 1, f"{{{call}}}": 1, f"[{call}, {other}]": 2, fenced.format(call) + "\n" + fenced.format(other): 2},
        **{fenced.format(unknown): 0, unknown: 0, fenced.format('{"a": 1}'): 0, f"See {call}": 0},
    }
    if markup != "mistral":  # its template adds ids, which the model does not write
        texts[rendered_calls(markup, [("f", {"x": 1}), ("g", {"y": 1})])] = 2
    found = {text: _accepted_calls(markup, text) for text in texts}
    assert {text: None if calls is None else len(calls) for text, calls in found.items()} == texts


def test_strict_grammars_take_the_most_tools():
    schemas = {f"the_function_number_{at}": SCHEMAS["weather"] for at in range(128)}
    tokenizer = tokenizer_of("hermes")
    text = free_text_with_calls(SYNTAXES["hermes"], schemas, {"<tool_call>": 336, "</tool_call>": 337})
    matcher = compiled(source_of(tokenizer, V, [tokenizer.eos_token_id]).load(), Grammar(GrammarKind.LARK, text, None))
    call = '{"name": "the_function_number_77", "arguments": {"place": "Oslo", "days": 3}}'
    for token_id in tokenizer.encode(f"So:\n```json\n{call}\n```"):
        matcher.compute_bitmask()
        assert matcher.consume_token(token_id)


def test_earlier_calls_take_the_templates_shape():
    """Mistral's templates refused the ids of the server's own calls, and DeepSeek's the arguments, so a second turn was a 400."""
    call = {"id": "call_0123456789", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": "y"})
    for markup in MARKUPS:
        codec = TextCodec(tokenizer_of(markup))
        shape = tool_support(codec, "auto").shape
        _, called, result = shape.shaped(messages)
        assert (shape == CallShape()) == (markup not in ("mistral", "deepseek_v31"))
        assert called["tool_calls"][0]["id"] == result["tool_call_id"]
        assert any(written in codec.rendered([called]) for written in ('"x": 1', "x=1", "=x>\n1"))


async def test_second_turns_are_accepted():
    for markup in MARKUPS:
        engine = FakeEngine(script=emits([1, 2]), max_model_len=2000)
        async with in_process(engine, tokenizer=tokenizer_of(markup)) as client:
            call = {"id": "call_0123456789", "type": "function", "function": {"name": "time", "arguments": "{}"}}
            turns: list[dict[str, Any]] = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
            turns.append({"role": "tool", "tool_call_id": call["id"], "content": "y"})
            await _choice(client, messages=turns)


@pytest.mark.parametrize("markup", MARKUPS)
async def test_the_setting_names_each_markup(markup: str, monkeypatch: pytest.MonkeyPatch):
    """A template without calls has no markup for them."""
    tokenizer = tokenizer_of(markup)
    monkeypatch.setattr(tokenizer, "chat_template", template(markup).replace("m.tool_calls %}", "false %}"))
    ids = tokenizer.encode(rendered_calls(markup, CALLS) + "<|end|>")
    engine = FakeEngine(script=emits(ids), max_model_len=2000, eos_token_ids=(ids[-1],))
    async with in_process(engine, tokenizer=tokenizer, tool_call_parser=markup) as client:
        choice = await _choice(client, max_tokens=1000)
    assert len(choice["message"]["tool_calls"]) == len(CALLS)
