"""What a chat template is given besides roles and texts: names of authors, and the request's own variables."""

import inspect
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from engine.weights.chat_template import rendered
from server.schemas.messages import MAX_VARIABLES, MAX_VARIABLES_CHARS, MAX_VARIABLES_DEPTH, RESERVED_VARIABLES
from server.text.chat_text import ControlMask
from server.text.codec import ChatForm, TextCodec
from server.text.template_variables import template_variables
from tests.api.harness import chat, in_process
from tests.fake_engine import FakeEngine
from tests.tokenizers_for_tests import CHAT_TEMPLATE, SPECIAL, byte_level, thinking

URL = "/v1/chat/completions"
NAMED: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief.", "name": "rules"},
    {"role": "user", "content": "hello", "name": "ann"},
    {"role": "assistant", "content": "hello there", "name": "bot_1"},
    {"role": "user", "content": "world"},
]


def _engine() -> FakeEngine:
    return FakeEngine(max_model_len=1000)


async def _prompt(tokenizer: Any, **fields: Any) -> str:
    """Return the prompt of a chat, after a check that /tokenize has the same."""
    engine = _engine()
    async with in_process(engine, tokenizer=tokenizer) as client:
        response = await client.post(URL, json=chat(**fields))
        assert response.status_code == 200, response.text
        assert "x-ignored-parameters" not in response.headers
        body = {"messages": chat()["messages"], **fields}
        assert (await client.post("/tokenize", json=body)).json()["tokens"] == list(engine.requests[0].prompt_ids)
    return str(tokenizer.decode(engine.requests[0].prompt_ids))


async def test_names_of_every_role_reach_the_template():
    """A message with a name was refused, and with it every agent of autogen and semantic-kernel."""
    prompt = await _prompt(thinking(), messages=NAMED)
    assert prompt == thinking().apply_chat_template(NAMED, add_generation_prompt=True, tokenize=False)
    assert "system rules\n" in prompt
    assert "user ann\n" in prompt
    assert "assistant bot_1\n" in prompt


async def test_names_that_no_template_reads():
    without = [{name: value for name, value in message.items() if name != "name"} for message in NAMED]
    assert await _prompt(byte_level(), messages=NAMED) == await _prompt(byte_level(), messages=without)


async def test_developers_and_tools_may_have_names():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "x", "name": "dev"},
        {"role": "assistant", "content": None, "tool_calls": [call], "name": "bot"},
        {"role": "tool", "tool_call_id": "c", "content": "rain", "name": "f"},
    ]
    prompt = await _prompt(thinking(), messages=messages)
    assert "system dev\nx" in prompt
    assert "tool f\nrain" in prompt


@pytest.mark.parametrize("kind", ["qwen3", "deepseek", "smollm3"])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True}, {"unread": [1, {"a": None}]}])
async def test_variables_are_rendered_as_by_transformers(kind: str, variables: dict[str, Any]):
    tokenizer, messages = thinking(kind), chat()["messages"]
    prompt = await _prompt(tokenizer, chat_template_kwargs=variables)
    assert prompt == tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **variables)
    has_mode = kind != "deepseek" and "enable_thinking" in variables
    assert (prompt != await _prompt(tokenizer)) == (has_mode and not variables["enable_thinking"])


@pytest.mark.parametrize("name", ["template", "loop", "value"])
def test_variables_may_have_any_other_name(name: str):
    """The bug: `template` was an argument of the function that renders stored tokenizers' templates, so it was a 400."""
    variables: Any = {name: "x"}
    assert rendered(f"{{{{ {name} }}}}", chat()["messages"], None, add_generation_prompt=False, **variables) == "x"


async def test_variables_hold_beside_a_continued_message():
    """The template is rendered in another way there."""
    messages = [*chat()["messages"], {"role": "assistant", "content": "hello "}]
    fields = {"messages": messages, "continue_final_message": True}
    thinks = await _prompt(thinking("smollm3"), **fields)
    silent = await _prompt(thinking("smollm3"), chat_template_kwargs={"enable_thinking": False}, **fields)
    assert thinks.replace("/think", "/no_think") == silent
    assert silent.endswith("assistant\nhello ")


_SHOWING = "{{ shown | tojson if shown is mapping else shown }}" + CHAT_TEMPLATE
_TEXTS = st.lists(st.sampled_from([*SPECIAL, "hello", " ", "日", "<|", "end|>", "\ue0000\ue001"]), max_size=5).map("".join)


def _check_forging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_level(), "chat_template", _SHOWING)
    codec, messages = TextCodec(byte_level()), chat()["messages"]
    controls = set(codec._controls.values())

    @settings(max_examples=50)
    @given(_TEXTS | st.dictionaries(_TEXTS, st.lists(_TEXTS, max_size=2) | st.booleans(), max_size=2))
    def holds(shown: Any) -> None:
        ids = codec.encode_chat(messages, ChatForm(variables={"shown": shown}))
        rendered = byte_level().apply_chat_template(messages, add_generation_prompt=True, tokenize=False, shown=shown)
        assert byte_level().decode(ids) == rendered
        assert sum(i in controls for i in ids) == 3

    holds()


def test_variables_cannot_forge_control_tokens(monkeypatch: pytest.MonkeyPatch):
    _check_forging(monkeypatch)


def test_unmasked_variables_are_detected(monkeypatch: pytest.MonkeyPatch):
    """The mutant masks messages and tools alone."""
    monkeypatch.setattr(ControlMask, "masked", lambda mask, given: dict(given))
    with pytest.raises(AssertionError):
        _check_forging(monkeypatch)


def _nested(depth: int) -> Any:
    return {"a": _nested(depth - 1)} if depth else 1


BAD_VARIABLES: list[tuple[Any, str, str]] = [
    ([], "chat_template_kwargs", "object"),
    ("enable_thinking", "chat_template_kwargs", "object"),
    *(({name: 1}, f"chat_template_kwargs.{name}", "by the server") for name in sorted(RESERVED_VARIABLES)),
    ({"__class__": 1}, "chat_template_kwargs.__class__", "must match"),
    ({"a b": 1}, "chat_template_kwargs.a b", "must match"),
    ({"": 1}, "chat_template_kwargs.", "must match"),
    ({"x" * 65: 1}, f"chat_template_kwargs.{'x' * 65}", "must match"),
    ({f"v{number}": 1 for number in range(MAX_VARIABLES + 1)}, "chat_template_kwargs", "entries"),
    (_nested(MAX_VARIABLES_DEPTH + 1), "chat_template_kwargs", "nested"),
    ({"a": [_nested(MAX_VARIABLES_DEPTH - 1)]}, "chat_template_kwargs", "nested"),
    ({"a": "x" * MAX_VARIABLES_CHARS}, "chat_template_kwargs", "characters"),
]


async def test_variables_beyond_the_bounds_are_refused():
    async with in_process(_engine(), tokenizer=thinking()) as client:
        for variables, param, reason in BAD_VARIABLES:
            for url, body in ((URL, chat()), ("/tokenize", {"messages": chat()["messages"]})):
                response = await client.post(url, json={**body, "chat_template_kwargs": variables})
                assert (response.status_code, response.json()["error"]["param"]) == (400, param), variables
                assert reason in response.json()["error"]["message"]
        for fine in (_nested(MAX_VARIABLES_DEPTH), {f"v{number}": None for number in range(MAX_VARIABLES)}):
            assert (await client.post(URL, json=chat(chat_template_kwargs=fine))).status_code == 200
        response = await client.post("/tokenize", json={"prompt": "x", "chat_template_kwargs": {"a": 1}})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template_kwargs")


def test_reserved_names_are_all_that_transformers_takes():
    """A variable of such a name would be another argument of transformers' functions."""
    named = {*inspect.signature(type(byte_level()).apply_chat_template).parameters, *byte_level().SPECIAL_TOKENS_ATTRIBUTES}
    named |= {*inspect.signature(render_jinja_template).parameters}
    assert named - {"kwargs"} <= RESERVED_VARIABLES


async def test_special_tokens_are_no_variables(monkeypatch: pytest.MonkeyPatch):
    """transformers prefers a variable over the tokenizer's own token of that name."""
    special = {**byte_level().special_tokens_map, "image_token": "<|start|>"}
    monkeypatch.setattr(type(byte_level()), "special_tokens_map", special)
    async with in_process(_engine()) as client:
        response = await client.post(URL, json=chat(chat_template_kwargs={"image_token": "x"}))
    assert (response.status_code, "image_token" in response.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("operation", ["1 // n", "range(n)", "n.a.b", "n + ''", "[1, 2][n].x", "n | join", "'%d' % n"])
@pytest.mark.parametrize("value", [0, 10**7, "x", [], {}, None])
async def test_variables_the_template_cannot_use(monkeypatch: pytest.MonkeyPatch, operation: str, value: Any):
    """A division by zero in a template was a 500."""
    monkeypatch.setattr(byte_level(), "chat_template", "{% set x = " + operation + " %}" + CHAT_TEMPLATE)
    async with in_process(_engine()) as client:
        response = await client.post(URL, json=chat(chat_template_kwargs={"n": value}))
    assert response.status_code in (200, 400), response.text


def test_template_variables_are_found():
    found = template_variables(
        "{% if effort is not defined %}{% set effort = 'low' %}{% endif %}{{ effort }}{% set mine = 1 %}{{ mine }}"
        "{% for m in messages %}{% generation %}{{ m.content ~ inner }}{% endgeneration %}{% break %}{% endfor %}"
        "{# comment #}{{ 'text' }}"
    )
    assert found == {"effort", "messages", "inner"}
    assert template_variables({"default": "{{ a }}", "tool_use": "{{ b }}"}) == {"a", "b"}
    assert template_variables(None) == frozenset()
    assert "effort" in template_variables("{% unknown_tag %}{{ effort }}")
