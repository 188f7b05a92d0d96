"""Fields that constrain a completion by a grammar: the engine's request, refusals by name, and texts of a real engine."""

import asyncio
import json
import re
import threading
from typing import Any

import httpx
import pytest

from engine.core.config import SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.tree import Expansion
from engine.core.types import Grammar, GrammarKind
from engine.structured_output.grammars import CompiledGrammars
from engine.testing import tiny_engine, tiny_pair
from engine.worker.inprocess import InProcessEngine
from server.app import create_app
from server.grammar import process as grammar_process
from server.grammar.process import GrammarProcess
from server.settings import Settings
from tests.api.harness import MODEL, chat, completion, data_of, in_process, until
from tests.fake_engine import FakeEngine
from tests.model.grammars import tokenizer, vocabulary

JSON = {"content-type": "application/json"}

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "boolean"}}, "required": ["b", "a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": False}}
NAMED = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA, separators=(",", ":")))


def fake() -> FakeEngine:
    return FakeEngine(eos_token_ids=(0,))


async def post(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json=completion(max_tokens=3, **fields))


def refused(response: httpx.Response) -> tuple[str, str]:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


CONSTRAINTS: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Grammar(GrammarKind.JSON_OBJECT)),
    ({"response_format": FORMAT}, NAMED),
    ({"structured_outputs": {"json": SCHEMA}}, NAMED),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, NAMED),
    ({"structured_outputs": {"json_object": True}}, Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')),
    ({"structured_outputs": {"json": {}}}, Grammar(GrammarKind.JSON_SCHEMA, "{}")),
    ({"structured_outputs": {"json": "{}"}}, Grammar(GrammarKind.JSON_SCHEMA, "{}")),
    ({"structured_outputs": {"regex": "a+"}}, Grammar(GrammarKind.REGEX, "a+")),
    ({"structured_outputs": {"choice": ["yes", "né"]}}, Grammar(GrammarKind.CHOICE, '["yes","né"]')),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar(GrammarKind.LARK, 'start: "a"')),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar(GrammarKind.LARK, 'root ::= "a"')),
    ({"structured_outputs": {"regex": "a+"}, "response_format": {"type": "text"}}, Grammar(GrammarKind.REGEX, "a+")),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
        Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object","x-guidance":{"whitespace_flexible":false}}'),
    ),
    (
        {"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}},
        Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object","x-guidance":{"whitespace_pattern":" ?"}}'),
    ),
]


async def test_grammar_reaches_the_engine():
    engine = fake()
    async with in_process(engine) as client:
        for fields, grammar in CONSTRAINTS:
            assert (await post(client, n=2, **fields)).status_code == 200
            assert (await client.post("/v1/chat/completions", json=chat(**fields))).status_code == 200
            assert [request.sampling.grammar for request in engine.requests[-3:]] == [grammar] * 3


# The library takes twice as long for each more: it would be minutes.
ENDLESS = {"allOf": [{"type": "string", "pattern": f"a.*b{{{count}}}.*c"} for count in range(30)]}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "json_schema"),
    ({"response_format": {"type": "json_object", "json_schema": FORMAT["json_schema"]}}, "response_format.json_schema", ""),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type", ""),
    ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "structured_outputs", "response_format"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", "object"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "EOF"),
    ({"structured_outputs": {"json": '{"a":' * 300 + "1" + "}" * 300}}, "structured_outputs.json", "recursion limit"),
    ({"structured_outputs": {"json": '{"maximum": NaN}'}}, "structured_outputs.json", ""),
    ({"structured_outputs": {"json": json.dumps({"title": "a" * 70_000})}}, "structured_outputs.json", ""),
    (
        {"structured_outputs": {"json": {"x-guidance": 5}, "disable_any_whitespace": True}},
        "structured_outputs.json",
        "x-guidance",
    ),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", ""),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs", "whitespace_pattern"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
    ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs", ""),
    ({"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}, "structured_outputs", "uniqueItems"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
        "response_format",
        "not",
    ),
    ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex", ""),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "ignore_eos"),
    ({"response_format": {"type": "json_object"}, "min_tokens": 1}, "min_tokens", "min_tokens"),
    ({"response_format": {"type": "json_object"}, "allowed_token_ids": [5]}, "response_format", "no end token"),
    ({"guided_regex": "a"}, "guided_regex", ""),
    ({"structured_outputs": {"json": ENDLESS}}, "structured_outputs", "longer than"),
    ({"structured_outputs": {"regex": ")"}}, "structured_outputs", "unopened group"),
]


async def test_unsupported_constraints_are_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_process, "_DEADLINE_S", 2.0)
    engine = fake()
    async with in_process(engine) as client:
        for fields, param, reason in REFUSED:
            named, message = refused(await post(client, **fields))
            assert named.startswith(param), fields
            assert reason in message
            assert len(message) < 1100
    assert not engine.requests


async def test_grammar_without_end_token_is_refused():
    async with in_process(FakeEngine()) as client:
        assert refused(await post(client, response_format={"type": "json_object"}))[0] == "response_format"


async def test_grammar_check_leaves_event_loop_free(monkeypatch: pytest.MonkeyPatch):
    """Other requests are answered during the check of a grammar."""
    going = threading.Event()
    monkeypatch.setattr(GrammarProcess, "check", lambda *_: going.wait(30))
    async with in_process(fake()) as client:
        held = asyncio.create_task(post(client, structured_outputs={"regex": "a"}))
        assert (await post(client)).status_code == 200
        assert not held.done()
        going.set()
        assert (await held).status_code == 200


async def test_known_grammar_does_not_wait_for_others(monkeypatch: pytest.MonkeyPatch):
    """One client's schemas, each of which takes seconds to refuse, would hold up everybody else's."""
    going = threading.Event()
    monkeypatch.setattr(GrammarProcess, "check", lambda _, __, grammar: grammar.text == "a" or going.wait(30))
    async with in_process(fake()) as client:
        assert (await post(client, structured_outputs={"regex": "a"})).status_code == 200
        held = asyncio.create_task(post(client, structured_outputs={"regex": "b"}))
        assert (await post(client, structured_outputs={"regex": "a"})).status_code == 200
        assert not held.done()
        going.set()
        assert (await held).status_code == 200


# Texts of an engine.
def tiny_app() -> Any:
    limits = SchedulerConfig(num_slots=2048, max_model_len=256)

    def build() -> Any:
        return tiny_engine(
            *tiny_pair(noise=0.02), FixedExpansion(Expansion(2, 2, 2)), config=limits, grammars=CompiledGrammars(vocabulary)
        )

    return create_app(Settings(model=MODEL), InProcessEngine(build, limits), tokenizer())


CASES: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"regex": "[abc]{2,5}(,[abc12]{1,3}){0,2}"}}, "[abc]{2,5}(,[abc12]{1,3}){0,2}"),
    ({"structured_outputs": {"choice": ["abc", "true", "12"]}}, "abc|true|12"),
    (
        {"structured_outputs": {"json": {"enum": [1, "b", True, {"a": 2}]}, "disable_any_whitespace": True}},
        r'1|"b"|true|\{"a":2\}',
    ),
]


async def test_texts_match_streamed_or_not():
    app = tiny_app()
    async with app.router.lifespan_context(app):
        await until(lambda: app.state.runtime.is_ready)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for fields, pattern in CASES:
                body = {"model": MODEL, "prompt": "abc", "max_tokens": 60, "n": 3, "seed": 5, "temperature": 1.3, **fields}
                whole = (await client.post("/v1/completions", json=body)).json()
                texts = [choice["text"] for choice in whole["choices"]]
                assert {choice["finish_reason"] for choice in whole["choices"]} == {"stop"}
                assert all(re.fullmatch(pattern, text) for text in texts), texts
                chunks = data_of((await client.post("/v1/completions", json={**body, "stream": True})).text)
                streamed = [""] * 3
                for choice in (choice for chunk in chunks for choice in chunk["choices"]):
                    streamed[choice["index"]] += choice["text"]
                assert streamed == texts
                off = {**body, "speculative": {"enabled": False}}
                assert [one["text"] for one in (await client.post("/v1/completions", json=off)).json()["choices"]] == texts
            cut = {**body, "structured_outputs": {"regex": "a{3}b{3}c{3}"}, "stop": "bb", "n": 1}
            (choice,) = (await client.post("/v1/completions", json=cut)).json()["choices"]
            assert (choice["text"], choice["finish_reason"]) == ("aaa", "stop")
            short = {**cut, "max_tokens": 2, "stop": None}
            (choice,) = (await client.post("/v1/completions", json=short)).json()["choices"]
            assert choice["finish_reason"] == "length"
            assert "aaabbbccc".startswith(choice["text"])


BIG, FINE = "12345678901234567890", "0.1000000000000000055"
AT_ID = "#/properties/id/const: "


@pytest.mark.parametrize("number", [BIG, FINE, "1e400", "-1e-400", "1e99999999999999999999"])
async def test_numbers_of_schemas_are_not_rounded(number: str):
    """A number that floats round was rounded by the parser of the body, or by the grammar, and the text had the rounded one."""
    schema = f'{{"type":"object","properties":{{"id":{{"const":{number}}}}},"required":["id"],"additionalProperties":false}}'
    fields = {
        "response_format": f'{{"type":"json_schema","json_schema":{{"name":"x","schema":{schema}}}}}',
        "structured_outputs": f'{{"json":{schema}}}',
        "guided": f'{{"json":{json.dumps(schema)}}}',
        "lark": f'{{"grammar":{json.dumps(f"start: %json {schema}")}}}',
    }
    written = number.replace("1e", "1E+").replace("E+-", "E-").replace("9" * 20, "999999999")
    engine = fake()
    async with in_process(engine) as client:
        for name, field in fields.items():
            param = name if name == "response_format" else "structured_outputs"
            body = f'{json.dumps(completion(max_tokens=3))[:-1]},"{param}":{field}}}'
            named, message = refused(await client.post("/v1/completions", content=body, headers=JSON))
            assert (named, f"{AT_ID}{written}" in message) == (param, True), message
        assert (await post(client, structured_outputs={"json": json.loads(schema.replace(number, "0.1"))})).status_code == 200
    assert len(engine.requests) == 1


async def test_decimal_in_annotation_is_accepted():
    """Digits that only a description has change nothing."""
    body = f'{json.dumps(completion(max_tokens=3))[:-1]},"structured_outputs":{{"json":{{"default":{FINE},"type":"null"}}}}}}'
    async with in_process(fake()) as client:
        assert (await client.post("/v1/completions", content=body, headers=JSON)).status_code == 200
