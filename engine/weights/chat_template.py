"""Chat templates, rendered as `transformers` renders them. Importing transformers takes seconds and hundreds of megabytes.

The environment, its functions and the form of the messages equal `transformers.utils.chat_template_utils`.
tests/unit/weights/test_stored_tokenizer.py compares both. Templates are untrusted: they run in jinja2's sandbox.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, ext, nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Names of a message's reasoning. Templates read the first name; gpt-oss templates read the second.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class _GenerationBlocks(ext.Extension):
    """Accepts `{% generation %}`, which marks the assistant's text for training, and writes its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return a block that writes its content."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Any) -> str:
        text: str = caller()
        return text


class _Dict:
    """`dict` in a template: callable, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Return the result of `dict.fromkeys`."""
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """`namespace` in a template: refuses attributes that begin with an underscore, which could reach the interpreter."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _require_public(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"Chat templates cannot store underscore-prefixed attributes on a namespace, but got {name!r}. "
            "Please rename the attribute."
        )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:  # jinja2's own filter escapes HTML
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=8)
def compiled(template: str) -> Template:
    """Return a compiled template; raise jinja2's TemplateError for an invalid one."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _now, "dict": _Dict(), "namespace": _Namespace}
    return environment.from_string(template)


def rendered(
    template: str,
    conversation: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    /,
    *,
    add_generation_prompt: bool,
    **variables: Any,
) -> str:
    """Return the text of a conversation.

    `variables` may have any other name. Raises TemplateError, and the TypeError or ValueError of an operation.
    """
    if not conversation:
        raise ValueError("Cannot apply chat template to an empty conversation. Provide at least one message.")
    documents = variables.pop("documents", None)
    if not all(isinstance(document, Mapping) for document in documents or ()):
        raise TypeError("Documents should be a list of dicts with 'title' and 'text' keys!")
    # A template would write the word None for a field that a client sends as null.
    messages = [{name: value for name, value in message.items() if value is not None} for message in conversation]
    return compiled(template).render(
        messages=_with_reasoning(_plain(messages)),
        tools=None if tools is None else _plain(list(tools)),
        documents=_plain(documents),
        add_generation_prompt=add_generation_prompt,
        **_plain(variables),
    )


def _with_reasoning(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with their reasoning under the names that templates read."""
    found = []
    for message in messages:
        given = (message[name] for name in _REASONING_FIELDS if message.get(name) is not None)
        reasoning = next(given, None)
        named = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        found.append(message if reasoning is None else named)
    return found


def _plain(value: Any) -> Any:
    """Return a copy of a JSON value whose parts have no methods that the sandbox does not know."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        return {_plain(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return f"<{type(value).__name__}>"
