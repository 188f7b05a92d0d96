"""What ended a text, and the ids of its tokens: vLLM's `stop_reason`, `return_token_ids`, `return_tokens_as_token_ids`."""

from typing import Any

import pytest

from tests.api.harness import chat, completion, data_of, in_process
from tests.fake_engine import FakeEngine, emits
from tests.tokenizers_for_tests import byte_level

CODEC = byte_level()
TEXT = "hello 日本語 😀 fox"
IDS = CODEC.encode(TEXT)
END = CODEC.convert_tokens_to_ids("<|start|>")
URLS = [("/v1/completions", completion), ("/v1/chat/completions", chat)]

REASONS: list[tuple[dict[str, Any], str | int | None]] = [
    ({}, None),
    ({"max_tokens": 2}, None),
    ({"stop": ["zz", "本"]}, "本"),
    ({"stop": "本", "include_stop_str_in_output": True}, "本"),
    ({"stop_token_ids": [IDS[3]]}, IDS[3]),
    ({"stop_token_ids": [END]}, None),
    ({"stop_token_ids": [END], "ignore_eos": True}, END),
]


def _joined(chunks: list[dict[str, Any]], name: str) -> list[int]:
    return [item for chunk in chunks for item in chunk["choices"][0].get(name, ())]


@pytest.mark.parametrize(("url", "body_of"), URLS)
@pytest.mark.parametrize(("fields", "reason"), REASONS)
async def test_stop_reason_names_matched_stop(url: str, body_of: Any, fields: dict[str, Any], reason: str | int | None):
    """The model's own end is none: only with `ignore_eos` is it a token like others."""
    engine = FakeEngine(script=emits([*IDS, END, *IDS]), chunks=(1, 3), eos_token_ids=(END,))
    async with in_process(engine) as client:
        body = body_of(**{"max_tokens": 99, **fields})
        whole = (await client.post(url, json=body)).json()["choices"][0]
        *chunks, last = data_of((await client.post(url, json={**body, "stream": True})).text)
    assert (whole["stop_reason"], last["choices"][0]["stop_reason"]) == (reason, reason)
    assert last["choices"][0]["finish_reason"] == whole["finish_reason"]
    assert not any("stop_reason" in chunk["choices"][0] for chunk in chunks)


@pytest.mark.parametrize("fields", [{}, {"stop": "本"}, {"logprobs": 1}, {"n": 2}])
@pytest.mark.parametrize("chunks", [(1,), (4, 2)])
async def test_completion_returns_prompt_and_output_ids(fields: dict[str, Any], chunks: tuple[int, ...]):
    prompts = [[5, 6], [7]]
    body = completion(prompt=prompts, max_tokens=99, return_token_ids=True, **fields)
    async with in_process(FakeEngine(script=emits(IDS), chunks=chunks)) as client:
        whole = (await client.post("/v1/completions", json=body)).json()
        streamed = data_of((await client.post("/v1/completions", json={**body, "stream": True})).text)
        without = (await client.post("/v1/completions", json={**body, "return_token_ids": False})).json()
    num_ids = sum(len(choice["token_ids"]) for choice in whole["choices"])
    assert num_ids == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        assert choice["token_ids"] == IDS[: len(choice["token_ids"])]
        assert choice["prompt_token_ids"] == prompts[choice["index"] // body.get("n", 1)]
        mine = [chunk for chunk in streamed if chunk["choices"][0]["index"] == choice["index"]]
        assert _joined(mine, "token_ids") == choice["token_ids"]
        returned = [chunk["choices"][0].get("prompt_token_ids") for chunk in mine]
        assert returned == [choice["prompt_token_ids"], *[None] * (len(mine) - 1)]
    assert not any("token_ids" in choice or "prompt_token_ids" in choice for choice in without["choices"])


async def test_chat_returns_prompt_and_output_ids():
    engine = FakeEngine(script=emits([*IDS, END]), chunks=(1, 3), eos_token_ids=(END,))
    body = chat(max_tokens=99, return_token_ids=True)
    async with in_process(engine) as client:
        whole = (await client.post("/v1/chat/completions", json=body)).json()
        chunks = data_of((await client.post("/v1/chat/completions", json={**body, "stream": True})).text)
    assert whole["choices"][0]["token_ids"] == [*IDS, END] == _joined(chunks, "token_ids")
    prompt_ids = list(engine.requests[0].prompt_ids)
    assert [whole.get("prompt_token_ids"), *[chunk.get("prompt_token_ids") for chunk in chunks]] == [
        prompt_ids,
        prompt_ids,
        *[None] * (len(chunks) - 1),
    ]


async def test_tokens_are_named_by_id_on_request():
    async with in_process(FakeEngine(script=emits(IDS))) as client:
        body = completion(logprobs=1, max_tokens=99, echo=True, prompt_logprobs=0, prompt=[5, 6])
        spelled = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        body["return_tokens_as_token_ids"] = True
        named = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        body = chat(logprobs=True, top_logprobs=1, max_tokens=99, return_tokens_as_token_ids=True)
        entries = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["logprobs"]["content"]
    names = [f"token_id:{token_id}" for token_id in [5, 6, *IDS]]
    assert named["logprobs"]["tokens"] == names
    assert all(
        set(top) == {name, "token_id:0"} for name, top in zip(names[1:], named["logprobs"]["top_logprobs"][1:], strict=True)
    )
    for same in ("token_logprobs", "text_offset"):
        assert named["logprobs"][same] == spelled["logprobs"][same]
    assert named["prompt_logprobs"] == spelled["prompt_logprobs"], "these have the ids as keys"
    assert [entry["token"] for entry in entries] == names[2:]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == TEXT
    assert {top["token"] for entry in entries for top in entry["top_logprobs"]} == {"token_id:0"}


LETTERS = [CODEC.encode(letter)[0] for letter in "abcMdMMe"]
DELAYED: list[tuple[int, list[str], str, str | None]] = [
    (0, ["M"], "abc", "M"),
    (3, ["M"], "abc", "M"),
    (4, ["M"], "abcMd", "M"),
    (6, ["M"], "abcMdM", "M"),
    (7, ["M"], "abcMdMMe", None),
    (4, ["cM"], "abcMdMMe", None),
    (4, ["cMd"], "ab", "cMd"),
    (4, ["M", "bcMdx"], "abcMd", "M"),
    (4, ["dM", "M"], "abcM", "dM"),
]


@pytest.mark.parametrize(("url", "body_of"), URLS)
@pytest.mark.parametrize("chunks", [(1,), (3,), (8,)])
@pytest.mark.parametrize(("min_tokens", "stop", "text", "reason"), DELAYED)
async def test_min_tokens_delays_stop_strings(
    url: str, body_of: Any, chunks: tuple[int, ...], min_tokens: int, stop: list[str], text: str, reason: str | None
):
    """A stop string ended a text at once, whatever `min_tokens`. As in vLLM it must end behind so many tokens."""
    async with in_process(FakeEngine(script=emits(LETTERS), chunks=chunks)) as client:
        body = body_of(max_tokens=len(LETTERS), min_tokens=min_tokens, stop=stop)
        whole = (await client.post(url, json=body)).json()
        streamed = data_of((await client.post(url, json={**body, "stream": True})).text)
    (choice,) = whole["choices"]
    assert (choice["text"] if "text" in choice else choice["message"]["content"]) == text
    assert (choice["stop_reason"], whole["usage"]["completion_tokens"] > min_tokens) == (reason, True)
    pieces = [one["choices"][0].get("text", one["choices"][0].get("delta", {}).get("content")) for one in streamed]
    assert "".join(piece or "" for piece in pieces) == text
