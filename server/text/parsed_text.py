"""The result of parsing a model's text: content, and tool calls in pieces. Knows text only."""

from collections.abc import Iterable, Iterator
from itertools import chain, groupby, takewhile
from typing import Protocol

import msgspec
from msgspec.structs import replace


class CallPiece(msgspec.Struct, frozen=True):
    """A piece of call `index` of a message: first its name, then its arguments, as JSON in pieces."""

    index: int
    name: str | None = None
    arguments: str = ""


class ReadText(msgspec.Struct, frozen=True):
    """The newly certain parts of a text: content, pieces of calls, and reasoning."""

    content: str = ""
    calls: tuple[CallPiece, ...] = ()
    reasoning: str = ""


class CallReader(Protocol):
    """Owns the undecided end of one text. Its joined output depends on the text alone, not on how the text is cut into pieces."""

    @property
    def is_done(self) -> bool:
        """Whether all allowed calls have been read, so that generation can stop."""
        ...

    def feed(self, text: str) -> ReadText:
        """Add text; return the content and calls that are now certain."""
        ...

    def close(self, is_cut: bool = False) -> ReadText:
        """Return the rest: no more text follows. `is_cut`: a limit of tokens cut the text."""
        ...


class PlainReader:
    """Reads no calls: all text is content."""

    is_done = False

    def feed(self, text: str) -> ReadText:
        """Return the text."""
        return ReadText(text)

    def close(self, _is_cut: bool = False) -> ReadText:
        """Return nothing."""
        return ReadText()


def merged(pieces: Iterable[CallPiece]) -> tuple[CallPiece, ...]:
    """Return the pieces merged: one for the beginning of each call, one for the arguments that follow."""
    found: list[CallPiece] = []
    for piece in pieces:
        if piece.name is None and found and found[-1].name is None and found[-1].index == piece.index:
            found[-1] = replace(found[-1], arguments=found[-1].arguments + piece.arguments)
        else:
            found.append(piece)
    return tuple(found)


def in_order(parts: Iterable[ReadText]) -> Iterator[str | CallPiece]:
    """Yield the contents and calls of parts of one text in its order. Contents that follow one another are joined."""
    for is_content, group in groupby(chain.from_iterable(map(_in_order, parts)), lambda one: isinstance(one, str)):
        if is_content:
            yield "".join(one for one in group if isinstance(one, str))
        else:
            yield from group


def _in_order(part: ReadText) -> Iterator[str | CallPiece]:
    """Yield the parts of one piece: the rest of the open call, content, new calls."""
    rest = [*takewhile(lambda call: call.name is None, part.calls)]
    yield from rest
    if part.content:
        yield part.content
    yield from part.calls[len(rest) :]
