"""Tool calls in the markup of Hermes and Qwen, parsed from text that arrives in pieces. Knows text only.

    Let me see.
    <tool_call>
    {"name": "weather", "arguments": {"place": "Oslo"}}
    </tool_call>

A call is certain once its arguments begin; the arguments are the model's text, unchanged. Before that the markup may be no call
(no JSON, an unknown name): then all of its text is content. Whitespace beside the markup belongs to the markup, as chat templates
write it.
"""

import json
import re
from collections.abc import Callable, Container
from typing import Any

from pydantic_core import from_json

from server.tool_calls.json_end import JsonEnd
from server.tool_calls.reader import CallPiece, ReadText, merged

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_SPACE = " \t\r\n"
_BODY = re.compile(rf"[{_SPACE}]*{OPEN}[{_SPACE}]*")
_HEAD = re.compile(r'\{{1,2}~"name"~:~"([A-Za-z0-9_-]+)"~,~"arguments"~:~(?=\{)'.replace("~", f"[{_SPACE}]*"))
_TAIL = re.compile(rf"[{_SPACE}]*(?:\}}[{_SPACE}]*){{0,2}}")  # some templates make models double the outer braces


class HermesReader:
    """Parses calls of the functions in `names`, at most `max_calls` of them.

        text -> opening -> arguments -> tail -> text
             <-

    Each state is a method that consumes buffered text. It returns whether the next state can continue with the rest.
    """

    def __init__(self, names: Container[str], max_calls: int | None = None) -> None:
        self._names = names
        self._max_calls = max_calls
        self._num_calls = 0
        self._buffer = ""
        self._state: Callable[[bool], bool] = self._in_text
        self._json = JsonEnd()
        self._num_scanned = 0  # characters of the buffered text that `_json` has read
        self._is_behind_call = False  # with only whitespace since the call
        self._content = ""
        self._calls: list[CallPiece] = []

    @property
    def is_done(self) -> bool:
        """Whether `max_calls` calls have been read."""
        return self._num_calls == self._max_calls and self._state == self._in_text

    def feed(self, text: str) -> ReadText:
        """Add text; return the content and calls that are now certain."""
        self._buffer += text
        return self._read(is_end=False)

    def close(self) -> ReadText:
        """Return the rest: no more text follows."""
        return self._read(is_end=True)

    def _read(self, is_end: bool) -> ReadText:
        while not self.is_done and self._state(is_end):
            pass
        read = ReadText(self._content, merged(self._calls))
        self._content, self._calls = "", []
        return read

    def _in_text(self, is_end: bool) -> bool:
        start = self._buffer.find(OPEN)
        num_content = len(self._buffer[:start].rstrip(_SPACE)) if start >= 0 else self._num_certain(is_end)
        self._emit_content(num_content)
        if start >= 0:
            self._state, self._json, self._num_scanned = self._at_opening, JsonEnd(), 0
        return start >= 0

    def _num_certain(self, is_end: bool) -> int:
        """Return how many characters of the buffered text are content, whatever text follows."""
        if is_end:
            is_markup = self._is_behind_call and not self._buffer.strip(_SPACE)
            return 0 if is_markup else len(self._buffer)
        num_begun = next(length for length in range(len(OPEN) - 1, -1, -1) if self._buffer.endswith(OPEN[:length]))
        return len(self._buffer[: len(self._buffer) - num_begun].rstrip(_SPACE))

    def _emit_content(self, num_chars: int) -> None:
        """Emit the beginning of the buffered text as content."""
        if num_chars:
            self._is_behind_call = False
            self._content += self._take(num_chars)

    def _take(self, num_chars: int) -> str:
        text, self._buffer = self._buffer[:num_chars], self._buffer[num_chars:]
        return text

    def _at_opening(self, is_end: bool) -> bool:
        match = _BODY.match(self._buffer)
        assert match is not None  # this state is entered only at the markup
        start = match.end()
        head = _HEAD.match(self._buffer, start)
        if head is not None and head[1] in self._names:
            self._take(head.end())
            self._begin(head[1])
            self._state, self._json = self._in_arguments, JsonEnd()
            return True
        if head is not None or self._buffer[start : start + 1] not in ("", "{"):
            return self._reject()
        self._num_scanned = max(start, self._num_scanned)
        num_chars = self._json.feed(self._buffer[self._num_scanned :])
        if num_chars is not None:
            return self._read_whole(start, self._num_scanned + num_chars)
        self._num_scanned = len(self._buffer)
        return is_end and self._reject()

    def _read_whole(self, start: int, end: int) -> bool:
        """Read a call whose fields are in another order, or without arguments."""
        call = _call_of(self._buffer[start:end])
        if call is None or call[0] not in self._names:
            return self._reject()
        self._take(end)
        self._begin(call[0])
        self._add(json.dumps(call[1], ensure_ascii=False))
        self._state = self._at_tail
        return True

    def _begin(self, name: str) -> None:
        self._calls.append(CallPiece(self._num_calls, name))
        self._num_calls += 1

    def _add(self, arguments: str) -> None:
        if arguments:
            self._calls.append(CallPiece(self._num_calls - 1, arguments=arguments))

    def _reject(self) -> bool:
        """Treat the opening markup as content, since it opens no call, and parse the text after it again."""
        self._emit_content(self._buffer.index(OPEN) + len(OPEN))
        self._state = self._in_text
        return True

    def _in_arguments(self, _is_end: bool) -> bool:
        num_chars = self._json.feed(self._buffer)
        self._add(self._take(len(self._buffer) if num_chars is None else num_chars))
        if num_chars is None:
            return False
        self._state = self._at_tail
        return True

    def _at_tail(self, is_end: bool) -> bool:
        match = _TAIL.match(self._buffer)
        rest = self._buffer[match.end() if match else 0 :]
        if CLOSE.startswith(rest) and rest != CLOSE and not is_end:
            return False
        self._buffer = "" if CLOSE.startswith(rest) else rest.removeprefix(CLOSE)
        self._state, self._is_behind_call = self._in_text, True
        return True


def _call_of(body: str) -> tuple[str, dict[str, Any]] | None:
    """Return name and arguments of a JSON text, None if it is no call."""
    try:
        call = from_json(body, allow_inf_nan=False)
    except ValueError:
        return None
    if not isinstance(call, dict) or not call.keys() <= {"name", "arguments"}:
        return None
    name, arguments = call.get("name"), call.get("arguments", {})
    return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None
