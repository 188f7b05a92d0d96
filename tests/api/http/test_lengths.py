"""Every string of a request has a length, but for the texts that its body bounds."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from engine.core.sampling_limits import MAX_GRAMMAR_CHARS
from server.schemas.strict_model import MAX_DESCRIPTION_CHARS, MAX_NAME_CHARS
from server.schemas.tools import MAX_SCHEMA_BYTES
from tests.api.harness import chat, completion, in_process
from tests.api.http.test_document import MODELS
from tests.fake_engine import FakeEngine

# What is tokenized, or parsed by a grammar with limits of its own: refused by its bytes before either.
TEXTS = {
    "text",
    "content",
    "reasoning",
    "reasoning_content",
    "prompt",
    "input",
    "instructions",
    "system",
    "arguments",
    "output",
    "regex",
    "grammar",
    "json",
    "choice",
    "whitespace_pattern",
    "suffix",
    "input_prefix",
    "input_suffix",
    *("thinking", "signature", "data"),  # left out of the prompt
}


def unbounded(schema: Any, at: str, definitions: dict[str, Any], seen: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield the field of each string of a JSON schema that has no bound."""
    if not isinstance(schema, dict):
        return
    if (reference := schema.get("$ref")) is not None:
        if reference not in seen:
            yield from unbounded(definitions[reference.rpartition("/")[2]], at, definitions, seen | {reference})
        return
    if schema.get("type") == "string" and not schema.keys() & {"maxLength", "pattern", "enum", "const"}:
        yield at
    for name, inner in schema.get("properties", {}).items():
        yield from unbounded(inner, name, definitions, seen)
    for inner in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), schema.get("items"), schema.get("additionalProperties")):
        yield from unbounded(inner, at, definitions, seen)


@pytest.mark.parametrize("model", MODELS)
def test_every_name_in_a_request_is_bounded(model: type[BaseModel]):
    """The bug: `user`, `model` and descriptions could be as long as the body."""
    schema = model.model_json_schema()
    assert set(unbounded(schema, "", schema.get("$defs", {}))) <= TEXTS


def test_an_unbounded_name_is_detected():
    class Request(BaseModel):
        user: list[str] | None = None

    assert list(unbounded(Request.model_json_schema(), "", {})) == ["user"]


def _tool(description: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    function = {"name": "f", "description": description, "parameters": parameters}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "none"}


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}}


LONG = "x" * (MAX_NAME_CHARS + 1)
SHORT = LONG[1:]
REQUESTS = [
    (completion(user=SHORT), 200, None),
    (completion(user=LONG), 400, "user"),
    (completion() | {"model": SHORT}, 404, "model"),
    (completion() | {"model": LONG}, 400, "model"),
    (chat(**_tool("x" * MAX_DESCRIPTION_CHARS)), 200, None),
    (chat(**_tool("x" * (MAX_DESCRIPTION_CHARS + 1))), 400, "tools.0.function.description"),
    (chat(**_tool("x", {"description": "x" * (MAX_SCHEMA_BYTES // 2)})), 200, None),
    (chat(**_tool("x", {"description": "x" * MAX_SCHEMA_BYTES})), 400, "tools.0.function.parameters"),
    (chat(metadata={"a": LONG}), 400, "metadata.a"),
    (chat(metadata={LONG: "a"}), 400, None),
]


@pytest.mark.parametrize(("body", "status", "param"), REQUESTS)
async def test_names_that_are_too_long_are_refused(body: dict[str, Any], status: int, param: str | None):
    async with in_process(FakeEngine()) as client:
        answer = await client.post("/v1/chat/completions" if "messages" in body else "/v1/completions", json=body)
    assert answer.status_code == status
    assert param is None or answer.json()["error"]["param"] == param


@pytest.mark.parametrize("schema", [{"description": LONG * 64}, {"properties": {"a": {"description": LONG * 64}}}])
async def test_schema_texts_count_towards_its_length(schema: dict[str, Any]):
    async with in_process(FakeEngine()) as client:
        answer = await client.post("/v1/chat/completions", json=chat(**_format(schema)))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
    assert f"is longer than {MAX_GRAMMAR_CHARS}" in answer.json()["error"]["message"]
