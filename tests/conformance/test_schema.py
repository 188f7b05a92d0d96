"""/openapi.json holds: requests made up from it, right and wrong, get declared statuses and shapes, never a 5xx."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.openapi.checks import JsonSchemaError, UndefinedStatusCode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.conformance.served import MODEL, PATIENCE_S, app_of, served
from tests.fake_engine import FakeEngine, emits
from tests.tokenizers_for_tests import byte_level, infilling

MESSAGES = ["/v1/messages", "/v1/messages/count_tokens"]
POSTS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    *MESSAGES,
    "/infill",
    "/v1/fim/completions",
    "/tokenize",
    "/detokenize",
]
GETS = [
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/input_items",
    "/v1/models",
    "/v1/models/{model_id}",
    "/live",
    "/ready",
    "/health",
    "/load",
    "/metrics",
    "/version",
    "/tokenizer_info",
]
TOO_LARGE = 413
ERRORS_OF_A_BODY = {"400", "401", "403", "404", "413", "415", "429", "431", "500", "503"}
# Fields with conditions that a schema cannot express, such as the number of tokens of a model.
_FITTING = {
    *(
        "response_format",
        "structured_outputs",
        "speculative",
        "stream_options",
        "truncate_prompt_tokens",
        "best_of",
        "suffix",
        "min_tokens",
    ),
    *(
        "text",
        "include",
        "reasoning",
        "previous_response_id",
        "tools",
        "tool_choice",
        "top_logprobs",
        "logit_bias",
        "allowed_token_ids",
        "stop_token_ids",
        "prompt_logprobs",
    ),
    *("functions", "function_call", "chat_template_kwargs", "reasoning_effort"),
    *("add_generation_prompt", "continue_final_message"),
    *("output_config", "thread"),
}
_PLAIN = {"prompt": "hello", "input": "hello", "messages": [{"role": "user", "content": "hello"}]}
_SHAPES = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def app() -> Any:
    """Return a server that refuses fields that its document does not have."""
    engine = FakeEngine(script=emits(byte_level().encode("hello 日本語 😀")), chunks=(1, 3), vocab_size=500)
    return app_of(engine, infilling("qwen"), strict=True)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(app()) as address:
        yield address


@pytest.fixture(scope="module")
def document(url: str) -> dict[str, Any]:
    return httpx.get(url + "/openapi.json", timeout=PATIENCE_S).json()  # type: ignore[no-any-return]


def check(url: str, document: dict[str, Any], path: str, method: str, mode: GenerationMode, num_examples: int) -> list[int]:
    """Send made-up requests to one operation; return the statuses that came. Raises what schemathesis finds."""
    operation = schemathesis.openapi.from_dict(document)[path][method]
    statuses: list[int] = []
    is_wrong = mode is GenerationMode.NEGATIVE

    @settings(max_examples=num_examples, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy(generation_mode=mode))
    def holds(case: Case[Any]) -> None:
        if isinstance(case.body, dict) and not is_wrong:
            if path == "/tokenize" and case.body.get("messages") is None:
                case.body["prompt"] = (
                    case.body.get("prompt") or "hello"
                )  # one of the two is needed, which a schema cannot express
            _mend(case.body, is_plain=len(statuses) % 2 == 0)
        response = case.call(base_url=url)
        statuses.append(response.status_code)
        if not _is_stream(response):  # of wrong bodies, some are too large to be read: the check does not know that status
            must_refuse = is_wrong and response.status_code != TOO_LARGE
            case.validate_response(response, checks=[*_SHAPES, negative_data_rejection] if must_refuse else _SHAPES)

    holds()
    return statuses


def _mend(body: dict[str, Any], is_plain: bool) -> None:
    """Give a body what a schema cannot express: the one model name, one text to encode; if plain, no fields that must fit."""
    if is_plain:
        for name in _FITTING & {*body}:
            del body[name]
        body.update({name: value for name, value in _PLAIN.items() if body.get(name) is not None})
    body.update({name: _with_integers(value) for name, value in body.items()})
    if body.get("model") is not None:
        body["model"] = MODEL
    if body.get("prompt") is not None:
        body.pop("messages", None)
    body.pop("timeout_s", None)  # a limit of no time at all is a 504


def _with_integers(value: Any) -> Any:
    """Return a value whose whole numbers are integers: to JSON Schema 1.0 is one, to this server it is not."""
    if isinstance(value, dict):
        return {name: _with_integers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_stream(response: Any) -> bool:
    return bool(response.headers.get("content-type", [""])[0].startswith("text/event-stream"))


@pytest.mark.parametrize("path", POSTS)
def test_allowed_requests_are_answered_per_schema(url: str, document: Any, path: str, conformance_examples: int) -> None:
    statuses = check(url, document, path, "POST", GenerationMode.POSITIVE, conformance_examples)
    assert 200 in statuses


@pytest.mark.parametrize("path", POSTS)
def test_forbidden_requests_are_refused_per_schema(url: str, document: Any, path: str, conformance_examples: int) -> None:
    statuses = check(url, document, path, "POST", GenerationMode.NEGATIVE, conformance_examples)
    assert set(statuses) <= {400, 404, TOO_LARGE}


@pytest.mark.parametrize("path", GETS)
def test_reads_are_answered_per_schema(url: str, document: Any, path: str) -> None:
    check(url, document, path, "GET", GenerationMode.POSITIVE, 3)


def test_deletions_are_answered_per_schema(url: str, document: Any) -> None:
    check(url, document, "/v1/responses/{response_id}", "DELETE", GenerationMode.POSITIVE, 3)


def test_every_error_is_declared(document: Any) -> None:
    """Statuses by name, not by a `default` that would declare anything."""
    for path in POSTS:
        expected = {"529" if status == "503" and path in MESSAGES else status for status in ERRORS_OF_A_BODY}
        assert set(document["paths"][path]["post"]["responses"]) >= expected, path
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            bodies = [answer for status, answer in operation["responses"].items() if status.isdecimal() and int(status) >= 400]
            assert all("$ref" in one["content"]["application/json"]["schema"] for one in bodies), (method, path)
            assert path in ("/live", "/health") or "401" in operation["responses"], (method, path)


def test_an_undeclared_status_is_detected(url: str, document: Any) -> None:
    spoilt = json.loads(json.dumps(document))
    for status in ("400", "default"):
        spoilt["paths"]["/detokenize"]["post"]["responses"].pop(status)
    with pytest.raises(FailureGroup) as caught:
        check(url, spoilt, "/detokenize", "POST", GenerationMode.NEGATIVE, 5)
    assert isinstance(caught.value.exceptions[0], UndefinedStatusCode)


def test_an_answer_of_another_shape_is_detected(url: str, document: Any) -> None:
    spoilt = json.loads(json.dumps(document))
    spoilt["components"]["schemas"]["DetokenizeAnswer"]["properties"]["prompt"] = {"type": "integer"}
    with pytest.raises(FailureGroup) as caught:
        check(url, spoilt, "/detokenize", "POST", GenerationMode.POSITIVE, 10)
    assert isinstance(caught.value.exceptions[0], JsonSchemaError)
