"""The effect of each request field on the engine, or its 400, found by requests to an app over a recording engine."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from typing import Any

import httpx

from engine.core.types import Request, RequestDefaults, SamplingParams
from server.schemas.chat import ChatRequest
from server.schemas.common import GenerationRequest
from server.schemas.completion import CompletionRequest
from tests.api.harness import chat, completion, in_process
from tests.fake_engine import FakeEngine, emits
from tests.tokenizers_for_tests import calling

# A value of every field that is not in each request anyway; a list: several.
EXAMPLES: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "typical_p": 0.9,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"7": 1.0},
    "allowed_token_ids": [7, 8],
    "bad_words": ["the"],
    "seed": 3,
    "n": 2,
    "best_of": 2,
    "max_tokens": 9,
    "max_completion_tokens": 9,
    "min_tokens": 1,
    "stop": "x",
    "stop_token_ids": [9],
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "add_special_tokens": False,
    "add_generation_prompt": False,
    "continue_final_message": False,
    "truncate_prompt_tokens": 1,
    "logprobs": {"text": 2, "chat": True},
    "top_logprobs": 2,
    "prompt_logprobs": 1,
    "echo": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "speculative": {"verifier": "specinfer"},
    "prediction": {"type": "content", "content": "hello"},
    "user": "u",
    "cache_salt": "s",
    "priority": 1,
    "request_id": "r",
    "timeout_s": 30.0,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "suffix": "s",
    "parallel_tool_calls": True,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a+"},
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"k": 1},
    "reasoning_effort": "low",
    "include_reasoning": False,
    "separate_reasoning": False,
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "service_tier": "flex",
    "store": True,
    "metadata": {"k": "v"},
    "verbosity": "low",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
}
_TOOLS = [{"type": "function", "function": {"name": "f"}}]
BESIDE: dict[str, dict[str, Any]] = {  # what a field needs to be valid
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": _TOOLS},
    "function_call": {"functions": [{"name": "f"}]},
}
OTHERS: list[tuple[str, dict[str, Any]]] = [  # what else to send, by endpoint; the first field is the line's
    ("text", {"max_tokens": 0, "echo": True, "logprobs": 1}),
    ("text", {"max_tokens": 0}),
    ("chat", {"max_tokens": 0}),
    ("text", {"min_tokens": 1, "stop": "x"}),
    ("chat", {"min_tokens": 1, "stop": "x"}),
]
EVERYWHERE = {"model", "prompt", "messages"}
_ENDPOINTS: dict[str, tuple[str, type[GenerationRequest], Callable[..., dict[str, Any]]]] = {
    "text": ("/v1/completions", CompletionRequest, completion),
    "chat": ("/v1/chat/completions", ChatRequest, chat),
}


def wire_rows() -> tuple[list[str], list[list[str]]]:
    """Return the head and the lines of the table."""
    return ["field", "of", "value", "what becomes of it"], asyncio.run(_rows())


DEFAULTS: dict[str, tuple[str, float | int]] = {  # keys of generation_config.json: the parameter that each sets, and a value
    "temperature": ("temperature", 0.7),
    "top_p": ("top_p", 0.8),
    "top_k": ("top_k", 20),
    "min_p": ("min_p", 0.05),
    "repetition_penalty": ("repetition_penalty", 1.1),
    "max_new_tokens": ("max_tokens", 9),
}


def default_rows() -> tuple[list[str], list[list[str]]]:
    """Return the head and the lines of the table of what a model's generation settings change."""
    head = ["generation_config.json", "of", "left open", "null", "the API's own default, named"]
    return head, asyncio.run(_default_rows())


async def _default_rows() -> list[list[str]]:
    of_api = asdict(SamplingParams())
    rows = []
    for key, (name, value) in DEFAULTS.items():
        engine = FakeEngine(defaults=RequestDefaults(**{name: value}))  # type: ignore[arg-type]
        async with in_process(engine) as client:
            for path, _, make in _ENDPOINTS.values():
                for given in ({}, {name: None}, {name: of_api[name]}):
                    assert (await client.post(path, json=make(**given))).status_code == 200
        effects = [f"`{name}` {getattr(request.sampling, name)}" for request in engine.requests]
        assert effects[:3] == effects[3:], "both endpoints treat them alike"
        rows.append([f"`{key}: {value}`", ", ".join(_ENDPOINTS), *effects[:3]])
    return rows


async def _rows() -> list[list[str]]:
    rows: dict[tuple[str, str], dict[str, str]] = {}
    async with in_process(
        engine := FakeEngine(emits(calling().encode("hello there")), eos_token_ids=(0,)), tokenizer=calling()
    ) as client:
        for form, name in _fields():
            value = EXAMPLES[name]
            value = value[form] if isinstance(value, dict) and form in value else value
            rows.setdefault((name, json.dumps(value)), {})[form] = await _fate(client, engine, form, {name: value})
        for form, given in OTHERS:
            (name, value), *beside = given.items()
            shown = ", ".join([json.dumps(value), *(f'"{other}": {json.dumps(one)}' for other, one in beside)])
            rows.setdefault((name, shown), {})[form] = await _fate(client, engine, form, given)
    return [
        [f"`{name}`", ", ".join(forms), f"`{value}`", fate]
        for (name, value), by_form in rows.items()
        for fate, forms in _grouped(by_form).items()
    ]


def _fields() -> Iterator[tuple[str, str]]:
    for form, (_, model, _) in _ENDPOINTS.items():
        yield from ((form, name) for name in model.model_fields if name not in EVERYWHERE)


def _grouped(by_form: dict[str, str]) -> dict[str, list[str]]:
    """Return the endpoints of each fate."""
    grouped: dict[str, list[str]] = {}
    for form, fate in by_form.items():
        grouped.setdefault(fate, []).append(form)
    return grouped


async def _fate(client: httpx.AsyncClient, engine: FakeEngine, form: str, given: dict[str, Any]) -> str:
    """Send a request with and without the field and return what it changed."""
    path, _, make = _ENDPOINTS[form]
    name = next(iter(given))
    engine.requests.clear()
    body = make(seed=1, **BESIDE.get(name, {}))
    answers = [await client.post(path, json=one) for one in (body, {**body, **given})]
    if answers[1].status_code != 200:
        assert answers[1].json()["error"]["param"], answers[1].text
        return f"{answers[1].status_code}: {answers[1].json()['error']['message']}"
    first, *sent = engine.requests
    changes = dict.fromkeys(change for request in sent for change in _changes(first, request))
    many = f"{len(sent)} requests to the engine; " if len(sent) > 1 else ""
    return many + (", ".join(f"`{change}`" for change in changes) or "nothing in the engine")


def _changes(before: Request, after: Request) -> Iterator[str]:
    """Return the fields of the engine's records in which two requests differ."""
    for record in ("sampling", "speculation"):
        one, other = getattr(before, record), getattr(after, record)
        yield from (field.name for field in fields(one) if getattr(one, field.name) != getattr(other, field.name))
    names = ("prompt_ids", "prediction_ids", "cache_salt", "priority")
    yield from (name for name in names if getattr(before, name) != getattr(after, name))
