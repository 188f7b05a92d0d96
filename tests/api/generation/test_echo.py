"""A prompt that is given back: before each text, in logprobs too, the same streamed and not, and never searched for stops."""

from dataclasses import replace
from typing import Any

import pytest

from server.generation import sample as choice
from server.generation.prompt_echo import PromptEcho
from server.text.codec import TextCodec
from server.text.token_entry import entry_of
from tests.api.harness import chat, completion, data_of, in_process
from tests.fake_engine import FakeEngine, emits
from tests.tokenizers_for_tests import byte_fallback, byte_level

PROMPT = "the quick 🙀 fox"
OUTPUT = "hello world"
PROMPT_IDS, OUTPUT_IDS = byte_level().encode(PROMPT), byte_level().encode(OUTPUT)


async def answers(**fields: Any) -> list[dict[str, Any]]:
    """Return the choices of a request, not streamed and put together of a stream."""
    body = completion(prompt=PROMPT, max_tokens=50, **fields)
    found = []
    for streams in (False, True):
        async with in_process(FakeEngine(emits(OUTPUT_IDS), chunks=(1, 3))) as client:
            answer = await client.post("/v1/completions", json={**body, "stream": streams})
        assert answer.status_code == 200, answer.text
        found.append(_joined(data_of(answer.text)) if streams else answer.json()["choices"][0])
    assert found[0] == found[1]
    return found


def _joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    choices = [chunk["choices"][0] for chunk in chunks]
    whole = {**choices[-1], "text": "".join(one["text"] for one in choices)}
    if whole["logprobs"] is not None:
        parts = [one["logprobs"] for one in choices]
        whole["logprobs"] = {
            name: None if value is None else [entry for part in parts for entry in part[name]]
            for name, value in whole["logprobs"].items()
        }
    return whole


async def test_the_prompt_comes_first():
    (choice, _) = await answers(echo=True)
    assert (choice["text"], choice["logprobs"]) == (PROMPT + OUTPUT, None)
    assert (await answers(echo=False))[0]["text"] == OUTPUT


async def check_logprobs() -> None:
    (choice, _) = await answers(echo=True, logprobs=2)
    logprobs, ids = choice["logprobs"], [*PROMPT_IDS, *OUTPUT_IDS]
    assert choice["text"] == PROMPT + OUTPUT
    assert len(logprobs["tokens"]) == len(ids)
    assert logprobs["token_logprobs"] == [None, *(pytest.approx(-i / 100) for i in ids[1:])]
    assert logprobs["top_logprobs"][0] is None
    assert {len(top) for top in logprobs["top_logprobs"][1:]} == {3}
    readable = zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
    assert all(choice["text"].startswith(token, offset) for token, offset in readable if not token.startswith("bytes:"))
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


async def test_echoed_tokens_are_in_logprobs():
    await check_logprobs()


async def test_zero_logprobs_return_no_alternatives():
    logprobs = (await answers(echo=True, logprobs=0))[0]["logprobs"]
    assert logprobs["top_logprobs"] is None
    assert len(logprobs["token_logprobs"]) == len(PROMPT_IDS) + len(OUTPUT_IDS)


async def test_stop_strings_ignore_echoed_prompt():
    (choice, _) = await answers(echo=True, stop=["quick", " world"])
    assert (choice["text"], choice["finish_reason"]) == (PROMPT + "hello", "stop")


async def test_each_choice_has_its_own_prompt():
    async with in_process(FakeEngine(emits(OUTPUT_IDS))) as client:
        answer = await client.post("/v1/completions", json=completion(prompt=["hello", "the"], n=2, echo=True, max_tokens=9))
    texts = [choice["text"] for choice in answer.json()["choices"]]
    assert [text.startswith(prompt) for text, prompt in zip(texts, ["hello", "hello", "the", "the"], strict=True)] == [True] * 4


@pytest.mark.parametrize(("prompt", "output"), [("the", " cat sat"), ("he said ☃", "☃ and left"), ("tell", "the hell")])
async def test_prompt_and_answer_are_one_text(prompt, output, monkeypatch):
    """A tokenizer that strips the first space, and a character that the prompt's last token leaves unfinished."""
    await check_joint(prompt, output, monkeypatch)


async def check_joint(prompt: str, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.api.harness.byte_level", byte_fallback)
    ids = [*byte_fallback().encode(prompt), *byte_fallback().encode(output)]
    for cut in range(1, len(ids) - 1):
        async with in_process(FakeEngine(emits(ids[cut:]), chunks=(1, 2))) as client:
            body = completion(prompt=ids[:cut], echo=True, max_tokens=50)
            answer = (await client.post("/v1/completions", json=body)).json()
        assert answer["choices"][0]["text"] == byte_fallback().decode(ids, skip_special_tokens=True)


async def test_joint_decoding_kills_separate_prompt_decoding(monkeypatch):
    monkeypatch.setattr(PromptEcho, "echo", decoded_alone)
    with pytest.raises(AssertionError):
        await check_joint("the", " cat sat", monkeypatch)


def decoded_alone(self, _detokenizer):
    alone = TextCodec(byte_fallback()).detokenizer()
    text, entries = _ECHO(self, alone)
    return text + alone.close(), entries


async def test_too_many_prompt_logprobs_are_refused():
    async with in_process(FakeEngine(max_model_len=8192)) as client:
        ids = [5] * 4000
        fits = await client.post("/v1/completions", json=completion(prompt=ids, echo=True, logprobs=1, max_tokens=1))
        for fields, param in (({"echo": True, "logprobs": 20}, "logprobs"), ({"prompt_logprobs": 20}, "prompt_logprobs")):
            refused = await client.post("/v1/completions", json=completion(prompt=ids, **fields))
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert fits.status_code == 200


async def test_truncated_prompt_tokens_are_not_echoed():
    (choice, _) = await answers(echo=True, truncate_prompt_tokens=4)
    assert choice["text"] == byte_level().decode(PROMPT_IDS[-4:]) + OUTPUT


async def test_empty_completion_still_echoes_prompt():
    async with in_process(FakeEngine(emits([9]), eos_token_ids=(9,))) as client:
        answer = await client.post("/v1/completions", json=completion(prompt=PROMPT, echo=True, logprobs=1))
    assert answer.json()["choices"][0]["text"] == PROMPT


async def prompt_logprobs(url: str, body: dict[str, Any]) -> Any:
    async with in_process(FakeEngine(emits(OUTPUT_IDS))) as client:
        answer = (await client.post(url, json={**body, "prompt_logprobs": 2, "n": 2})).json()
    holder = answer if "messages" in body else answer["choices"][1]
    return holder["prompt_logprobs"]


async def test_candidates_of_the_prompts_tokens():
    entries = await prompt_logprobs("/v1/completions", completion(prompt=PROMPT))
    assert entries[0] is None
    for token_id, candidates in zip(PROMPT_IDS[1:], entries[1:], strict=True):
        assert list(candidates) == [str(token_id), *(str(i) for i in (0, 1) if i != token_id)]
        assert candidates[str(token_id)] == {
            "logprob": pytest.approx(-token_id / 100),
            "rank": 1,
            "decoded_token": byte_level().decode([token_id]),
        }
        assert candidates["1"]["rank"] == 2
    assert len(await prompt_logprobs("/v1/chat/completions", chat())) == 19
    async with in_process(FakeEngine()) as client:
        refused = await client.post("/v1/completions", json=completion(prompt_logprobs=0, stream=True))
        silent = await client.post("/v1/completions", json=completion())
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
    assert "prompt_logprobs" not in silent.json()["choices"][0]


PROMPTS: list[Any] = [PROMPT, PROMPT_IDS, [PROMPT, "hello"], [PROMPT_IDS, byte_level().encode("hello")]]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"logprobs": 0, "n": 2}, {"prompt_logprobs": 1}, {"stop": "quick"}])
async def test_a_prompt_is_scored_without_generating(prompt: Any, fields: dict[str, Any]):
    """The bug: `max_tokens` 0 was refused. Beside `echo` the answer is the prompt, with its log-probabilities on request."""
    prompts = prompt if isinstance(prompt[0], (str, list)) and not isinstance(prompt, str) else [prompt]
    body = completion(prompt=prompt, max_tokens=0, echo=True, **fields)
    engine = FakeEngine(emits(OUTPUT_IDS))
    async with in_process(engine) as client:
        whole = (await client.post("/v1/completions", json=body)).json()
        streamed = None
        if "prompt_logprobs" not in fields:
            streamed = data_of((await client.post("/v1/completions", json={**body, "stream": True})).text)
    assert {request.sampling.max_tokens for request in engine.requests} == {0}
    assert len(whole["choices"]) == len(prompts) * fields.get("n", 1)
    for returned in whole["choices"]:
        ids = engine.requests[returned["index"]].prompt_ids
        assert (returned["text"], returned["finish_reason"]) == (byte_level().decode(ids), "length")
        if "logprobs" in fields:
            assert returned["logprobs"]["token_logprobs"] == [None, *(pytest.approx(-i / 100) for i in ids[1:])]
            assert len(returned["logprobs"]["text_offset"]) == len(ids)
        assert len(returned.get("prompt_logprobs", ids)) == len(ids)
        if streamed is not None:
            parts = [one["choices"][0] for one in streamed if one["choices"][0]["index"] == returned["index"]]
            assert "".join(part["text"] for part in parts) == returned["text"]
            assert (parts[-1]["finish_reason"], parts[-1]["logprobs"]) == ("length", returned["logprobs"])
    assert whole["usage"]["completion_tokens"] == 0
    assert whole["usage"]["prompt_tokens"] == sum(
        len(request.prompt_ids) for request in engine.requests[: len(whole["choices"]) : fields.get("n", 1)]
    )


async def test_no_tokens_are_refused_without_echo():
    """As by vLLM; chats and Responses give no prompt back."""
    async with in_process(FakeEngine()) as client:
        for path, body in [
            ("/v1/completions", completion(max_tokens=0)),
            ("/v1/completions", completion(max_tokens=0, echo=False)),
            ("/v1/completions", completion(max_tokens=-1, echo=True)),
            ("/v1/completions", completion(max_tokens=0, echo=True, min_tokens=1)),
            ("/v1/chat/completions", chat(max_tokens=0)),
            ("/v1/chat/completions", chat(max_completion_tokens=0)),
        ]:
            refused = await client.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (
                400,
                next(name for name in ("min_tokens", "max_completion_tokens", "max_tokens") if name in body),
            )


async def test_prompt_filling_context_is_scored():
    """It was one token too long for any answer, and has none."""
    async with in_process(FakeEngine(max_model_len=16)) as client:
        full = completion(prompt=[5] * 16, echo=True, logprobs=0)
        scored = await client.post("/v1/completions", json={**full, "max_tokens": 0})
        longer = await client.post("/v1/completions", json={**full, "prompt": [5] * 17, "max_tokens": 0})
        answered = await client.post("/v1/completions", json={**full, "max_tokens": 1})
    assert [one.status_code for one in (scored, longer, answered)] == [200, 400, 400]


def echo_without_end(self, detokenizer):
    text, entries = _ECHO(self, detokenizer)
    return text[:-1], entries


def add_logprobs_once(self, logprobs):
    self._logprobs = self._logprobs or list(logprobs)


def scored_from_the_first(self, detokenizer):
    self._logprobs = self._logprobs[1:] + self._logprobs[:1]
    return _ECHO(self, detokenizer)


_ECHO = PromptEcho.echo


@pytest.mark.parametrize(
    ("name", "mutant"), [("echo", echo_without_end), ("add_logprobs", add_logprobs_once), ("echo", scored_from_the_first)]
)
async def test_logprobs_kill(name, mutant, monkeypatch):
    monkeypatch.setattr(PromptEcho, name, mutant)
    with pytest.raises((AssertionError, IndexError)):
        await check_logprobs()


async def test_logprobs_kill_zero_offsets(monkeypatch):
    monkeypatch.setattr(choice, "entry_of", lambda *args: replace(entry_of(*args), offset=0))
    with pytest.raises(AssertionError):
        await check_logprobs()
