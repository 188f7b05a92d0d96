"""The first space of an answer where the decoder strips one at the beginning of a text, as sentencepiece's does."""

from copy import deepcopy
from typing import Any

import pytest

from tests.api.harness import MODEL, chat, completion, in_process
from tests.fake_engine import FakeEngine, emits
from tests.tokenizers_for_tests import CHAT_TEMPLATE, byte_fallback

_IDS = byte_fallback().encode("the lazy", add_special_tokens=False)
_MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello"}]


async def _posted(path: str, body: dict[str, Any]) -> Any:
    tokenizer = deepcopy(byte_fallback())
    tokenizer.chat_template = CHAT_TEMPLATE
    async with in_process(FakeEngine(script=emits(_IDS), eos_token_ids=(0,)), tokenizer=tokenizer) as client:
        response = await client.post(path, json={"max_tokens": len(_IDS), **body})
    assert response.status_code == 200, response.text
    return response.json()


async def test_completions_continue_the_prompts_text():
    """The bug: the space was lost, so that stop strings were missed which the same request with `echo` found."""
    choice = (await _posted("/v1/completions", completion(prompt="hello")))["choices"][0]
    echoed = (await _posted("/v1/completions", completion(prompt="hello", echo=True)))["choices"][0]
    assert (choice["text"], echoed["text"]) == (" the lazy", "hello the lazy")
    for echo in (False, True):
        stopped = (await _posted("/v1/completions", completion(prompt="hello", stop=[" the"], echo=echo)))["choices"][0]
        assert (stopped["text"], stopped["stop_reason"]) == ("hello" if echo else "", " the")


async def test_continued_messages_keep_the_space():
    continued = await _posted("/v1/chat/completions", chat(messages=_MESSAGES, continue_final_message=True))
    assert continued["choices"][0]["message"]["content"] == " the lazy"
    answer = await _posted("/v1/messages", {"model": MODEL, "messages": _MESSAGES})
    assert answer["content"][0]["text"] == " the lazy"


@pytest.mark.parametrize(("fields", "text"), [({}, "the lazy"), ({"structured_outputs": {"choice": [" the lazy"]}}, " the lazy")])
async def test_grammars_hold_for_the_first_space(fields: dict[str, Any], text: str):
    """An answer of its own begins without it. The bug: a constrained text was without the space that its grammar requires."""
    answer = await _posted("/v1/chat/completions", chat(messages=_MESSAGES[:1], **fields))
    assert answer["choices"][0]["message"]["content"] == text


async def test_echo_of_no_text_changes_nothing():
    """The bug: with `echo` the answer to a prompt of special tokens was without its space."""
    for echo in (False, True):
        choice = (await _posted("/v1/completions", completion(prompt="<|start|>", echo=echo)))["choices"][0]
        assert choice["text"] == " the lazy"


async def test_stop_strings_end_behind_the_prompt():
    """The bug: a newline at its end, a byte token, was found as soon as the answer began with another byte token."""
    tokenizer = byte_fallback()
    newline = tokenizer.convert_tokens_to_ids("<0x0A>")
    ids = [newline + byte - 10 for byte in "é".encode()] + list(_IDS)
    async with in_process(FakeEngine(script=emits(ids)), tokenizer=tokenizer) as client:
        for echo in (False, True):
            body = completion(prompt="hello\n", stop=["\n"], echo=echo, max_tokens=len(ids))
            choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == ("hello\n" * echo + "é the lazy", "length")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_predictions_have_the_answers_tokens(path: str):
    tokenizer = deepcopy(byte_fallback())
    tokenizer.chat_template = CHAT_TEMPLATE
    async with in_process(engine := FakeEngine(script=emits(_IDS)), tokenizer=tokenizer) as client:
        body = completion(max_tokens=len(_IDS)) if path == "/v1/completions" else chat(max_tokens=len(_IDS))
        answer = (await client.post(path, json=body)).json()["choices"][0]
        text = answer["text"] if "text" in answer else answer["message"]["content"]
        await client.post(path, json={**body, "prediction": {"type": "content", "content": text}})
    assert list(engine.requests[1].prediction_ids) == _IDS
