"""Cases of vLLM's own entrypoint tests, against this server (tests/entrypoints/openai as of 0.33; behaviour, not code).

docs/conformance.md lists where this server differs on purpose.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.conformance.served import MODEL, PATIENCE_S, VOCAB_SIZE, app_of, real_engine, served
from tests.tokenizers_for_tests import byte_level

PROMPT = "hello world, hello"
IDS = byte_level().encode(PROMPT)
HELLO: list[Any] = [{"role": "system", "content": "you are brief"}, {"role": "user", "content": "what is 1+1?"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(app_of(real_engine())) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def completed(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"model": MODEL, "prompt": PROMPT, "max_tokens": 5, "temperature": 0.0, **fields}
    extra = {name: fields.pop(name) for name in [*fields] if name not in _OFFICIAL}
    return client.completions.create(**fields, extra_body=extra)


def chatted(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"model": MODEL, "messages": HELLO, "max_completion_tokens": 5, "temperature": 0.0, **fields}
    extra = {name: fields.pop(name) for name in [*fields] if name not in _OFFICIAL}
    return client.chat.completions.create(**fields, extra_body=extra)


_OFFICIAL = {
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "n", "best_of", "stop", "seed"),
    *("logprobs", "top_logprobs", "echo", "stream", "stream_options", "logit_bias"),
}


# test_completion.py


@pytest.mark.parametrize("prompt", [PROMPT, IDS])
def test_single_completion(client: openai.OpenAI, prompt: Any) -> None:
    completion = completed(client, prompt=prompt)
    (choice,) = completion.choices
    assert completion.id
    assert choice.finish_reason == "length"
    assert choice.text
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (len(IDS), 5)
    assert completion.usage.total_tokens == len(IDS) + 5


def test_no_logprobs(client: openai.OpenAI) -> None:
    assert completed(client).choices[0].logprobs is None


@pytest.mark.parametrize("num", [1, 5])
def test_some_logprobs(client: openai.OpenAI, num: int) -> None:
    logprobs = completed(client, logprobs=num).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 5
    assert all(num <= len(top) <= num + 1 for top in logprobs.top_logprobs)


def test_zero_logprobs(client: openai.OpenAI) -> None:
    logprobs = completed(client, logprobs=0).choices[0].logprobs
    assert all(logprob <= 0 for logprob in logprobs.token_logprobs)


@pytest.mark.parametrize("stream", [False, True])
def test_too_many_logprobs_leave_the_server_alive(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError):
        completed(client, logprobs=21, stream=stream)
    with pytest.raises(openai.BadRequestError):
        chatted(client, logprobs=True, top_logprobs=21, stream=stream)
    assert completed(client).choices[0].text


@pytest.mark.parametrize("num", [0, 1])
def test_prompt_logprobs(client: openai.OpenAI, num: int) -> None:
    for returned in (
        completed(client, prompt_logprobs=num).choices[0].prompt_logprobs,
        chatted(client, prompt_logprobs=num).prompt_logprobs,
    ):
        assert returned[0] is None
        assert all(max(1, num) <= len(candidates) <= num + 1 for candidates in returned[1:])


def test_prompt_logprobs_of_minus_one_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        completed(client, prompt_logprobs=-1)


def test_completion_streaming(client: openai.OpenAI) -> None:
    whole = completed(client).choices[0].text
    chunks = list(completed(client, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    assert sum(chunk.choices[0].finish_reason is not None for chunk in chunks) == 1
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)


def test_parallel_streaming(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"n": 3, "temperature": 0.9, "seed": 3}
    whole = [choice.text for choice in completed(client, **fields).choices]
    texts, num_ends = [""] * 3, 0
    for chunk in completed(client, stream=True, **fields):
        texts[chunk.choices[0].index] += chunk.choices[0].text
        num_ends += chunk.choices[0].finish_reason is not None
    assert (texts, num_ends) == (whole, 3)


@pytest.mark.parametrize("create", [completed, chatted])
def test_stream_options(client: openai.OpenAI, create: Any) -> None:
    silent = list(create(client, stream=True, stream_options={"include_usage": False}))
    assert all(chunk.usage is None for chunk in silent)
    *chunks, last = create(client, stream=True, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks)
    assert (last.choices, last.usage.completion_tokens) == ([], 5)
    *chunks, last = create(client, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert all(chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens for chunk in chunks)
    for options in ({"include_usage": True}, {"include_usage": None}):
        with pytest.raises(openai.BadRequestError):
            create(client, stream=False, stream_options=options)


@pytest.mark.parametrize("prompts", [[PROMPT] * 2, [IDS] * 2])
def test_batch_completions(client: openai.OpenAI, prompts: Any) -> None:
    whole = completed(client, prompt=prompts)
    assert len(whole.choices) == 2
    assert whole.choices[0].text == whole.choices[1].text
    texts = ["", ""]
    for chunk in completed(client, prompt=prompts, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_logit_bias_forces_and_forbids(client: openai.OpenAI) -> None:
    forced = completed(client, logit_bias={"100": 100}, return_token_ids=True).choices[0]
    assert forced.token_ids == [100] * 5
    first = completed(client, return_token_ids=True).choices[0].token_ids
    without = completed(client, logit_bias={str(token_id): -100 for token_id in first}, return_token_ids=True).choices[0]
    assert not set(first) & set(without.token_ids)


def test_allowed_token_ids(client: openai.OpenAI) -> None:
    choice = completed(client, allowed_token_ids=[50], return_token_ids=True).choices[0]
    assert choice.token_ids == [50] * 5
    assert choice.text == byte_level().decode([50]) * 5
    for wrong in ([], [VOCAB_SIZE + 5]):
        with pytest.raises(openai.BadRequestError):
            completed(client, allowed_token_ids=wrong)


@pytest.mark.parametrize("prompt", [PROMPT, IDS])
def test_echo_with_logprobs(client: openai.OpenAI, prompt: Any) -> None:
    choice = completed(client, prompt=prompt, echo=True, logprobs=1).choices[0]
    assert choice.text.startswith(PROMPT)
    logprobs = choice.logprobs
    assert len(logprobs.text_offset) == len(logprobs.tokens) == len(logprobs.token_logprobs) == len(IDS) + 5
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    assert all(logprob <= 0 for logprob in logprobs.token_logprobs[1:])
    assert all(1 <= len(top) <= 2 for top in logprobs.top_logprobs[1:])
    assert logprobs.text_offset[0] == 0


def test_stop_strings_end_a_text(client: openai.OpenAI) -> None:
    whole = completed(client, max_tokens=20).choices[0].text
    stop = whole[3:5]
    choice = completed(client, max_tokens=20, stop=[stop]).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (whole[: whole.index(stop)], "stop", stop)
    kept = completed(client, max_tokens=20, stop=stop, include_stop_str_in_output=True).choices[0]
    assert kept.text == whole[: whole.index(stop) + len(stop)]


@pytest.mark.parametrize(
    "fields",
    [
        *({"prompt": []}, {"prompt": [[]]}, {"prompt": None}, {"prompt": 1.5}, {"prompt": [[1], "x"]}, {"prompt": [VOCAB_SIZE]}),
        *({"max_tokens": -1}, {"temperature": -1}, {"top_p": 0}, {"n": 0}, {"seed": 2**70}),
        *({"stop_token_ids": ["x"]}, {"logit_bias": {"x": 1}}, {"logit_bias": {"1": 1000}}, {"truncate_prompt_tokens": -2}),
    ],
)
def test_invalid_request_is_400(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        completed(client, **fields)
    assert str(caught.value.param).startswith(next(iter(fields))), "the field is named"


def test_oversized_request_is_400(client: openai.OpenAI) -> None:
    for fields in ({"max_tokens": 5000}, {"prompt": [40] * 5000}):
        with pytest.raises(openai.BadRequestError) as caught:
            completed(client, **fields)
        assert caught.value.code == "context_length_exceeded"


# test_chat.py


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    assert chatted(client).choices[0].logprobs is None
    assert chatted(client, logprobs=False).choices[0].logprobs is None
    for num in (0, 5):
        content = chatted(client, logprobs=True, top_logprobs=num).choices[0].logprobs.content
        assert len(content) == 5
        assert all(num <= len(entry.top_logprobs) <= num + 1 for entry in content)


def test_a_session_goes_on(client: openai.OpenAI) -> None:
    first = chatted(client)
    message = first.choices[0].message
    assert (message.role, first.choices[0].finish_reason, first.usage.completion_tokens) == ("assistant", "length", 5)
    second = chatted(client, messages=[*HELLO, {"role": "assistant", "content": message.content}, *HELLO[1:]])
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_chat_streaming(client: openai.OpenAI) -> None:
    whole = chatted(client).choices[0].message.content
    chunks = list(chatted(client, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]


def test_parts_of_content_are_a_text(client: openai.OpenAI) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "what is 1+1?"}]}]
    text = [{"role": "user", "content": "what is 1+1?"}]
    assert chatted(client, messages=parts).choices[0].message.content == chatted(client, messages=text).choices[0].message.content


def test_the_newer_name_of_the_limit_wins(client: openai.OpenAI) -> None:
    assert chatted(client, max_tokens=9, max_completion_tokens=2).usage.completion_tokens == 2


def test_a_seed_is_64_bits(client: openai.OpenAI) -> None:
    for seed in (2**63, -(2**63) - 1):
        with pytest.raises(openai.BadRequestError):
            chatted(client, seed=seed)


def test_the_ids_of_tokens(client: openai.OpenAI) -> None:
    choice = completed(client, return_token_ids=True).choices[0]
    assert (choice.prompt_token_ids, len(choice.token_ids)) == (IDS, 5)
    assert byte_level().decode(choice.token_ids) == choice.text
    streamed = [chunk.choices[0].token_ids or [] for chunk in completed(client, return_token_ids=True, stream=True)]
    assert [token_id for part in streamed for token_id in part] == choice.token_ids
    named = completed(client, return_token_ids=True, return_tokens_as_token_ids=True, logprobs=0).choices[0]
    assert named.logprobs.tokens == [f"token_id:{token_id}" for token_id in choice.token_ids]


def test_truncation(client: openai.OpenAI) -> None:
    assert completed(client, truncate_prompt_tokens=2).usage.prompt_tokens == 2
    long = "x " * 3000
    with pytest.raises(openai.BadRequestError):
        completed(client, prompt=long)
    assert completed(client, prompt=long, truncate_prompt_tokens=10).usage.prompt_tokens == 10


# test_tokenization.py


@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_tokenize_and_back(url: str, add_special_tokens: bool) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "add_special_tokens": add_special_tokens}
    answer = httpx.post(url + "/tokenize", json=body, timeout=PATIENCE_S).json()
    assert {"tokens": IDS, "count": len(IDS), "token_strs": None}.items() <= answer.items()
    assert httpx.post(url + "/detokenize", json={"model": MODEL, "tokens": IDS}, timeout=PATIENCE_S).json() == {"prompt": PROMPT}
    strings = httpx.post(url + "/tokenize", json={**body, "return_token_strs": True}, timeout=PATIENCE_S).json()["token_strs"]
    assert strings == byte_level().convert_ids_to_tokens(IDS)


@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_tokenize_chat(url: str, add_generation_prompt: bool) -> None:
    body = {"model": MODEL, "messages": HELLO, "add_generation_prompt": add_generation_prompt}
    text = byte_level().apply_chat_template(HELLO, add_generation_prompt=add_generation_prompt, tokenize=False)
    assert httpx.post(url + "/tokenize", json=body, timeout=PATIENCE_S).json()["tokens"] == byte_level().encode(
        text, add_special_tokens=False
    )


def test_the_tokenizer_is_described(url: str) -> None:
    info = httpx.get(url + "/tokenizer_info", timeout=PATIENCE_S).json()
    assert info["tokenizer_class"]
    assert info["chat_template"] == byte_level().chat_template


# test_basic.py, test_error.py


def test_probes_and_version(url: str) -> None:
    assert httpx.get(url + "/health", timeout=PATIENCE_S).status_code == 200
    assert httpx.get(url + "/version", timeout=PATIENCE_S).json()["version"]
    assert httpx.get(url + "/load", timeout=PATIENCE_S).json() == {"server_load": 0}
    assert httpx.get(url + "/no/such/path", timeout=PATIENCE_S).status_code == 404


@pytest.mark.parametrize("body", [b"{", b"[]", b"null", b"\xff", b'{"model": "tiny", "prompt": NaN}', b"x" * 10_000])
def test_invalid_json_body_is_400(url: str, body: bytes) -> None:
    response = httpx.post(url + "/v1/completions", content=body, headers={"content-type": "application/json"}, timeout=PATIENCE_S)
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert len(response.content) < 2000, "what was sent does not come back"


def test_requests_that_are_left_leave_room(url: str, client: openai.OpenAI) -> None:
    def leave(_: int) -> None:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 200, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=PATIENCE_S) as response:
            next(response.iter_lines())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(16)))
    assert completed(client).choices[0].text


def test_metrics_are_vllms(url: str, client: openai.OpenAI) -> None:
    completed(client)
    names = {
        line.split("{")[0].split(" ")[0]
        for line in httpx.get(url + "/metrics", timeout=PATIENCE_S).text.splitlines()
        if line[:1] != "#"
    }
    assert names >= {
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:prompt_tokens_total"),
        *("vllm:generation_tokens_total", "vllm:request_success_total", "vllm:time_to_first_token_seconds_sum"),
        *("vllm:inter_token_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_count", "vllm:request_prompt_tokens_sum"),
        *("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"),
    }


def test_a_stream_is_server_sent_events(url: str) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "stream": True, "max_tokens": 3}
    response = httpx.post(url + "/v1/completions", json=body, timeout=PATIENCE_S)
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events[:-2])
