"""Stored tokenizers give what transformers gives, without importing it."""

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from engine.weights import chat_template, stored_tokenizer
from engine.weights.stored_tokenizer import StoredTokenizer, load_tokenizer, stored_form
from tests import tokenizers_for_tests as small

TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte-level": small.byte_level,
    "tools": small.calling,
    "special tools": lambda: small.calling(special=True),
    "added tools": lambda: small.calling(special=False),
    "surrounding": small.surrounding,
    "byte fallback": small.byte_fallback,
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "naïve 日本語 😀", "name": None},
    {
        "role": "assistant",
        "content": "",
        "reasoning": "Let me see.",
        "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, 2.5, None]}}}],
    },
    {"role": "tool", "content": '{"y": "é"}'},
]
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "description": "à <b>", "parameters": {"type": "object", "properties": {}}}}
]
# Each uses one thing that the environment of transformers adds to jinja2's, or does differently.
TEMPLATES = {
    "exceptions": "{{ raise_exception('no ' + messages[0].role) }}",
    "json": "{{ messages | tojson }} {{ tools | tojson(indent=2) }}",
    "json options": "{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}",
    "ascii": "{{ messages | tojson(ensure_ascii=true) }}",
    "date": "{{ strftime_now('%d %B %Y') }}",
    "continue": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "break": "{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "generation": "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "blocks": "  {% if tools %}\n    tools\n  {% endif %}\n  {% for m in messages %}\n  {{ m.content }}\n  {% endfor %}",
    "namespace": "{% set ns = namespace(found=false, self='s') %}{% set ns.found = 2 %}{{ ns.found }}{{ ns.self }}",
    "private namespace": "{% set ns = namespace(_x=1) %}{{ ns }}",
    "private attribute": "{% set ns = namespace() %}{% set ns.__x__ = 1 %}",
    "dict": "{{ dict(a=1) }}{{ dict.fromkeys(['a'], 2) }}{{ dict.__class__ }}",
    "undefined": "{{ nothing }}{{ nothing.more }}",
    "undefined documents": "{{ documents is none }}{{ documents }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }};{% endfor %}",
    "missing name": "{% for m in messages %}{{ 'name' in m }}{{ m.name is defined }}{% endfor %}",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ unk_token }}",
    "mutation": "{{ messages.append(1) }}",
    "escape": "{{ ''.__class__.__mro__ }}",
    "format": "{{ '%s' | format(messages[1].content) }}{{ messages[0].content.split() }}{{ messages[0].content | trim | upper }}",
    "generation prompt": "{{ add_generation_prompt }}",
    "syntax": "{% if %}",
    "division": "{{ 1 / 0 }}",
    "sum": "{{ messages[0].content + 1 }}",
    "variables": "{{ enable_thinking is defined and enable_thinking }}{{ extra }}",
}


def stored(tokenizer: PreTrainedTokenizerFast) -> StoredTokenizer:
    found = StoredTokenizer.from_bytes(stored_form(tokenizer))
    assert found is not None
    return found


def outcome(render: Any) -> str:
    """Return the text, or the kind and the message of the error."""
    try:
        return str(render())
    except Exception as error:  # noqa: BLE001 (of any template)
        return f"{type(error).__name__}: {error}"


def with_template(name: str, template: Any) -> tuple[StoredTokenizer, PreTrainedTokenizerFast]:
    backend = TOKENIZERS[name]().backend_tokenizer
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|start|>", eos_token="<|end|>", chat_template=template)
    return stored(theirs), theirs


@pytest.mark.parametrize("name", TOKENIZERS)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
    | st.lists(st.sampled_from(["<|end|>", "<tool_call>", "<unk>", " ", "the ", "é", "\n"])).map("".join)
)
def test_ids_and_texts_equal_those_of_transformers(name: str, text: str) -> None:
    """The front end must not change a prompt: a stored tokenizer encodes and decodes as the one it was stored from."""
    theirs = TOKENIZERS[name]()
    ours = _KEPT.setdefault(name, stored(theirs))
    for adds in (True, False):
        ids = ours.encode(text, add_special_tokens=adds)
        assert ids == theirs.encode(text, add_special_tokens=adds)
        for skips in (True, False):
            options = {"skip_special_tokens": skips, "clean_up_tokenization_spaces": False}
            assert ours.decode(ids, **options) == theirs.decode(ids, **options)
    split = ours.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert split == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)  # the split is not kept


_KEPT: dict[str, StoredTokenizer] = {}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_and_names_equal_those_of_transformers(name: str) -> None:
    theirs = TOKENIZERS[name]()
    ours = stored(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert len(ours) == len(theirs)
    assert [ours.convert_ids_to_tokens(i) for i in range(len(ours) + 2)] == [
        theirs.convert_ids_to_tokens(i) for i in range(len(theirs) + 2)
    ]
    assert {i: (token.content, token.special) for i, token in ours.added_tokens_decoder.items()} == {
        i: (token.content, token.special) for i, token in theirs.added_tokens_decoder.items()
    }
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template
    assert ours.class_name == type(theirs).__name__


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize(
    "template", [small.CHAT_TEMPLATE, small.TOOL_TEMPLATE, *TEMPLATES.values()], ids=["chat", "tool", *TEMPLATES]
)
def test_templates_render_as_in_transformers(template: str, opens: bool, tools: Any) -> None:
    """Texts and refusals are equal: a refusal's message is part of the answer to a client."""
    ours, theirs = with_template("byte-level", template)
    options = {"tools": tools, "add_generation_prompt": opens, "tokenize": False}
    assert outcome(lambda: ours.apply_chat_template(MESSAGES, **options)) == outcome(
        lambda: theirs.apply_chat_template(MESSAGES, **options)
    )
    assert MESSAGES[1]["name"] is None, "the caller's messages are not changed"


@pytest.mark.parametrize(
    "variables",
    [
        {"enable_thinking": True, "extra": {"a": [1]}},
        {"documents": [{"title": "t", "text": "é"}]},
        {"documents": ["no dict"]},
        {"eos_token": "other"},
    ],
)
@pytest.mark.parametrize("template", [TEMPLATES["variables"], TEMPLATES["undefined documents"], TEMPLATES["special tokens"]])
def test_variables_reach_a_template_as_in_transformers(template: str, variables: dict[str, Any]) -> None:
    ours, theirs = with_template("byte-level", template)
    options: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False, **variables}
    assert outcome(lambda: ours.apply_chat_template(MESSAGES, **options)) == outcome(
        lambda: theirs.apply_chat_template(MESSAGES, **options)
    )


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_several_templates_are_chosen_as_in_transformers(tools: Any) -> None:
    ours, theirs = with_template("byte-level", {"default": "d{{ messages | length }}", "tool_use": "t{{ tools | length }}"})
    options = {"tools": tools, "add_generation_prompt": False, "tokenize": False}
    assert ours.apply_chat_template(MESSAGES, **options) == theirs.apply_chat_template(MESSAGES, **options)
    named = {**options, "chat_template": "default"}
    assert ours.apply_chat_template(MESSAGES, **named) == theirs.apply_chat_template(MESSAGES, **named)


def test_conversations_without_messages_or_templates_are_refused() -> None:
    ours, _ = with_template("byte-level", small.CHAT_TEMPLATE)
    with pytest.raises(ValueError, match="empty conversation"):
        ours.apply_chat_template([], add_generation_prompt=True)
    bare, _ = with_template("byte-level", None)
    with pytest.raises(ValueError, match="none is the default"):
        bare.apply_chat_template(MESSAGES)


def test_a_changed_template_environment_is_detected() -> None:
    """The mutation of the comparison above: jinja2's own `tojson` escapes HTML."""
    ours, theirs = with_template("byte-level", TEMPLATES["json"])
    with patch.object(chat_template, "_to_json", lambda value, **_: json.dumps(value).replace("<", "\\u003c")):
        chat_template.compiled.cache_clear()
        text = ours.apply_chat_template(MESSAGES, TOOLS, add_generation_prompt=True)
    chat_template.compiled.cache_clear()
    assert text != theirs.apply_chat_template(MESSAGES, TOOLS, add_generation_prompt=True, tokenize=False)


def test_tokenizer_with_own_methods_uses_transformers() -> None:
    """A class may replace `encode` or `decode`; the tokenizers library's JSON does not show it."""

    class Reversed(PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return str(super()._decode(*args, **kwargs))[::-1]

    form = stored_form(Reversed(tokenizer_object=small.byte_level().backend_tokenizer))
    assert b"_decode" in form
    assert StoredTokenizer.from_bytes(form) is None


def test_tokenizer_that_differs_uses_transformers() -> None:
    """Not every difference is a method: attributes may change what a method of the base class does."""

    class Lower(PreTrainedTokenizerFast):
        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            return (lambda text, **options: found(text.lower(), **options)) if name == "encode" else found

    form = stored_form(Lower(tokenizer_object=small.byte_level().backend_tokenizer))
    assert b"differently" in form
    assert StoredTokenizer.from_bytes(form) is None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder's tokenizer, and an empty cache."""
    monkeypatch.setenv("LATEBRANCH_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model"
    small.surrounding().save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Store tokenizers in this process; return the folders."""
    done: list[Path] = []

    def store(folder: Path, target: Path) -> None:
        done.append(folder)
        assert stored_tokenizer.main(str(folder), str(target)) == 0

    monkeypatch.setattr(stored_tokenizer, "_store", store)
    return done


def test_folder_is_stored_once_until_changed(folder: Path, in_process: list[Path]) -> None:
    """A changed chat template must not be served from the cache."""
    first = load_tokenizer(folder)
    assert isinstance(first, StoredTokenizer)
    assert load_tokenizer(folder).encode("the fox") == first.encode("the fox") == small.surrounding().encode("the fox")
    assert len(in_process) == 1
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert load_tokenizer(folder).apply_chat_template(MESSAGES) == MESSAGES[0]["content"] + "!"
    assert len(in_process) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda old: old[:-40],
        lambda old: b"",
        lambda old: old.replace(b"fox", b"fax"),
        lambda old: old.replace(b"messages", b"massages", 1),
        lambda old: b"[1]\n",
        lambda old: b"\xff\xfe",
    ],
)
def test_a_damaged_file_is_made_again(folder: Path, in_process: list[Path], tmp_path: Path, damage: Any) -> None:
    """A truncated or changed file of the cache must not decide ids."""
    load_tokenizer(folder)
    (entry,) = (tmp_path / "cache" / "tokenizers").iterdir()
    entry.write_bytes(damage(entry.read_bytes()))
    assert load_tokenizer(folder).encode("the fox") == small.surrounding().encode("the fox")
    assert len(in_process) == 2


def test_unwritable_cache_uses_transformers(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    assert isinstance(load_tokenizer(folder), PreTrainedTokenizerFast)


def test_front_end_imports_no_torch_or_transformers() -> None:
    """They are three quarters of a gigabyte and seconds, for a tokenizer."""
    code = "import sys, server.process, server.text.codec; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_dates_are_local(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = with_template("byte-level", TEMPLATES["date"])
    assert ours.apply_chat_template(MESSAGES) in {datetime.now().strftime("%d %B %Y")}


def test_refusals_of_a_template_are_template_errors() -> None:
    ours, _ = with_template("byte-level", TEMPLATES["exceptions"])
    with pytest.raises(TemplateError, match="no system"):
        ours.apply_chat_template(MESSAGES)
