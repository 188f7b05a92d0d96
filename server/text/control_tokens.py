"""Finds the control tokens that a text spells out. The time is linear in the text, however many tokens there are."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TextSegment:
    """A segment of a text: the spelling of a control token, or text between such spellings."""

    text: str
    is_control: bool


@dataclass(slots=True)
class _Node:
    """A node of a trie of spellings: the characters that may follow, and whether a spelling ends here."""

    is_end: bool = False
    following: dict[str, "_Node"] = field(default_factory=dict)


class ControlFinder:
    """Finds the spellings of a tokenizer's control tokens from the left, the longest first. Built once for all texts.

    Some tokenizers have thousands of control tokens. A regular expression with as many alternatives tries each at every possible
    start, and holds the interpreter lock meanwhile.
    """

    def __init__(self, controls: Iterable[str]) -> None:
        self._root = _Node()
        for control in filter(None, controls):
            self._add(control)
        self._beginning = re.compile("|".join(map(re.escape, self._root.following)) or r"(?!)")

    def _add(self, control: str) -> None:
        node = self._root
        for char in control:
            node = node.following.setdefault(char, _Node())
        node.is_end = True

    def parts(self, text: str) -> Iterator[TextSegment]:
        """Yield the parts of `text`, none of them empty; joined they are the text."""
        begun = 0
        for start, end in self._spans(text):
            if begun < start:
                yield TextSegment(text[begun:start], False)
            yield TextSegment(text[start:end], True)
            begun = end
        if begun < len(text):
            yield TextSegment(text[begun:], False)

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield start and end of each spelling."""
        at = 0
        while match := self._beginning.search(text, at):
            start = match.start()
            end = self._end(text, start)
            at = start + 1 if end is None else end
            if end is not None:
                yield start, end

    def _end(self, text: str, start: int) -> int | None:
        """Return where the longest spelling that begins at `start` ends."""
        longest, node = None, self._root
        for at in range(start, len(text)):
            following = node.following.get(text[at])
            if following is None:
                break
            node = following
            longest = at + 1 if node.is_end else longest
        return longest
