"""`suffix` of /v1/completions: the prompt and the ends of each family of models; all other uses are refused by name."""

from typing import Any

import httpx
import pytest

from engine.core.rng_keys import derived_seed
from server.text.codec import TextCodec
from server.text.infill import Infill
from tests.api.harness import completion, data_of, in_process
from tests.fake_engine import FakeEngine, emits
from tests.tokenizers_for_tests import INFILL, infilling

URL = "/v1/completions"
QWEN = infilling("qwen")
PAD = QWEN.convert_tokens_to_ids("<|fim_pad|>")
MIDDLE = QWEN.encode(" the quick 日本語")


def infill_of(family: str = "qwen") -> Infill:
    infill = TextCodec(infilling(family)).infill
    assert infill is not None
    return infill


def engine_of(**fields: Any) -> FakeEngine:
    return FakeEngine(**{"vocab_size": 500, "script": emits([*MIDDLE, PAD, *MIDDLE]), "chunks": (1, 3), **fields})


async def choice_of(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post(URL, json=completion(**{"suffix": " world", "max_tokens": 40, **fields}))
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


@pytest.mark.parametrize("family", INFILL)
async def test_a_suffix_makes_the_familys_prompt(family: str):
    tokenizer = infilling(family)
    end_id = tokenizer.convert_tokens_to_ids(INFILL[family][-1])
    text = tokenizer.encode("hello", add_special_tokens=False)
    async with in_process(engine := engine_of(script=emits([*text, end_id, *text])), tokenizer=tokenizer) as client:
        choice = await choice_of(client)
    assert engine.requests[0].prompt_ids == infill_of(family).prompt("hello", " world")
    assert set(engine.requests[0].sampling.stop_token_ids) == set(infill_of(family).end_ids)
    assert (choice["text"].strip(), choice["finish_reason"], choice["stop_reason"]) == ("hello", "stop", None)


async def test_a_space_begins_a_middle():
    """The bug to avoid: sentencepiece's decoder strips a space at the beginning, so `return` and ` x` became `returnx`."""
    tokenizer = infilling("codellama")
    ids = tokenizer.convert_tokens_to_ids(["▁the", "h", "▁", "e"])
    async with in_process(engine_of(script=emits(ids)), tokenizer=tokenizer) as client:
        assert (await choice_of(client, max_tokens=4))["text"] == " theh e"
        body = completion(suffix="x", max_tokens=4, stream=True)
        chunks = data_of((await client.post(URL, json=body)).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " theh e"


async def test_prompts_share_a_suffix():
    async with in_process(engine := engine_of(), tokenizer=QWEN) as client:
        body = completion(prompt=["hello", "the", ""], suffix="x", n=2, seed=5, max_tokens=40)
        answer = (await client.post(URL, json=body)).json()
    prompts = [infill_of().prompt(prefix, "x") for prefix in ("hello", "the", "") for _ in range(2)]
    assert [request.prompt_ids for request in engine.requests] == prompts
    assert [request.sampling.seed for request in engine.requests] == [derived_seed(5, index) for index in range(6)]
    assert [choice["text"] for choice in answer["choices"]] == [" the quick 日本語"] * 6
    num_prompt = sum(map(len, prompts[::2]))
    assert answer["usage"]["prompt_tokens"] == num_prompt
    assert answer["usage"]["completion_tokens"] == 6 * (len(MIDDLE) + 1)


@pytest.mark.parametrize("chunks", [(1,), (3,), (2, 5), (100,)])
@pytest.mark.parametrize("options", [{}, {"stop": "quick"}, {"logprobs": 1, "n": 2}, {"return_token_ids": True}], ids=str)
async def test_a_streamed_middle_is_the_whole(chunks: tuple[int, ...], options: dict[str, Any]):
    body = completion(suffix="x", max_tokens=40, **options)
    async with in_process(engine_of(chunks=chunks), tokenizer=QWEN) as client:
        whole = (await client.post(URL, json=body)).json()
        stream = data_of((await client.post(URL, json={**body, "stream": True})).text)
    for choice in whole["choices"]:
        parts = [chunk["choices"][0] for chunk in stream if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts][-1] == choice["finish_reason"] == "stop"
        assert [i for part in parts for i in part.get("token_ids", [])] == choice.get("token_ids", [])


async def test_ignore_eos_ignores_ends_of_a_middle():
    async with in_process(engine := engine_of(), tokenizer=QWEN) as client:
        choice = await choice_of(client, ignore_eos=True, stop_token_ids=[7])
    assert engine.requests[0].sampling.stop_token_ids == (7,)
    assert (choice["text"], choice["finish_reason"]) == (" the quick 日本語" * 2, "length")


async def test_a_named_end_is_reported():
    """Only the stop tokens that a request names are the reason of an end."""
    async with in_process(engine_of(), tokenizer=QWEN) as client:
        assert (await choice_of(client, stop_token_ids=[PAD]))["stop_reason"] == PAD
        assert (await choice_of(client))["stop_reason"] is None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": [5, 6]}, "suffix"),
    ({"prompt": [[5], [6]]}, "suffix"),
    ({"echo": True}, "echo"),
    ({"echo": True, "max_tokens": 0}, "echo"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
    ({"suffix": 5}, "suffix"),
    ({"suffix": ["x"]}, "suffix"),
    ({"suffix": "x" * 100_000}, "prompt"),
    ({"suffix": "hello " * 300}, "prompt"),
    ({"min_tokens": 1, "allowed_token_ids": [PAD]}, "min_tokens"),
    ({"model": "other"}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:40])
async def test_other_uses_of_a_suffix_are_refused(fields: dict[str, Any], param: str):
    async with in_process(engine := engine_of(), tokenizer=QWEN) as client:
        answer = await client.post(URL, json=completion(**{"suffix": "x", **fields}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (404 if param == "model" else 400, param)
    assert engine.requests == []


@pytest.mark.parametrize("suffix", ["", "x"])
async def test_other_models_refuse_a_suffix(suffix: str):
    async with in_process(engine := FakeEngine()) as client:
        error = (await client.post(URL, json=completion(suffix=suffix))).json()["error"]
        assert (error["param"], "fill-in-the-middle" in error["message"]) == ("suffix", True)
        assert (await client.post(URL, json=completion(suffix=None))).status_code == 200
    assert len(engine.requests) == 1


async def test_a_smaller_vocabulary_refuses_a_suffix():
    """A tokenizer may have more tokens than its model (Code Llama 34B's)."""
    async with in_process(engine_of(vocab_size=PAD), tokenizer=QWEN) as client:
        assert (await client.post(URL, json=completion(suffix="x"))).json()["error"]["param"] == "suffix"


CONTINUE: dict[str, Any] = {  # the body of Continue's LlamaStack provider, with the stop strings of its template for Qwen
    "model": "fake",
    "prompt": "def add(a, b):\n    return ",
    "suffix": "\n\nprint(add(1, 2))\n",
    "max_tokens": 40,
    "temperature": 0.01,
    "stop": [
        "<|endoftext|>",
        "<|fim_prefix|>",
        "<|fim_middle|>",
        "<|fim_suffix|>",
        "<|fim_pad|>",
        "<|repo_name|>",
        "/src/",
        "```",
    ],
    "stream": True,
}


async def test_continues_body_is_answered():
    async with in_process(engine := engine_of(), tokenizer=QWEN) as client:
        chunks = data_of((await client.post(URL, json=CONTINUE)).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " the quick 日本語"
    assert engine.requests[0].prompt_ids == infill_of().prompt(CONTINUE["prompt"], CONTINUE["suffix"])
