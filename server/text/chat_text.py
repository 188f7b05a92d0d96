"""Prevents messages from forging special tokens: the text of messages stays text, only the template writes control tokens.

A chat template inserts text into text, so a message that spells out `<|im_end|>` would end itself. Such spellings are masked
before the template is rendered. They are restored where text is encoded without special tokens. Messages without such spellings
are encoded as transformers does it: the ids equal `apply_chat_template`'s. A message may contain added tokens that are not marked
as special (`<tool_call>` of Qwen, line breaks of Gemma). Strings of tools and calls are masked like contents.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from server.text.control_tokens import ControlFinder, TextSegment


class ControlMask:
    """Masks the control tokens that the messages or tools of one conversation spell out."""

    def __init__(self, given: Sequence[Mapping[str, Any]], finder: ControlFinder) -> None:
        self._finder = finder
        texts = list(strings_of(given))
        self._found = sorted({part.text for text in texts for part in finder.parts(text) if part.is_control})
        self._number = {control: number for number, control in enumerate(self._found)}
        self._mark = unused_mark(texts) if self._found else ""

    @property
    def is_needed(self) -> bool:
        """Whether any message spells out a control token."""
        return bool(self._found)

    def masked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message, or tool, with a stand-in for each control token in its strings."""
        if not self.is_needed:
            return dict(given)
        return {name: with_strings(value, self._masked_text) for name, value in given.items()}

    def _masked_text(self, text: str) -> str:
        return "".join(map(self._stand_in, self._finder.parts(text)))

    def _stand_in(self, part: TextSegment) -> str:
        return f"{self._mark}{self._number[part.text]};" if part.is_control else part.text

    def parts(self, rendered: str) -> list[TextSegment]:
        """Return the parts of the rendered masked messages, the stand-ins undone."""
        parts = self._finder.parts(rendered)
        return [part if part.is_control else TextSegment(self._unmasked(part.text), False) for part in parts]

    def _unmasked(self, text: str) -> str:
        return re.sub(f"{re.escape(self._mark)}([0-9]+);", lambda match: self._found[int(match[1])], text)


def strings_of(value: object) -> Iterator[str]:
    """Yield every string of a JSON value, the names of its fields too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield name
            yield from strings_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_of(item)


def with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with every string changed, the names of its fields too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): with_strings(item, change) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_strings(item, change) for item in value]
    return value


def unused_mark(texts: Iterable[str]) -> str:
    """Return a prefix of stand-ins that is in no text. It is random, so that no message can make the search long.

    It begins and ends with private-use characters, which no template writes.
    """
    texts = list(texts)
    while True:
        mark = f"\ue000{secrets.token_hex(8)}\ue001"
        if not any(mark in text for text in texts):
            return mark
