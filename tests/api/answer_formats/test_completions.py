"""POST /v1/completions: supported fields are honoured, others are refused by name, and a stream equals the whole answer."""

import math
from typing import Any

import pytest

from engine.core.rng_keys import derived_seed
from engine.core.tree import Expansion
from engine.core.types import Speculation
from engine.worker.messages import Add, encode_message
from tests.api.harness import MODEL, chat, completion, data_of, in_process, sample
from tests.fake_engine import FakeEngine, emits
from tests.tokenizers_for_tests import byte_level

TEXT = "hello world, the quick 日本語 😀 fox stop here"
IDS = byte_level().encode(TEXT)
SPECIAL_ID = byte_level().convert_tokens_to_ids("<|start|>")


def _engine(**fields) -> FakeEngine:
    return FakeEngine(**{"script": emits(IDS), "chunks": (1, 3, 2), **fields})


async def test_an_answer_has_the_openai_shape():
    async with in_process(_engine()) as client:
        answer = (await client.post("/v1/completions", json=completion(max_tokens=50))).json()
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", MODEL)
    rest = {"logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert answer["choices"] == [{"index": 0, "text": TEXT, **rest}]
    num_prompt = len(byte_level().encode("hello"))
    usage = {"prompt_tokens": num_prompt, "completion_tokens": len(IDS), "total_tokens": num_prompt + len(IDS)}
    assert usage.items() <= answer["usage"].items()


async def test_speculation_numbers_add_up():
    async with in_process(_engine()) as client:
        answer = (await client.post("/v1/completions", json=completion(n=2, max_tokens=50))).json()
    numbers = answer["metrics"]["speculative_decoding"]
    histogram = numbers["acceptance_histogram"]
    assert sum(histogram) == numbers["num_spec_steps"] > 0
    assert len(histogram) == numbers["num_spec_tokens"] + 1
    assert sum(j * count for j, count in enumerate(histogram)) == numbers["num_accepted_draft_tokens"] > 0
    assert (sum(numbers["trees"].values()), set(numbers["trees"])) == (numbers["num_spec_steps"], {"3.1.0", "2.1.0", "1.1.0"})
    assert numbers["num_spec_tokens"] == 3
    num_accepted = numbers["num_accepted_draft_tokens"]
    assert numbers["mean_acceptance_length"] == pytest.approx(1 + num_accepted / numbers["num_spec_steps"])
    assert numbers["draft_acceptance_rate"] == pytest.approx(num_accepted / numbers["num_draft_tokens"])


async def test_histogram_without_drafts_has_depth_zero():
    """The bug: it was empty, and aiperf, which expects a place for every depth from 0 on, took it for malformed."""
    async with in_process(_engine()) as client:
        answer = (await client.post("/v1/completions", json=completion(max_tokens=1))).json()
    numbers = answer["metrics"]["speculative_decoding"]
    assert (numbers["num_spec_steps"], numbers["num_spec_tokens"], numbers["acceptance_histogram"]) == (0, 0, [0])


OPTIONS: list[dict[str, Any]] = [
    *({}, {"stop": ["日本", "fox"]}, {"logprobs": 2}, {"logprobs": 0, "stop": "stop he"}, {"n": 3}),
    {"stop": ["日本", "fox"], "include_stop_str_in_output": True, "logprobs": 1},
    {"stop_token_ids": [IDS[7]], "include_stop_str_in_output": True},
    {"skip_special_tokens": False, "logprobs": 0, "n": 2},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chunks", [(1,), (3,), (2, 5), (100,)])
async def test_stream_equals_whole_answer(options: dict[str, Any], chunks: tuple[int, ...]):
    body = completion(max_tokens=50, **options)
    spoken = [*IDS[:4], SPECIAL_ID, *IDS[4:], SPECIAL_ID]
    async with in_process(_engine(chunks=chunks, script=emits(spoken))) as client:
        whole = (await client.post("/v1/completions", json=body)).json()
        response = await client.post("/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks_, last = data_of(response.text)
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks_)
    assert {(chunk["id"], chunk["created"]) for chunk in chunks_} == {(last["id"], last["created"])}
    assert (last["choices"], last["usage"], last["metrics"]) == ([], whole["usage"], whole["metrics"])
    for choice in whole["choices"]:
        parts = [chunk["choices"][0] for chunk in chunks_ if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        if choice["logprobs"]:
            for key in ("tokens", "token_logprobs", "text_offset"):
                assert [item for part in parts for item in part["logprobs"][key]] == choice["logprobs"][key]


async def test_running_usage_in_chunks_grows_to_total():
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"max_tokens": 50, "n": 2, "stream": True, "stop": "fox", "stream_options": options}
    async with in_process(_engine()) as client:
        for url, body in (("/v1/completions", completion(**fields)), ("/v1/chat/completions", chat(**fields))):
            *chunks, last = data_of((await client.post(url, json=body)).text)
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts == sorted(counts)
            assert counts[0] < counts[-1] == last["usage"]["completion_tokens"]
            assert chunks[-1]["usage"] == last["usage"]
            assert all(chunk["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"] for chunk in chunks)


async def test_running_usage_without_usage_is_refused():
    async with in_process(_engine()) as client:
        for usage in ({}, {"include_usage": False}):
            body = completion(stream=True, stream_options={"continuous_usage_stats": True, **usage})
            error = (await client.post("/v1/completions", json=body)).json()["error"]
            assert error["param"] == "stream_options.continuous_usage_stats"


async def test_stop_string_is_kept_on_request():
    engine = _engine(chunks=(1, 2))
    body = completion(max_tokens=50, stop="d, the q", include_stop_str_in_output=True)
    async with in_process(engine) as client:
        answer = (await client.post("/v1/completions", json=body)).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hello world, the q", "stop")
    assert answer["usage"]["completion_tokens"] == len(byte_level().encode("hello world, the quick"))
    assert engine.living == {}


async def test_end_token_is_spelled_out_on_request():
    engine = _engine(script=emits([*IDS, SPECIAL_ID, *IDS]), eos_token_ids=(SPECIAL_ID,))
    texts = {}
    async with in_process(engine) as client:
        for skips in (True, False):
            for keeps in (True, False):
                body = completion(max_tokens=50, skip_special_tokens=skips, include_stop_str_in_output=keeps)
                texts[skips, keeps] = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    assert texts.pop((False, True)) == TEXT + "<|start|>"
    assert set(texts.values()) == {TEXT}


@pytest.mark.parametrize(
    ("options", "num_kept"),
    [
        *(({"truncate_prompt_tokens": k}, k) for k in (1, 7, 30)),
        ({"truncate_prompt_tokens": 40}, 30),
        ({"truncate_prompt_tokens": -1, "max_tokens": 50}, 14),
        ({"truncate_prompt_tokens": -1, "max_tokens": 2}, 30),
        ({"truncate_prompt_tokens": -1, "max_tokens": 63}, 1),
    ],
)
async def test_truncated_prompt_keeps_last_tokens(options: dict[str, int], num_kept: int):
    engine = FakeEngine(max_model_len=64)
    ids = list(range(5, 35))
    body = {"max_tokens": 4, **options}
    async with in_process(engine) as client:
        answer = (await client.post("/v1/completions", json=completion(prompt=[ids, ids[:3]], **body))).json()
        text = completion(prompt=byte_level().decode(ids[:3] * 10), **body)
        assert (await client.post("/v1/completions", json=text)).status_code == 200
    whole, short, _ = engine.requests
    assert (whole.prompt_ids, short.prompt_ids) == (tuple(ids[-num_kept:]), tuple(ids[:3][-num_kept:]))
    assert answer["usage"]["prompt_tokens"] == len(whole.prompt_ids) + len(short.prompt_ids)


async def test_long_prompt_is_truncated_only_if_allowed():
    async with in_process(engine := FakeEngine(max_model_len=20)) as client:
        refused = await client.post("/v1/completions", json=completion(prompt=[5] * 20))
        too_much = await client.post(
            "/v1/completions", json=completion(prompt=[5] * 20, max_tokens=20, truncate_prompt_tokens=-1)
        )
        too_long = await client.post("/v1/completions", json=completion(prompt=[5] * 30, truncate_prompt_tokens=25))
        fits = await client.post("/v1/completions", json=completion(prompt=[5] * 30, truncate_prompt_tokens=-1))
        chat_answer = await client.post("/v1/chat/completions", json=chat(truncate_prompt_tokens=-1, messages=LONG_CHAT))
    assert [answer.status_code for answer in (refused, too_much, too_long)] == [400] * 3
    assert (fits.json()["usage"]["prompt_tokens"], fits.json()["usage"]["completion_tokens"]) == (4, 16)
    assert (chat_answer.json()["usage"]["prompt_tokens"], chat_answer.json()["usage"]["completion_tokens"]) == (19, 1)
    assert byte_level().decode(engine.requests[-1].prompt_ids).endswith("<|start|>assistant\n")


LONG_CHAT = [{"role": "user", "content": "hello there, the quick brown fox"}]


async def test_answer_id_contains_client_request_id():
    async with in_process(_engine()) as client:
        for url, body, kind in (("/v1/completions", completion(), "cmpl"), ("/v1/chat/completions", chat(), "chatcmpl")):
            named = {**body, "request_id": "my-1.2:3_x"}
            assert (await client.post(url, json=named)).json()["id"] == f"{kind}-my-1.2:3_x"
            chunks = data_of((await client.post(url, json={**named, "stream": True})).text)
            assert {chunk["id"] for chunk in chunks} == {f"{kind}-my-1.2:3_x"}
            assert len({(await client.post(url, json=body)).json()["id"] for _ in range(2)}) == 2


async def test_a_priority_is_the_engines_to_honour():
    async with in_process(engine := _engine()) as client:
        for url, body in (
            ("/v1/completions", completion(n=2, priority=-3)),
            ("/v1/chat/completions", chat(priority=4)),
            ("/v1/completions", completion()),
        ):
            assert (await client.post(url, json=body)).status_code == 200
        error = (await client.post("/v1/completions", json=completion(priority=1001))).json()["error"]
    assert [request.priority for request in engine.requests] == [-3, -3, 4, 0]
    assert (error["param"], error["message"]) == ("priority", "priority: must be at most 1000")


async def test_stop_string_aborts_engine_request():
    engine = _engine(chunks=(1, 2))
    async with in_process(engine) as client:
        answer = (await client.post("/v1/completions", json=completion(max_tokens=50, stop="d, the q"))).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hello worl", "stop")
    assert answer["usage"]["completion_tokens"] == len(byte_level().encode("hello world, the quick"))
    assert engine.aborted == [engine.requests[0].request_id]
    assert engine.living == {}


async def test_partial_characters_are_spelled_as_bytes():
    smile = [byte_level().convert_tokens_to_ids(token) for token in ("ð", "Ł", "Ļ", "Ģ")]
    async with in_process(_engine(script=emits(smile))) as client:
        answer = (await client.post("/v1/completions", json=completion(logprobs=0))).json()
    (choice,) = answer["choices"]
    assert choice["text"] == "🙀"
    assert choice["logprobs"]["tokens"] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x99", "bytes:\\x80"]
    assert choice["logprobs"]["top_logprobs"] is None


async def test_chosen_token_is_among_top_logprobs():
    async with in_process(_engine()) as client:
        answer = (await client.post("/v1/completions", json=completion(logprobs=2, max_tokens=2))).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert [len(top) for top in logprobs["top_logprobs"]] == [3, 3]
    assert logprobs["top_logprobs"][0]["hello"] == logprobs["token_logprobs"][0] == pytest.approx(-IDS[0] / 100)
    assert all(map(math.isfinite, logprobs["token_logprobs"]))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", [tuple(byte_level().encode("hello"))]),
        (["hello", "the"], [tuple(byte_level().encode("hello")), tuple(byte_level().encode("the"))]),
        ([5, 6, 7], [(5, 6, 7)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
    ],
)
async def test_the_four_forms_of_a_prompt(prompt: object, expected: list[tuple[int, ...]]):
    engine = FakeEngine()
    async with in_process(engine) as client:
        answer = (await client.post("/v1/completions", json=completion(prompt=prompt, n=2))).json()
    assert [request.prompt_ids for request in engine.requests] == [ids for ids in expected for _ in range(2)]
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_bad_words_match_alone_and_after_space():
    engine = FakeEngine()
    async with in_process(engine) as client:
        answer = await client.post("/v1/completions", json=completion(bad_words=["fox", " brown", "fox"]))
        nothing = await client.post("/v1/completions", json=completion(bad_words=[]))
    assert (answer.status_code, nothing.status_code) == (200, 200)
    spelled = [tuple(byte_level().encode(text)) for text in ("fox", " fox", "brown", " brown")]
    assert [request.sampling.bad_words for request in engine.requests] == [tuple(spelled), ()]


async def test_every_parameter_reaches_the_engine():
    engine = FakeEngine(eos_token_ids=(9,))
    body = completion(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=-5, max_tokens=3, n=2)
    body |= {"stop_token_ids": [4], "ignore_eos": True, "logprobs": 1, "min_tokens": 2}
    body |= {"presence_penalty": -0.5, "frequency_penalty": 2, "repetition_penalty": 1.25}
    body |= {"logit_bias": {"7": -100, "0": 1.5}, "allowed_token_ids": [0, 7, 8], "typical_p": 0.5}
    body |= {"speculative": {"verifier": "nss", "trunk": 2, "branches": 3, "depth": 1}}
    async with in_process(engine) as client:
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    first, second = engine.requests
    sampling = first.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.max_tokens, sampling.stop_token_ids, sampling.ignore_eos, sampling.num_logprobs) == (3, (4,), True, 1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-0.5, 2.0, 1.25)
    assert sampling.typical_p == 0.5
    assert (sampling.logit_bias, sampling.allowed_token_ids) == (((7, -100.0), (0, 1.5)), (0, 7, 8))
    assert sampling.min_tokens == 2
    encode_message(Add(first))
    assert (first.sampling.seed, second.sampling.seed) == (-5, derived_seed(-5, 1))
    assert first.speculation == Speculation(True, Expansion(2, 3, 1), "nss")


async def test_null_is_the_openai_default():
    engine = FakeEngine()
    nulls = dict.fromkeys(["temperature", "top_p", "top_k", "min_p", "seed", "n", "max_tokens", "stop", "logprobs", "stream"])
    nulls |= dict.fromkeys(["presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"])
    nulls |= dict.fromkeys(["allowed_token_ids", "min_tokens"])
    async with in_process(engine) as client:
        assert (await client.post("/v1/completions", json=completion(**nulls))).status_code == 200
    (request,) = engine.requests
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.seed) == (1.0, 1.0, None)
    assert (request.sampling.max_tokens, request.speculation) == (16, Speculation())
    assert not request.sampling.edits_logits


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0, 0.0, -2, 2.0, None),
    "frequency_penalty": (0, -2.0, 2, None),
    "repetition_penalty": (1, 0.01, 100.0, None),
    "logit_bias": ({}, {"5": 1, "399": -100, "0": 100.0}, {str(i): 1 for i in range(400)}, None),
    "allowed_token_ids": ([0], [399, 5], [5, 5], None),
    "min_tokens": (0, 16, None),
    "best_of": (1, 2, 128, None),
    "echo": (False, True, None),
    "prompt_logprobs": (0, 20, None),
    "suffix": (None,),
    "user": ("someone", None),
    "add_special_tokens": (True, False, None),
    "include_stop_str_in_output": (True, None),
    "skip_special_tokens": (True, False, None),
    "truncate_prompt_tokens": (1, -1, 2**31 - 1, None),
    "request_id": ("x", "x" * 128, None),
}
REFUSED: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (2.1, -2.1, False, "0"),
    "frequency_penalty": (2.5, -3, "1", True),
    "repetition_penalty": (0, -1, 100.5, "1", True),
    "logit_bias": (
        *({"5": 100.5}, {"5": -101}, {"5": "1"}, {"5": None}, {"5": True}, {"400": 1}, {"9999999999": 1}, {"9" * 5000: 1}),
        *({"-1": 1}, {"05": 1}, {"": 1}, {"5.0": 1}, {"five": 1}, {"٥": 1}, [], [[5, 1]]),
    ),
    "allowed_token_ids": ([], [400], [-1], ["5"], [2**64], 5, list(range(4097))),
    "min_tokens": (-1, 1.5, 17, "1", 2**31, 2**64),
    "best_of": (0, 129, 2**64, "2"),
    "echo": (1, "true"),
    "prompt_logprobs": (-1, 21, "1"),
    "suffix": ("x", ""),
    "user": (5,),
    "temperature": (-0.1, 2.1, "1", True),
    "top_p": (0, 1.1),
    "top_k": (-2, 0.5, 2**31, 2**64),
    "min_p": (-0.1, 1.5),
    "typical_p": (0, 1.5, "1"),
    "bad_words": (["a", ""], ["  "], [1], "word", ["x" * 257], ["a"] * 257),
    "seed": (2**63, -(2**63) - 1, 1.5),
    "n": (0, 129, 2**64),
    "max_tokens": (0, -1, 1.5, 2**31, 2**64),
    "stop": ("", ["a", ""], ["x"] * 17, [5], "x" * 257),
    "stop_token_ids": ([-1], [100000], [2**64], "5"),
    "ignore_eos": (1,),
    "stream_options": ({"include_usage": True},),
    "add_special_tokens": (1, "true"),
    "include_stop_str_in_output": (1,),
    "skip_special_tokens": (0,),
    "truncate_prompt_tokens": (0, -2, 1.5, "1", True, 2**31, 2**64),
    "request_id": ("", "x" * 129, "a b", "é", "a\n", "\na", 5),
    "add_generation_prompt": (True,),
    "max_completion_tokens": (5,),
    "logprobs": (-1, 21, True),
    "prompt": ("", [], [[]], [1, "a"], [-1], [100000], None, {"a": 1}, [2**64], [[2**64]]),
    "model": (5,),
    "speculative": ({"enabled": False, "depth": 1}, []),
    "speculative.verifier": ("magic",),
    "speculative.branches": (0, 2**64),
    "speculative.colour": ("red",),
    "prediction": ("hello", {"type": "text", "content": "a"}, {"type": "content", "content": []}, {"type": "content"}),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NEUTRAL.items() for value in values])
async def test_neutral_values_are_accepted(name: str, value: object):
    async with in_process(FakeEngine()) as client:
        assert (await client.post("/v1/completions", json=completion(**{name: value}))).status_code == 200


async def test_other_values_are_refused_by_field_name():
    async with in_process(FakeEngine()) as client:
        for name, values in REFUSED.items():
            outer, _, inner = name.partition(".")
            for value in values:
                response = await client.post("/v1/completions", json=completion(**{outer: {inner: value} if inner else value}))
                error = response.json()["error"]
                assert (response.status_code, error["type"]) == (400, "invalid_request_error"), (name, value)
                assert error["param"].startswith(name), (name, value, error)


async def test_min_tokens_without_continuing_token_is_refused():
    """Every token that is possible would stop the completion before its minimum, so no distribution is left."""
    only = {"allowed_token_ids": [4, 9], "min_tokens": 1}
    async with in_process(FakeEngine(eos_token_ids=(9,))) as client:
        refused = await client.post("/v1/completions", json=completion(**only, stop_token_ids=[4]))
        fine = await client.post("/v1/completions", json=completion(**only, stop_token_ids=[4], ignore_eos=True))
        no_minimum = await client.post("/v1/completions", json=completion(**only | {"min_tokens": 0}, stop_token_ids=[4]))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "min_tokens")
    assert (fine.status_code, no_minimum.status_code) == (200, 200)


async def test_logit_bias_beyond_limit_is_refused():
    async with in_process(FakeEngine(vocab_size=2000)) as client:
        fits = await client.post("/v1/completions", json=completion(logit_bias={str(i): 1 for i in range(1024)}))
        too_many = await client.post("/v1/completions", json=completion(logit_bias={str(i): 1 for i in range(1025)}))
    assert (fits.status_code, too_many.status_code) == (200, 400)


async def test_bad_logit_bias_key_is_named():
    async with in_process(FakeEngine()) as client:
        error = (await client.post("/v1/completions", json=completion(logit_bias={"five": 1}))).json()["error"]
    assert (error["param"], error["message"]) == (
        "logit_bias.five",
        "logit_bias.five: its keys must be token ids in decimal digits",
    )


async def test_no_shape_without_a_drafter():
    async with in_process(FakeEngine(drafter="none")) as client:
        refused = await client.post("/v1/completions", json=completion(speculative={"depth": 2}))
        fine = await client.post("/v1/completions", json=completion(speculative={"enabled": False}))
    assert (refused.status_code, refused.json()["error"]["param"], fine.status_code) == (400, "speculative", 200)


async def test_branches_without_depth_are_refused():
    """The bug: `{"branches": 4}` was accepted and drafted nothing at all."""
    async with in_process(FakeEngine()) as client:
        for shape in ({"branches": 4}, {"trunk": 4, "branches": 2, "depth": 0}):
            error = (await client.post("/v1/completions", json=completion(speculative=shape))).json()["error"]
            assert error["param"] == "speculative.depth"
        for shape in ({"branches": 1}, {"trunk": 4}, {"branches": 4, "depth": 1}):
            assert (await client.post("/v1/completions", json=completion(speculative=shape))).status_code == 200


@pytest.mark.parametrize(
    ("wish", "param", "words"),
    [
        ({"tree": "heap", "trunk": 2}, "speculative.trunk", "a heap tree has no trunk"),
        ({"tree": "heap", "depth": 0}, "speculative.depth", "at least 1"),
        ({"tree": "redwood"}, "speculative.tree", "'heap'"),
        ({"tree": "heap", "verifier": "specinfer"}, "speculative", "'specinfer' is not lossless on 'heap' trees; nss"),
        (
            {"tree": "greedy_sample", "verifier": "traversal"},
            "speculative",
            "'traversal' is not lossless on 'greedy_sample' trees",
        ),
        (
            {"trunk": 2, "branches": 2, "depth": 2, "verifier": "univer"},
            "speculative",
            "'univer' is not lossless on 'delayed' trees",
        ),
        ({"enabled": False, "tree": "heap"}, "speculative", "enabled is false"),
        ({"enabled": False, "max_nodes": 4}, "speculative", "enabled is false"),
        ({"max_nodes": 0}, "speculative.max_nodes", "must be at least 1"),
    ],
)
async def test_unsupported_trees_are_refused_by_name(wish, param, words):
    async with in_process(FakeEngine()) as client:
        answer = await client.post("/v1/completions", json=completion(speculative=wish))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ({"tree": "heap"}, Speculation(True, Expansion(0, 4, 8, "heap", 16))),
        ({"tree": "beam", "max_nodes": 9, "depth": 3, "branches": 2}, Speculation(True, Expansion(0, 2, 3, "beam", 9), None, 9)),
        ({"tree": "delayed_distinct"}, Speculation(True, Expansion(2, 2, 3, "delayed_distinct"))),
        ({"tree": "delayed", "trunk": 5}, Speculation(True, Expansion(5, 1, 0))),
        ({"verifier": "univer"}, Speculation(True, None, "univer")),
        ({"max_nodes": 5}, Speculation(True, None, None, 5)),
        ({"trunk": 60, "branches": 3, "depth": 8, "max_nodes": 5}, Speculation(True, Expansion(60, 3, 8), None, 5)),
        ({"enabled": False}, Speculation(False)),
    ],
)
async def test_a_wish_reaches_the_engine(wish, expected):
    engine = FakeEngine()
    async with in_process(engine) as client:
        assert (await client.post("/v1/completions", json=completion(speculative=wish))).status_code == 200
    assert engine.requests[0].speculation == expected


async def test_a_requested_tree_is_bounded():
    """The bug: one client could request 1088 drafted tokens a step, which used the step budget of all clients."""
    async with in_process(FakeEngine(), max_tree_tokens=10) as client:
        refused = await client.post("/v1/completions", json=completion(speculative={"trunk": 3, "branches": 2, "depth": 4}))
        fine = await client.post("/v1/completions", json=completion(speculative={"trunk": 2, "branches": 2, "depth": 4}))
    assert (refused.status_code, refused.json()["error"]["param"], fine.status_code) == (400, "speculative", 200)
    assert "max_tree_tokens of this server is 10" in refused.json()["error"]["message"]


async def test_the_largest_integers_are_no_internal_error():
    """The bug: top_k of 2**64 was a 500: it passed validation and did not fit the wire to the worker."""
    engine = FakeEngine()
    async with in_process(engine) as client:
        fine = await client.post("/v1/completions", json=completion(top_k=2**31 - 1, seed=-(2**63)))
        assert fine.status_code == 200
    encode_message(Add(engine.requests[0]))


async def test_prompts_do_not_share_their_noise():
    """The bug: with one seed, choice k of every prompt had the same seed, so that their texts were not independent."""
    engine = FakeEngine()
    async with in_process(engine) as client:
        await client.post("/v1/completions", json=completion(prompt=["a", "b"], n=2, seed=7))
    assert [request.sampling.seed for request in engine.requests] == [derived_seed(7, index) for index in range(4)]
    assert engine.requests[0].sampling.seed == 7


async def test_prompts_times_n_is_bounded():
    async with in_process(FakeEngine(), max_choices=4) as client:
        response = await client.post("/v1/completions", json=completion(prompt=["a", "b", "c"], n=2))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


async def test_choices_beyond_engine_capacity_are_refused_permanently():
    """The bug: they were answered 503 with a Retry-After, however often they were tried."""
    async with in_process(FakeEngine(max_living=5), max_running=2, max_waiting=3) as client:
        too_many = await client.post("/v1/completions", json=completion(n=6))
        fits = await client.post("/v1/completions", json=completion(n=5))
    assert (too_many.status_code, too_many.json()["error"]["param"], fits.status_code) == (400, "n", 200)
    assert "the limit is 5" in too_many.json()["error"]["message"]


async def test_oversized_request_is_context_length_exceeded():
    engine = FakeEngine(max_model_len=20)
    async with in_process(engine) as client:
        too_long = await client.post("/v1/completions", json=completion(prompt=[5] * 20))
        too_much = await client.post("/v1/completions", json=completion(prompt=[5] * 10, max_tokens=11))
        fits = await client.post("/v1/completions", json=completion(prompt=[5] * 10, max_tokens=10))
        default = await client.post("/v1/completions", json=completion(prompt=[5] * 12))
    for response in (too_long, too_much):
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert (fits.status_code, fits.json()["usage"]["completion_tokens"]) == (200, 10)
    assert default.json()["usage"]["completion_tokens"] == 8


async def test_an_unknown_model_is_404():
    async with in_process(FakeEngine()) as client:
        response = await client.post("/v1/completions", json=completion(model="gpt-9"))
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_early_failure_is_http_late_is_event():
    async with in_process(_engine(fail_after=0)) as client:
        early = await client.post("/v1/completions", json=completion(stream=True))
        whole = await client.post("/v1/completions", json=completion())
    async with in_process(_engine(fail_after=2)) as client:
        late = await client.post("/v1/completions", json=completion(stream=True))
    assert (early.status_code, whole.status_code, late.status_code) == (500, 500, 200)
    assert early.json()["error"]["message"] == "the step failed"
    assert data_of(late.text)[-1]["error"]["type"] == "server_error"


async def test_one_failed_sample_ends_the_others():
    engine = FakeEngine(chunks=(1,))
    engine.script = lambda request: [5] * (3 if request.request_id.endswith("-0") else 200)
    engine.fail_after = 2
    async with in_process(engine) as client:
        assert (await client.post("/v1/completions", json=completion(n=2, max_tokens=200))).status_code == 500
        assert engine.living == {}


async def test_full_queue_is_503_with_retry_after():
    engine = FakeEngine(max_living=2)
    async with in_process(engine) as client:
        response = await client.post("/v1/completions", json=completion(n=3))
        again = await client.post("/v1/completions", json=completion(n=2))
        rejected = (await sample(client))['latebranch_rejected_requests_total{engine="0",model_name="fake",reason="engine_busy"}']
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")
    assert response.json()["error"]["code"] == "engine_busy"
    assert (again.status_code, rejected) == (200, 1.0)


async def test_equal_prompts_count_cached_tokens_each():
    """The bug: prompts of the same ids were counted once."""
    async with in_process(FakeEngine(num_cached_tokens=3)) as client:
        body = completion(prompt=[[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 9]], n=2)
        usage = (await client.post("/v1/completions", json=body)).json()["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (12, 9)
