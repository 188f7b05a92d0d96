"""POST /v1/fim/completions: Mistral's fields, the prompt of `suffix`, the answer of a chat."""

from typing import Any

import httpx
import pytest

from tests.api.generation.test_infill import MIDDLE, PAD, QWEN, engine_of, infill_of
from tests.api.harness import MODEL, data_of, in_process
from tests.fake_engine import FakeEngine, emits
from tests.tokenizers_for_tests import byte_level

URL = "/v1/fim/completions"
TEXT = " the quick 日本語"


def fim(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hello", "suffix": " world", **fields}


async def answer_of(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post(URL, json=fim(**fields))
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_an_answer_is_that_of_a_chat():
    async with in_process(engine := engine_of(), tokenizer=QWEN) as client:
        answer = await answer_of(client)
    assert engine.requests[0].prompt_ids == infill_of().prompt("hello", " world")
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert (choice["index"], choice["finish_reason"]) == (0, "stop")
    assert answer["usage"]["completion_tokens"] == len(MIDDLE) + 1


@pytest.mark.parametrize("chunks", [(1,), (2, 5), (100,)])
@pytest.mark.parametrize("fields", [{}, {"stop": "quick"}, {"max_tokens": 3}, {"suffix": None}, {"suffix": ""}], ids=str)
async def test_a_stream_adds_up_to_the_whole(chunks: tuple[int, ...], fields: dict[str, Any]):
    """Mistral's streams end with the counts, which clients do not request."""
    async with in_process(engine_of(chunks=chunks), tokenizer=QWEN) as client:
        whole = await answer_of(client, **fields)
        stream = await client.post(URL, json=fim(**fields, stream=True))
    *parts, last = data_of(stream.text)
    choices = [chunk["choices"][0] for chunk in parts]
    assert {chunk["object"] for chunk in (*parts, last)} == {"chat.completion.chunk"}
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == whole["choices"][0]["message"]["content"]
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert (last["choices"], last["usage"]) == ([], whole["usage"])


FIELDS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 9},
    {"temperature": 0.5, "top_p": 0.9, "random_seed": 7, "max_tokens": 9, "min_tokens": 2},
    {"presence_penalty": 1.0, "frequency_penalty": -1.0, "stop": ["a", "b"], "max_tokens": 9},
    {"suffix": None, "max_tokens": 9, "speculative": {"enabled": False}, "cache_salt": "x"},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
async def test_engine_requests_equal_those_of_a_suffix(fields: dict[str, Any]):
    same = {("seed" if name == "random_seed" else name): value for name, value in fields.items()}
    async with in_process(engine := engine_of(), tokenizer=QWEN) as client:
        await answer_of(client, **fields)
        assert (await client.post("/v1/completions", json=fim(**same))).status_code == 200
    one, two = engine.requests
    assert (one.prompt_ids, one.sampling, one.speculation) == (two.prompt_ids, two.sampling, two.speculation)
    assert one.cache_salt == two.cache_salt


async def test_a_text_may_fill_the_room():
    async with in_process(engine := engine_of(max_model_len=500), tokenizer=QWEN) as client:
        await answer_of(client)
    assert engine.requests[0].sampling.max_tokens == 500 - len(engine.requests[0].prompt_ids)


CONTINUE: dict[str, Any] = {  # the body of Continue's adapter for `openai`
    "prompt": "def add(a, b):\n    return ",
    "suffix": "\n\nprint(add(1, 2))\n",
    "max_tokens": 40,
    "temperature": 0.01,
    "top_p": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "stop": ["<|endoftext|>", "<|fim_prefix|>", "/src/", "```"],
    "stream": True,
}


async def test_continues_body_is_answered():
    async with in_process(engine := engine_of(), tokenizer=QWEN) as client:
        answer = await client.post(URL, json=fim(**CONTINUE))
    assert "x-ignored-parameters" not in answer.headers
    chunks = [chunk["choices"][0] for chunk in data_of(answer.text) if chunk["choices"]]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == TEXT
    assert engine.requests[0].prompt_ids == infill_of().prompt(CONTINUE["prompt"], CONTINUE["suffix"])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ["a"]}, "prompt"),
    ({"prompt": [5, 6]}, "prompt"),
    ({"suffix": 5}, "suffix"),
    ({"suffix": ["x"]}, "suffix"),
    ({"prompt": "x" * 100_000}, "prompt"),
    ({"suffix": "hello " * 300}, "prompt"),
    ({"prompt": "", "suffix": None}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"random_seed": 1.5}, "random_seed"),
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"stop": [""]}, "stop.0"),
    ({"stop": ["x"] * 99}, "stop"),
    ({"speculative": {"trace": True}, "stream": True}, "speculative.trace"),
    ({"seed": 1}, "seed"),
    ({"n": 2}, "n"),
    ({"echo": True}, "echo"),
    ({"logprobs": 1}, "logprobs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"model": "other"}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:40])
async def test_wrong_fields_are_refused_by_name(fields: dict[str, Any], param: str):
    async with in_process(engine := engine_of(), tokenizer=QWEN) as client:
        answer = await client.post(URL, json=fim(**fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (404 if param == "model" else 400, param), answer.text
    assert engine.requests == []


async def test_other_models_refuse_a_suffix():
    """They continue a prompt without one, as Mistral's do."""
    async with in_process(engine := FakeEngine(script=emits(byte_level().encode("hello")))) as client:
        error = (await client.post(URL, json=fim())).json()["error"]
        assert (error["param"], "fill-in-the-middle" in error["message"]) == ("suffix", True)
        assert (await answer_of(client, suffix=None, max_tokens=2))["choices"][0]["finish_reason"] == "length"
    assert len(engine.requests) == 1


async def test_a_middle_ends_at_the_familys_tokens():
    async with in_process(engine_of(), tokenizer=QWEN) as client:
        (choice,) = (await answer_of(client, max_tokens=40))["choices"]
        assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == (TEXT, "stop", None)
    assert PAD in infill_of().end_ids
