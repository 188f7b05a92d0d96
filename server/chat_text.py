"""Messages that cannot forge control tokens: what users write stays text, what the template writes is control.

A chat template is text around text, so a message that spells out `<|im_end|>` would end itself. Such spellings are masked
before the template is rendered and put back where only text is encoded. Messages without any are encoded as transformers does it:
then the ids are those of `apply_chat_template`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a rendered prompt: a control token's spelling, or text that must not be read as control tokens."""

    text: str
    is_control: bool


class ControlMask:
    """Hides the control tokens that messages spell out, for one conversation."""

    def __init__(self, messages: Sequence[Mapping[str, str]], controls: Sequence[str]) -> None:
        longest_first = sorted(filter(None, controls), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        contents = [message["content"] for message in messages]
        self._found = sorted({match[0] for content in contents for match in self._control.finditer(content)})
        self._mark = _unused_mark(contents)

    @property
    def is_needed(self) -> bool:
        """Whether any message spells out a control token."""
        return bool(self._found)

    def masked(self, message: Mapping[str, str]) -> dict[str, str]:
        """Return the message with a stand-in for each control token in its content."""
        content = self._control.sub(lambda match: f"{self._mark}{self._found.index(match[0])};", message["content"])
        return {**message, "content": content}

    def parts(self, rendered: str) -> list[Part]:
        """Return the parts of the rendered masked messages, the stand-ins undone."""
        parts, at = [], 0
        for match in self._control.finditer(rendered):
            parts += [Part(self._unmasked(rendered[at : match.start()]), False), Part(match[0], True)]
            at = match.end()
        return [part for part in [*parts, Part(self._unmasked(rendered[at:]), False)] if part.text]

    def _unmasked(self, text: str) -> str:
        return re.sub(f"{re.escape(self._mark)}([0-9]+);", lambda match: self._found[int(match[1])], text)


def _unused_mark(contents: Sequence[str]) -> str:
    """Return a beginning of stand-ins that is in no message; its characters are private use, which no template writes."""
    number = 0
    while any(f"\ue000{number}\ue001" in content for content in contents):
        number += 1
    return f"\ue000{number}\ue001"
