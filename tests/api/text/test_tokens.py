"""POST /tokenize, POST /detokenize, GET /tokenizer_info: they use the tokenizer as the generation endpoints do."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.chat_text import ControlMask
from server.text.codec import ChatForm, TextCodec, TextError
from tests.api.harness import MODEL, chat, completion, in_process
from tests.fake_engine import FakeEngine
from tests.tokenizers_for_tests import SPECIAL, byte_level, surrounding

MESSAGES = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "the end"}]


@pytest.fixture
def surrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve a tokenizer that puts special tokens around a text."""
    monkeypatch.setattr("tests.api.harness.byte_level", surrounding)


@pytest.mark.usefixtures("surrounded")
async def test_tokenize_returns_ids_of_generation_prompt():
    engine = FakeEngine()
    texts: list[dict[str, Any]] = [{}, {"add_special_tokens": True}, {"add_special_tokens": False}]
    chats = [*texts, {"add_generation_prompt": False}, {"continue_final_message": True}]
    async with in_process(engine) as client:
        for options in texts:
            answer = (await client.post("/tokenize", json={"prompt": "hello 日本", **options})).json()
            await client.post("/v1/completions", json=completion(prompt="hello 日本", **options))
            assert tuple(answer["tokens"]) == engine.requests[-1].prompt_ids
        for options in chats:
            answer = (await client.post("/tokenize", json={"model": MODEL, "messages": MESSAGES, **options})).json()
            await client.post("/v1/chat/completions", json=chat(messages=MESSAGES, **options))
            assert tuple(answer["tokens"]) == engine.requests[-1].prompt_ids
    lengths = [len(request.prompt_ids) for request in engine.requests]
    assert lengths[0] == lengths[1] == lengths[2] + 2  # a bare text has special tokens around it unless they are refused
    assert lengths[3] == lengths[4] - 2 == lengths[5]  # a conversation has those of its template


async def test_an_answer_has_the_shape_of_vllm():
    ids = byte_level().encode("hello 日")
    async with in_process(FakeEngine(max_model_len=77)) as client:
        plain = (await client.post("/tokenize", json={"prompt": "hello 日"})).json()
        spelled = (await client.post("/tokenize", json={"prompt": "hello 日", "return_token_strs": True})).json()
        empty = (await client.post("/tokenize", json={"prompt": ""})).json()
    assert plain == {"count": len(ids), "max_model_len": 77, "tokens": ids, "token_strs": None}
    assert spelled == {**plain, "token_strs": byte_level().convert_ids_to_tokens(ids)}
    assert (empty["count"], empty["tokens"]) == (0, [])


async def test_detokenizing_restores_text_with_special_tokens():
    """Also where a text has more tokens than a prompt may have."""
    text = "<|start|>user\nhello 日本語 😀<|end|>" * 3
    async with in_process(FakeEngine(max_model_len=20)) as client:
        answer = (await client.post("/tokenize", json={"prompt": text})).json()
        assert answer["count"] > 20
        assert (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json() == {"prompt": text}
        assert (await client.post("/detokenize", json={"model": MODEL, "tokens": []})).json() == {"prompt": ""}
        assert (await client.post("/detokenize", json={"tokens": [399]})).json() == {"prompt": ""}  # only pads the vocabulary


async def test_the_tokenizer_is_described():
    async with in_process(FakeEngine()) as client:
        info = (await client.get("/tokenizer_info")).json()
    assert info["tokenizer_class"] == type(byte_level()).__name__
    assert (info["vocab_size"], info["chat_template"]) == (len(byte_level()), byte_level().chat_template)
    assert (info["eos_token"], info["bos_token"]) == ("<|end|>", None)
    assert info["special_tokens"] == {token: byte_level().convert_tokens_to_ids(token) for token in SPECIAL}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
    ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
    ("/tokenize", {"prompt": "x", "continue_final_message": True}, "continue_final_message"),
    ("/tokenize", {"prompt": ["x"]}, "prompt"),
    ("/tokenize", {"prompt": "x", "return_token_strs": 1}, "return_token_strs"),
    ("/tokenize", {"prompt": "x" * 100_000}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
    ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
    ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ("/tokenize", {"prompt": "x", "colour": "red"}, "colour"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [400]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens.0"),
    ("/detokenize", {"tokens": [2**64]}, "tokens.0"),
    ("/detokenize", {"tokens": "5"}, "tokens"),
    ("/detokenize", {"tokens": [5] * 100_000}, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED)
async def test_unsupported_fields_are_refused_by_name(path: str, body: dict[str, Any], param: str):
    async with in_process(FakeEngine(), strict=True) as client:
        response = await client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_unknown_model_is_404_missing_is_default():
    async with in_process(FakeEngine()) as client:
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
            response = await client.post(path, json={"model": "gpt-9", **body})
            assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
            assert (await client.post(path, json=body)).status_code == 200


class _LooksForTheText(TextCodec):
    """The mutant: the prompt ends behind the last occurrence of the last message's words, in any message."""

    def _rendered(self, conversation: list[dict[str, Any]], form: ChatForm, tools: list[dict[str, Any]]) -> str:
        text = self._from_template(conversation, tools, False, {})
        words: str = conversation[-1]["content"]
        return text[: text.rindex(words) + len(words)]


def _check_continuing(codec: TextCodec) -> None:
    words = st.sampled_from([*SPECIAL, "hello", "end", "|>", "\n", " ", "日"])
    contents = st.lists(words, max_size=4).map("".join)

    @given(st.lists(contents, min_size=1, max_size=3))
    def ends_inside_the_last(texts: list[str]) -> None:
        messages = [{"role": "user", "content": text} for text in texts]
        ids = codec.encode_chat(messages, ChatForm(continues_last=True))
        rendered = byte_level().apply_chat_template(messages, add_generation_prompt=False, tokenize=False)
        assert byte_level().decode(ids) == rendered.removesuffix("<|end|>\n")

    ends_inside_the_last()


def test_continued_message_ends_the_prompt():
    _check_continuing(TextCodec(byte_level()))


def test_looking_for_the_text_is_detected():
    with pytest.raises(AssertionError):
        _check_continuing(_LooksForTheText(byte_level()))


def test_template_omitting_last_message_cannot_continue(monkeypatch: pytest.MonkeyPatch):
    codec = TextCodec(byte_level())
    for template in ("{{ messages[0].content }}", "{{ messages[-1].content }}{{ messages[-1].content }}"):
        monkeypatch.setattr(byte_level(), "chat_template", template)
        with pytest.raises(TextError, match="cannot be continued"):
            codec.encode_chat(MESSAGES, ChatForm(continues_last=True))


@given(st.text(st.sampled_from("he lo日<|end|>"), max_size=12))
def test_surrounding_special_tokens_come_from_tokenizer(text: str):
    codec, form = TextCodec(surrounding()), ChatForm(adds_special_tokens=True)
    messages = [{"role": "user", "content": text}]
    rendered = surrounding().apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    if not ControlMask(messages, codec._finder).is_needed:
        assert list(codec.encode_chat(messages, form)) == surrounding().encode(rendered, add_special_tokens=True)
    start, end = surrounding().convert_tokens_to_ids(["<|start|>", "<|end|>"])
    assert codec.encode_chat(messages, form) == (start, *codec.encode_chat(messages), end)
