"""What followed a context wherever it occurred: texts indexed by what stands before each token, as they grow.

The index is the suffix tree of the reversed texts, cut at a depth. It answers "which tokens followed the longest known end of
this text, and how often" with one walk, and takes a new token with one walk: both cost the length of the match, not of the
history. A suffix automaton, as SAM-Decoding has it (arXiv 2411.10666), finds the longest match as fast but counts occurrences of
its states only once a text has ended; tables of n-grams cost every length for every token; SuffixDecoding's tree (arXiv
2411.04975) runs forward in time, so that each new token extends a suffix of every length. Knows token ids, not whose they are.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAX_CONTEXT = 32  # tokens of a context that are compared; what agrees so far back agrees for good
_START = -1  # stands before each text; equals no token


class Match(NamedTuple):
    """The longest known end of a text: its length in tokens (at most MAX_CONTEXT), and how often each token followed it."""

    length: int
    counts: Mapping[int, int]


@dataclass(slots=True)
class _Fork:
    """A context of `depth` tokens that occurred more than once, with unlike tokens before it or as far back as is looked.

    `at` is a position that has it before it: the text there is the label of the edge from the parent. `counts` are of all tokens
    that followed. Children, by the next older token, are forks or, of a context that occurred once, the position after it.
    """

    depth: int
    at: int
    counts: dict[int, int]
    children: "dict[int, _Fork | int]"


class ContextTree:
    """Texts that grow at the end of the last one. Memory is a position and at most one fork a token."""

    def __init__(self) -> None:
        self._text: list[int] = []
        self._root = _Fork(0, 0, {}, {})

    def begin(self, context: Sequence[int] = ()) -> None:
        """Begin another text. What is appended follows `context`, which itself is no continuation of anything."""
        self._text.append(_START)
        self._text.extend(context[-MAX_CONTEXT:])

    def append(self, token_id: int) -> None:
        """Add a token to the text begun last."""
        position = len(self._text)
        self._text.append(token_id)
        fork: _Fork | None = self._root
        while fork is not None and fork.depth < MAX_CONTEXT:
            fork = self._passed(fork, position)

    def _passed(self, fork: _Fork, position: int) -> _Fork | None:
        """Count the token at `position` once below the fork; return the fork where that was, None at the end of its context."""
        text = self._text
        older = text[position - 1 - fork.depth]
        child = fork.children.get(older)
        if older == _START:
            return None
        if child is None:
            fork.children[older] = position
            return None
        if isinstance(child, int):
            passed = self._fork(child, self._common(position, child, fork.depth + 1, MAX_CONTEXT), {text[child]: 1}, child)
            fork.children[older] = passed
        else:
            depth = self._common(position, child.at, fork.depth + 1, child.depth)
            passed = child if depth == child.depth else self._fork(child.at, depth, dict(child.counts), child)
            fork.children[older] = passed
        passed.counts[text[position]] = passed.counts.get(text[position], 0) + 1
        return passed

    def _fork(self, at: int, depth: int, counts: dict[int, int], below: "_Fork | int") -> _Fork:
        """Return a fork at that depth with one child, if its context goes on so far back."""
        older = self._text[at - 1 - depth]
        goes_on = depth < MAX_CONTEXT and older != _START
        return _Fork(depth, at, counts, {older: below} if goes_on else {})

    def _common(self, position: int, other: int, known: int, most: int) -> int:
        """Return how many tokens before both positions agree, given that `known` do; no more than `most`."""
        text, depth = self._text, known
        while depth < most and text[position - 1 - depth] == text[other - 1 - depth] != _START:
            depth += 1
        return depth

    def match(self, context: Sequence[int]) -> Match | None:
        """Return what followed the longest known end of `context`; None if its last token never had a follower."""
        text, most = self._text, min(len(context), MAX_CONTEXT)
        fork, depth = self._root, 0
        while depth < most and (child := fork.children.get(context[-1 - depth])) is not None:
            at, end = (child, most) if isinstance(child, int) else (child.at, min(most, child.depth))
            depth += 1
            while depth < end and text[at - 1 - depth] == context[-1 - depth]:
                depth += 1
            if isinstance(child, int):
                return Match(depth, {text[child]: 1})
            fork = child
            if depth < child.depth:
                break
        return Match(depth, fork.counts) if depth else None


def joined(matches: Iterable[Match | None]) -> Match | None:
    """Return what one tree of all their texts would say, given what several trees say: the longest matches, counted together."""
    known = [match for match in matches if match is not None]
    length = max((match.length for match in known), default=0)
    longest = [match.counts for match in known if match.length == length]
    if not longest:
        return None
    return Match(length, longest[0] if len(longest) == 1 else sum(map(Counter, longest), Counter()))
