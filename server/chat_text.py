"""Messages that cannot forge special tokens: what users write stays text, what the template writes is control.

A chat template is text around text, so a message that spells out `<|im_end|>` would end itself. Such spellings are masked
before the template is rendered and put back where only text is encoded. Messages without any are encoded as transformers does it:
then the ids are those of `apply_chat_template`. So are tokens that the tokenizer has added but does not mark as special
(`<tool_call>` of Qwen, line breaks of Gemma): a message may contain them.
"""

import re
import secrets
from collections.abc import Mapping, Sequence

from server.control_tokens import ControlFinder, Part


class ControlMask:
    """Hides the control tokens that messages spell out, for one conversation."""

    def __init__(self, messages: Sequence[Mapping[str, str]], finder: ControlFinder) -> None:
        self._finder = finder
        contents = [message["content"] for message in messages]
        self._found = sorted({part.text for content in contents for part in finder.parts(content) if part.is_control})
        self._number = {control: number for number, control in enumerate(self._found)}
        self._mark = unused_mark(contents) if self._found else ""

    @property
    def is_needed(self) -> bool:
        """Whether any message spells out a control token."""
        return bool(self._found)

    def masked(self, message: Mapping[str, str]) -> dict[str, str]:
        """Return the message with a stand-in for each control token in its content."""
        if not self.is_needed:
            return dict(message)
        return {**message, "content": "".join(map(self._stand_in, self._finder.parts(message["content"])))}

    def _stand_in(self, part: Part) -> str:
        return f"{self._mark}{self._number[part.text]};" if part.is_control else part.text

    def parts(self, rendered: str) -> list[Part]:
        """Return the parts of the rendered masked messages, the stand-ins undone."""
        parts = self._finder.parts(rendered)
        return [part if part.is_control else Part(self._unmasked(part.text), False) for part in parts]

    def _unmasked(self, text: str) -> str:
        return re.sub(f"{re.escape(self._mark)}([0-9]+);", lambda match: self._found[int(match[1])], text)


def unused_mark(contents: Sequence[str]) -> str:
    """Return a beginning of stand-ins that is in no message; drawn, so that no message can be written to make the search long.

    It begins and ends with characters of private use, which no template writes.
    """
    while True:
        mark = f"\ue000{secrets.token_hex(8)}\ue001"
        if not any(mark in content for content in contents):
            return mark
