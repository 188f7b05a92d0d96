"""Ends the text of an editor's request at a line that is indented too little or ends too late, as llama.cpp does."""

import time
from collections.abc import Callable

from server.text.parsed_text import ReadText


class LineLimits:
    """Reads one text. From its second line on, a line that is indented by fewer than `num_indent` characters ends it, after its
    indentation. If `max_s` is not 0, the end of a line `max_s` after the first text ends it too. `is_done` is set by both.
    """

    def __init__(self, num_indent: int = 0, max_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_indent = num_indent
        self._max_s = max_s
        self._clock = clock
        self._first_s: float | None = None
        self._indent: int | None = None  # of the line so far, until it has another character
        self.is_done = False

    def feed(self, text: str) -> ReadText:
        """Add text; return its part before the end."""
        now_s = self._clock()
        self._first_s = now_s if self._first_s is None else self._first_s
        is_late = 0 < self._max_s < now_s - self._first_s
        for at, char in enumerate(text):
            if self.is_done:
                return ReadText(text[:at])
            if self._indent is not None and char in " \t":
                self._indent += 1
            elif self._indent is not None and self._indent < self._num_indent:
                self.is_done = True
                return ReadText(text[:at])
            else:
                self._indent = 0 if char == "\n" else None
                self.is_done = is_late and char == "\n"
        return ReadText(text)

    def close(self, _is_cut: bool = False) -> ReadText:
        """Return nothing: no text is held back."""
        return ReadText()
