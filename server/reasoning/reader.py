"""Splits the reasoning block off from a text that arrives in pieces. Knows text only.

    <think>
    The user greets me.
    </think>

    Hello!

A block is at the beginning of a text. Space beside the reasoning belongs to the markup, as chat templates write it. So do up to
two line breaks behind the block; a grammar that begins there needs the rest unchanged.
"""

from collections.abc import Callable
from dataclasses import dataclass

from server.text.parsed_text import CallReader, ReadText

_SPACE = " \t\r\n"
_MAX_BREAKS = 2


@dataclass(frozen=True, slots=True)
class Markers:
    """The strings around a reasoning block."""

    opening: str = "<think>"
    closing: str = "</think>"


class ReasoningReader:
    """Separates a reasoning block from the rest of one text, which `rest` reads.

        start -> block -> breaks -> rest
              ------------------->

    Each state is a method that consumes buffered text. It returns whether the next state can continue. If the prompt has opened
    the block, the text begins inside. Without `keeps_reasoning` the reasoning is dropped.
    """

    def __init__(self, rest: CallReader, markers: Markers, *, begins_inside: bool, keeps_reasoning: bool = True) -> None:
        self._rest = rest
        self._markers = markers
        self._begins_inside = begins_inside
        self._keeps_reasoning = keeps_reasoning
        self._buffer = ""
        self._reasoning = ""
        self._has_reasoning = False
        self._num_breaks = 0
        self._state: Callable[[bool], bool] = self._at_start

    @property
    def is_inside(self) -> bool:
        """Whether the text so far ends inside the block."""
        return self._state == self._in_block or (self._state == self._at_start and self._begins_inside)

    @property
    def is_done(self) -> bool:
        """Whether all allowed calls have been read."""
        return self._rest.is_done

    def feed(self, text: str) -> ReadText:
        """Add text; return the reasoning, content and calls that are now certain."""
        self._buffer += text
        return self._read(is_end=False)

    def close(self, is_cut: bool = False) -> ReadText:
        """Return the rest: no more text follows. `is_cut`: a limit of tokens cut the text."""
        return self._read(is_end=True, is_cut=is_cut)

    def _read(self, is_end: bool, is_cut: bool = False) -> ReadText:
        while self._state(is_end):
            pass
        reasoning, self._reasoning = self._reasoning, ""
        text = ""
        if self._state == self._in_rest:
            text, self._buffer = self._buffer, ""
        read = self._rest.feed(text) if text else ReadText()
        last = self._rest.close(is_cut) if is_end else ReadText()
        return ReadText(read.content + last.content, (*read.calls, *last.calls), reasoning if self._keeps_reasoning else "")

    def _at_start(self, is_end: bool) -> bool:
        """Decide whether the text begins with a block. A model may repeat the marker that the prompt ends with."""
        opening = self._markers.opening
        begun = self._buffer.lstrip(_SPACE)
        if begun.startswith(opening):
            self._buffer = begun.removeprefix(opening)
            self._state = self._in_block
            return True
        if opening.startswith(begun) and not is_end:
            return False
        self._state = self._in_block if self._begins_inside else self._in_rest
        return True

    def _in_block(self, is_end: bool) -> bool:
        start = self._buffer.find(self._markers.closing)
        if start >= 0:
            self._emit_reasoning(self._buffer[:start].rstrip(_SPACE))
            self._buffer = self._buffer[start + len(self._markers.closing) :]
            self._state = self._at_breaks
            return True
        num_certain = len(self._buffer) if is_end else self._num_certain()
        self._emit_reasoning(self._buffer[:num_certain])
        self._buffer = self._buffer[num_certain:]
        return False

    def _num_certain(self) -> int:
        """Return how many characters of the buffered text are reasoning for any text that follows."""
        closing = self._markers.closing
        num_begun = next(length for length in range(len(closing) - 1, -1, -1) if self._buffer.endswith(closing[:length]))
        return len(self._buffer[: len(self._buffer) - num_begun].rstrip(_SPACE))

    def _emit_reasoning(self, text: str) -> None:
        text = text if self._has_reasoning else text.lstrip(_SPACE)
        self._has_reasoning = self._has_reasoning or bool(text)
        self._reasoning += text

    def _at_breaks(self, _is_end: bool) -> bool:
        while self._buffer.startswith("\n") and self._num_breaks < _MAX_BREAKS:
            self._buffer, self._num_breaks = self._buffer[1:], self._num_breaks + 1
        if not self._buffer and self._num_breaks < _MAX_BREAKS:
            return False
        self._state = self._in_rest
        return True

    def _in_rest(self, _is_end: bool) -> bool:
        return False
