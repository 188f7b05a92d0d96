"""Structured output as the official client requests it, of a real engine with random weights."""

import re
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.conformance.served import MODEL, app_of, real_engine, served

HELLO: list[Any] = [{"role": "user", "content": "which?"}]


class Size(BaseModel, extra="forbid"):  # or any text could go on with another property
    is_big: bool
    unit: Literal["cm", "m"]


class Answer(BaseModel):
    """Every text of it is short."""

    kind: Literal["cat", "dog", "日本"]
    sizes: tuple[Size, Size]


COMPACT = {"disable_any_whitespace": True}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with served(app_of(real_engine())) as url, openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("seed", range(3))
def test_a_model_of_pydantic_is_parsed(client: openai.OpenAI, seed: int) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": HELLO, "response_format": Answer, "seed": seed}
    with client.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion().choices[0].message.parsed
    whole = client.chat.completions.parse(**fields)
    assert isinstance(whole.choices[0].message.parsed, Answer)
    assert streamed == whole.choices[0].message.parsed
    assert whole.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": r"[0-9]{3}-[a-f]{2}"}, r"[0-9]{3}-[a-f]{2}"),  # \d has other digits in every Unicode
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"json": Size.model_json_schema(), **COMPACT}, r'\{"is_big":(true|false),"unit":"(cm|m)"\}'),
        ({"grammar": 'root ::= "a" ("b" | "c") "d"'}, "a[bc]d"),
    ],
)
@pytest.mark.parametrize("speculative", [{"enabled": False}, {"trunk": 1, "branches": 2, "depth": 2, "verifier": "traversal"}])
def test_vllms_constraints_come_through_extra_body(
    client: openai.OpenAI, constraint: dict[str, Any], pattern: str, speculative: dict[str, Any]
) -> None:
    completion = client.completions.create(
        model=MODEL,
        prompt="which?",
        n=3,
        max_tokens=60,
        extra_body={"structured_outputs": constraint, "speculative": speculative},
    )
    assert all(re.fullmatch(pattern, choice.text) for choice in completion.choices), [one.text for one in completion.choices]


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}},
        {"type": "json_schema"},
        {"type": "yaml"},
    ],
)
def test_unsupported_format_is_a_bad_request(client: openai.OpenAI, response_format: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=HELLO, response_format=response_format)
    assert str(caught.value.param).startswith("response_format")
