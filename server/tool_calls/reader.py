"""What is read out of a model's text: content, and tool calls in pieces. Knows text only."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CallPiece:
    """What comes of call `index` of a message: first its name, then its arguments, as JSON in pieces."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Said:
    """What became certain of a text: the content that is new, and the pieces of calls."""

    content: str = ""
    calls: tuple[CallPiece, ...] = ()


class CallReader(Protocol):
    """Owns the undecided end of one text. What it says, put together, is a function of the text alone."""

    @property
    def is_done(self) -> bool:
        """Whether it has read all the calls that may come, so that the text need not go on."""
        ...

    def feed(self, text: str) -> Said:
        """Add text; return what is now certain."""
        ...

    def close(self) -> Said:
        """Return the rest: no more text comes."""
        ...


class PlainReader:
    """Reads no calls: all text is content."""

    is_done = False

    def feed(self, text: str) -> Said:
        """Return the text."""
        return Said(text)

    def close(self) -> Said:
        """Return nothing."""
        return Said()


def merged(pieces: Iterable[CallPiece]) -> tuple[CallPiece, ...]:
    """Return as few pieces: one for the beginning of a call, one for the arguments that follow."""
    found: list[CallPiece] = []
    for piece in pieces:
        if piece.name is None and found and found[-1].name is None and found[-1].index == piece.index:
            found[-1] = replace(found[-1], arguments=found[-1].arguments + piece.arguments)
        else:
            found.append(piece)
    return tuple(found)
