"""POST /infill: llama.cpp's fields and answers, so that editors which use its server are answered unchanged."""

import asyncio
import itertools
import json
import re
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.types import RequestDefaults
from server.generation.line_limits import LineLimits
from tests.api.generation.test_infill import MIDDLE, PAD, QWEN, engine_of, infill_of
from tests.api.harness import MODEL, in_process, until
from tests.fake_engine import FakeEngine, emits
from tests.tokenizers_for_tests import infilling

URL = "/infill"
TEXT = " the quick 日本語"
FILES = [{"filename": "a.py", "text": "hello", "time": [1, 2]}, {"text": "the"}]
LLAMA_VIM = {  # as llama.vim sends it when the cursor rests
    "input_prefix": "hello\n",
    "input_suffix": ")\nthe\n",
    "input_extra": FILES,
    "prompt": "    print(",
    "n_predict": 128,
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 60_000,
    "response_fields": [
        *("content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms", "timings/prompt_per_second"),
        *("timings/predicted_n", "timings/predicted_ms", "timings/predicted_per_token_ms", "timings/predicted_per_second"),
        *("truncated", "tokens_cached"),
    ],
}
LLAMA_VIM_AHEAD = {  # as it sends other files before they are needed
    **{"input_prefix": "", "input_suffix": "", "input_extra": FILES, "prompt": "", "n_predict": 0, "temperature": 0.0},
    **{"stream": False, "samplers": [], "cache_prompt": True, "t_max_prompt_ms": 1, "t_max_predict_ms": 1},
    "response_fields": [""],
}
LLAMA_VSCODE = {
    **{"input_prefix": "hello\n", "input_suffix": ")\n", "input_extra": [], "prompt": "print(", "n_predict": 128},
    **{"top_k": 40, "top_p": 0.99, "stream": False, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True},
    **{"t_max_prompt_ms": 500, "t_max_predict_ms": 60_000},
}


def body_of(**fields: Any) -> dict[str, Any]:
    return {"input_prefix": "hello", "input_suffix": " world", **fields}


async def filled(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post(URL, json=body_of(**fields))
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_an_answer_has_llama_cpps_shape():
    async with in_process(engine := engine_of(num_cached_tokens=3), tokenizer=QWEN) as client:
        answer = await filled(client, prompt="!", n_predict=40, temperature=0.5, stop=["zzz"])
    prompt, is_cut = infill_of().prompt_of_files("hello!", " world", [], 256)
    assert (engine.requests[0].prompt_ids, is_cut) == (prompt, False)
    timings = answer.pop("timings")
    assert (timings["prompt_n"], timings["predicted_n"]) == (len(prompt) - 3, len(MIDDLE) + 1)
    assert all(value >= 0 for value in timings.values())
    assert answer == {
        **{"index": 0, "content": TEXT, "tokens": [], "id_slot": -1, "stop": True, "model": MODEL},
        **{"tokens_predicted": len(MIDDLE) + 1, "tokens_evaluated": len(prompt), "tokens_cached": 3, "truncated": False},
        **{"has_new_line": False, "prompt": QWEN.decode(prompt), "stop_type": "eos", "stopping_word": ""},
        "generation_settings": {"n_predict": 40, "temperature": 0.5, "stop": ["zzz"]},
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("eos", "", TEXT)),
        ({"n_predict": 2}, ("limit", "", QWEN.decode(MIDDLE[:2]))),
        ({"n_predict": 0}, ("limit", "", "")),
        ({"n_predict": -1}, ("eos", "", TEXT)),
        ({"n_predict": 2**31 - 1}, ("eos", "", TEXT)),
        ({"stop": ["quick"]}, ("word", "quick", " the ")),
        ({"stop": "quick"}, ("word", "quick", " the ")),
        ({"stop": []}, ("eos", "", TEXT)),
    ],
    ids=str,
)
async def test_each_end_has_its_type(fields: dict[str, Any], expected: tuple[str, str, str]):
    async with in_process(engine_of(), tokenizer=QWEN) as client:
        answer = await filled(client, **fields)
    assert (answer["stop_type"], answer["stopping_word"], answer["content"]) == expected


@pytest.mark.parametrize("chunks", [(1,), (2, 5), (100,)])
@pytest.mark.parametrize(
    "options", [{}, {"return_tokens": True}, {"stop": ["quick"]}, {"n_predict": 0}, {"n_predict": 3}], ids=str
)
async def test_a_stream_adds_up_to_the_whole(chunks: tuple[int, ...], options: dict[str, Any]):
    async with in_process(engine_of(chunks=chunks), tokenizer=QWEN) as client:
        whole = await filled(client, **options)
        response = await client.post(URL, json=body_of(stream=True, **options))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = response.text.removesuffix("\n\n").split("\n\n")
    *parts, last = [json.loads(event.removeprefix("data: ")) for event in events]
    assert all(part["stop"] is False and set(part) == set(PART) for part in parts)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert [part["tokens_predicted"] for part in parts] == sorted(part["tokens_predicted"] for part in parts)
    assert {**whole, "content": "", "tokens": [], "timings": None} == {**last, "timings": None}


PART = ("index", "content", "tokens", "stop", "id_slot", "tokens_predicted", "tokens_evaluated")


@pytest.mark.parametrize("body", [LLAMA_VIM, LLAMA_VIM_AHEAD, LLAMA_VSCODE], ids=["llama.vim", "llama.vim ahead", "llama.vscode"])
async def test_the_bodies_of_editors_are_answered(body: dict[str, Any]):
    async with in_process(engine := engine_of(max_model_len=1024), tokenizer=QWEN) as client:
        response = await client.post(URL, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-ignored-parameters"] == "samplers, t_max_prompt_ms"
    answer, (request,) = response.json(), engine.requests
    files = [(file.get("filename", "tmp"), file["text"]) for file in body["input_extra"]]
    prefix = body["input_prefix"] + body["prompt"]
    assert request.prompt_ids == infill_of().prompt_of_files(prefix, body["input_suffix"], files, 1024)[0]
    assert request.sampling.max_tokens == body["n_predict"]
    if body["n_predict"]:
        assert (request.sampling.top_k, request.sampling.top_p, answer["content"]) == (40, 0.99, TEXT)
    if "response_fields" in body:
        assert set(answer) == {*body["response_fields"]} - {""}


async def test_missing_response_fields_are_left_out():
    async with in_process(engine_of(), tokenizer=QWEN) as client:
        answer = await filled(client, response_fields=["content", "timings", "zzz", "content/x", "timings/zzz", "stop/", ""])
    assert list(answer) == ["content", "timings"]


async def test_missing_fields_use_model_defaults():
    defaults = RequestDefaults(temperature=0.7, top_p=0.8, top_k=20, max_tokens=9)
    async with in_process(engine := engine_of(defaults=defaults), tokenizer=QWEN) as client:
        for fields in ({}, {"seed": -1}, {"n_predict": None, "seed": 7, "temperature": 0, "min_p": 0.5}):
            await filled(client, **fields)
    first, second, third = (request.sampling for request in engine.requests)
    assert (first.temperature, first.top_p, first.top_k, first.max_tokens, first.seed) == (0.7, 0.8, 20, 9, None)
    assert second == first
    assert (third.temperature, third.min_p, third.seed, third.max_tokens) == (0.0, 0.5, 7, 9)


async def test_a_long_text_is_cut_to_fit():
    """Editors send as much as they have. A prompt that is too long was a 400."""
    long = {"input_prefix": "hello " * 200, "input_suffix": "the " * 200, "input_extra": FILES}
    async with in_process(engine := engine_of(), tokenizer=QWEN) as client:
        cut = await filled(client, **long, n_predict=50)
        free = await filled(client, **long)
        assert (await filled(client))["truncated"] is False
    assert (cut["truncated"], cut["tokens_evaluated"], len(engine.requests[0].prompt_ids)) == (True, 206, 206)
    assert (free["truncated"], engine.requests[1].sampling.max_tokens) == (True, 1 + 255 // 4)
    assert engine.requests[0].prompt_ids[-1] == QWEN.convert_tokens_to_ids("<|fim_middle|>")


@pytest.mark.parametrize(
    ("num_indent", "text", "expected"),
    [
        (4, "a)\n    b\n  c\n    d", "a)\n    b\n  "),
        (4, "a)\n    b\n\n    c", "a)\n    b\n"),
        (4, "    a\nb", "    a\n"),
        (2, "a\n\t\tb\n\tc", "a\n\t\tb\n\t"),
        (4, "no line", "no line"),
        (0, "a\nb\n\nc", "a\nb\n\nc"),
    ],
)
@pytest.mark.parametrize("chunks", [(1,), (3,), (100,)])
async def test_a_line_of_less_indent_ends_it(num_indent: int, text: str, expected: str, chunks: tuple[int, ...]):
    ids = QWEN.encode(text)
    async with in_process(engine := engine_of(script=emits([*ids, PAD]), chunks=chunks), tokenizer=QWEN) as client:
        answer = await filled(client, n_indent=num_indent)
    assert (answer["content"], answer["has_new_line"]) == (expected, "\n" in expected)
    assert answer["stop_type"] == ("eos" if expected == text else "limit")
    assert engine.living == {}


async def test_a_late_line_is_the_last(monkeypatch: pytest.MonkeyPatch):
    """Seconds are counted from the first text: one for each event."""
    ids = QWEN.encode("a\nb\nc\nd")
    assert len(ids) == 7
    async with in_process(engine_of(script=emits([*ids, PAD]), chunks=(1,)), tokenizer=QWEN) as client:
        for t_max_predict_ms, expected in (
            (60_000, "a\nb\nc\nd"),
            (0, "a\nb\nc\nd"),
            (2500, "a\nb\n"),
            (500, "a\n"),
            (-1, "a\nb\nc\nd"),
        ):
            monkeypatch.setattr(LineLimits.__init__, "__defaults__", (0, 0.0, itertools.count().__next__))
            answer = await filled(client, t_max_predict_ms=t_max_predict_ms)
            assert (answer["content"], answer["stop_type"]) == (expected, "eos" if expected.endswith("d") else "limit")


@given(st.text(alphabet=" \t\nab", max_size=30), st.integers(0, 4), st.lists(st.integers(0, 30), max_size=4))
def test_cuts_of_a_text_change_nothing(text: str, num_indent: int, cuts: list[int]):
    def read(*pieces: str) -> tuple[str, bool]:
        limits = LineLimits(num_indent)
        return "".join(limits.feed(piece).content for piece in pieces), limits.is_done

    at = [0, *sorted(cuts), len(text)]
    assert read(*(text[start:end] for start, end in pairwise(at))) == read(text)
    kept, is_done = read(text)
    short = [
        line
        for line in re.findall("(?<=\n)[ \t]*[^ \t]", text)  # the indentation of each line but the first, and a character
        if len(line) - 1 < num_indent
    ]
    assert (is_done, kept == text) == (bool(short), not short)


WRONG: dict[str, list[Any]] = {
    "input_prefix": [None, 5, ["x"], [1, 2]],
    "input_suffix": [None, 5, ["x"], [1, 2]],
    "prompt": [5, [1], ["x"]],
    "input_extra": [{}, "x", [1], [{}], [{"text": 5}], [{"text": "x", "filename": 1}]],
    "n_predict": [-2, 1.5, "1", 51, 2**31],
    "temperature": [-0.1, 2.1, "1"],
    "top_k": [-2, 0.5],
    "top_p": [0, 1.1],
    "seed": [-2, 2**63, 1.5],
    "stop": ["", ["a", ""], ["x"] * 17, 5],
    "n_indent": [-1, "4"],
    "t_max_predict_ms": [-2, "4"],
    "response_fields": ["content", [1], ["x"] * 65],
    "stream": [1, "true"],
    **{name: [1] for name in ("presence_penalty", "frequency_penalty", "mirostat", "n_probs", "max_tokens", "suffix")},
    "lora": [[{"id": 0, "scale": 0.5}]],
    "input_sufix": ["x"],
    "speculative": [{"depth": 2, "zzz": 1}, {"trace": True}],
}
REFUSED = [(name, value) for name, values in WRONG.items() for value in values]


@pytest.mark.parametrize(("param", "value"), REFUSED, ids=lambda value: str(value)[:40])
async def test_wrong_fields_are_refused_by_name(param: str, value: object):
    async with in_process(engine := engine_of(), tokenizer=QWEN, max_answer_tokens=50) as client:
        answer = await client.post(URL, json=body_of(**{param: value}))
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert answer.json()["error"]["param"].startswith(param)
    assert engine.requests == []


async def test_a_traced_stream_is_refused():
    """The bug: a trace without a stream was a 500, and with one it was computed for nothing."""
    async with in_process(engine := engine_of(), tokenizer=QWEN) as client:
        for stream in (True, False):
            answer = await client.post(URL, json=body_of(stream=stream, speculative={"trace": True}))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "speculative.trace")
    assert engine.requests == []


@pytest.mark.parametrize("missing", ["input_prefix", "input_suffix"])
async def test_prefix_and_suffix_are_required(missing: str):
    """llama.cpp answers 500."""
    async with in_process(engine_of(), tokenizer=QWEN) as client:
        body = {name: value for name, value in body_of().items() if name != missing}
        answer = await client.post(URL, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, missing)


async def test_other_models_refuse_infill():
    async with in_process(engine := FakeEngine()) as client:
        answer = await client.post(URL, json=body_of())
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_suffix")
        unknown = await client.post(URL, json=body_of(model="other"))
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")
        assert (await client.post("/v1/infill", json=body_of())).status_code == 404
    assert engine.requests == []


@pytest.mark.parametrize("family", ["codellama", "codestral", "deepseek"])
async def test_families_without_files_take_them_as_text(family: str):
    tokenizer = infilling(family)
    async with in_process(engine := engine_of(script=emits([5])), tokenizer=tokenizer) as client:
        await filled(client, input_extra=[{"filename": "a", "text": "hello"}])
    expected = infill_of(family).prompt_of_files("hello", " world", [("a", "hello")], 250)[0]
    assert engine.requests[0].prompt_ids == expected
    assert "snippet" in tokenizer.decode(expected)


async def test_keys_and_browsers_are_guarded_as_elsewhere():
    keys = ("alice:use:use-key-of-a-client", "prometheus:scrape:scrape-key-of-it")
    async with in_process(engine := engine_of(), tokenizer=QWEN, api_keys=keys, max_requests_per_minute=2) as client:
        statuses = []
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Bearer scrape-key-of-it"},
            {"Authorization": "Bearer use-key-of-a-client", "Origin": "https://page.test"},
            *([{"Authorization": "Bearer use-key-of-a-client"}] * 3),
        ):
            statuses.append((await client.post(URL, json=body_of(), headers=headers)).status_code)
        assert statuses == [401, 401, 403, 403, 200, 200, 429]
    async with in_process(engine, tokenizer=QWEN) as client:
        plain = {"Content-Type": "text/plain"}
        assert (await client.post(URL, content=json.dumps(body_of()), headers=plain)).status_code == 415
        assert (await client.get(URL)).status_code == 405
    assert len(engine.requests) == 2


async def test_a_late_request_leaves_the_engine():
    engine = engine_of(gate=asyncio.Event())
    async with in_process(engine, tokenizer=QWEN) as client:
        task = asyncio.create_task(client.post(URL, json=body_of(timeout_s=0.05)))
        await until(lambda: engine.living)
        answer = await task
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert engine.living == {}
