"""What followed a context wherever it occurred: texts indexed by what stands before each token, as they grow.

The index is the suffix tree of the reversed texts, cut at a depth. It answers "which tokens followed the longest known end of
this text, and how often" with one walk, and takes a new token with one walk: both cost the length of the match, not of the
history. A suffix automaton, as SAM-Decoding has it (arXiv 2411.10666), finds the longest match as fast but counts occurrences of
its states only once a text has ended; tables of n-grams cost every length for every token; SuffixDecoding's tree (arXiv
2411.04975) runs forward in time, so that each new token extends a suffix of every length. Knows token ids, not whose they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAX_CONTEXT = 32  # tokens of a context that are compared; what agrees so far back agrees for good
_START = -1  # stands before each text; equals no token


class Match(NamedTuple):
    """The longest known end of a text: its length in tokens (at most MAX_CONTEXT), and how often each token followed it."""

    length: int
    counts: Mapping[int, int]

    def copy(self) -> "Match":
        """Return it as it is now: the tree that said it goes on counting."""
        return Match(self.length, dict(self.counts))


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
        self._begin = 0  # of the last text, at its context
        self._root = _Fork(0, 0, {}, {})

    def begin(self, context: Sequence[int] = ()) -> None:
        """Begin another text. What is appended follows `context`, which itself is no continuation of anything."""
        self._text.append(_START)
        self._begin = len(self._text)
        self._text.extend(context[-MAX_CONTEXT:])

    def append(self, token_id: int) -> None:
        """Add a token to the text begun last."""
        self._add(token_id)

    def learn(self, token_id: int, least: int = 1) -> Match | None:
        """Add a token; return a copy of what `match` said of the text before it, in which the token may have followed 0 times."""
        fork = self._add(token_id)
        if fork.depth < least:
            return None
        return Match(fork.depth, {**fork.counts, token_id: fork.counts[token_id] - 1})

    def _add(self, token_id: int) -> _Fork:
        """Count a token at every fork whose context stands before it; return the last of them, or the root."""
        text, position, fork = self._text, len(self._text), self._root
        most = min(position - self._begin, MAX_CONTEXT)
        while fork.depth < most:
            older = text[position - 1 - fork.depth]
            child = fork.children.get(older)
            if child is None:
                fork.children[older] = position
                break
            if isinstance(child, int) or child.depth > fork.depth + 1:
                child = fork.children[older] = self._passed(child, position, fork.depth + 1, most)
            fork = child
            fork.counts[token_id] = fork.counts.get(token_id, 0) + 1
        text.append(token_id)
        return fork

    def _passed(self, child: "_Fork | int", position: int, known: int, most: int) -> _Fork:
        """Return the fork where what stands before `position` leaves the edge to the child: the child, if it goes on so far."""
        text = self._text
        if isinstance(child, int):
            return self._fork(child, self._common(text, position, child, known, most), {text[child]: 1}, child)
        depth = self._common(text, position, child.at, known, child.depth)
        return child if depth == child.depth else self._fork(child.at, depth, dict(child.counts), child)

    def _fork(self, at: int, depth: int, counts: dict[int, int], below: "_Fork | int") -> _Fork:
        """Return a fork at that depth with one child, if its context goes on so far back."""
        older = self._text[at - 1 - depth]
        goes_on = depth < MAX_CONTEXT and older != _START
        return _Fork(depth, at, counts, {older: below} if goes_on else {})

    def _common(self, text: Sequence[int], end: int, at: int, known: int, most: int) -> int:
        """Return how many tokens before `end` stand before the position `at` too, given that `known` do; no more than `most`."""
        own, depth, last, other = self._text, known, end - 1, at - 1
        while depth < most and text[last - depth] == own[other - depth]:
            depth += 1
        return depth

    def match(self, text: Sequence[int], end: int | None = None, least: int = 1) -> Match | None:
        """Return what followed the longest known end of a text or of its first `end` tokens; None if it has less than `least`."""
        end = len(text) if end is None else end
        fork, depth, most = self._root, 0, min(end, MAX_CONTEXT)
        while depth < most and (child := fork.children.get(text[end - 1 - depth])) is not None:
            depth += 1
            if isinstance(child, int):
                depth = self._common(text, end, child, depth, most)
                return Match(depth, {self._text[child]: 1}) if depth >= least else None
            fork = child
            if depth < fork.depth:
                depth = self._common(text, end, fork.at, depth, min(most, fork.depth))
                if depth < fork.depth:
                    break
        return Match(depth, fork.counts) if depth >= least else None


def joined(one: Match, other: Match) -> Match:
    """Return what one tree of two texts would say, given what a tree of each says: the longer match, or both counted together."""
    if one.length != other.length:
        return max(one, other, key=lambda match: match.length)
    counts = dict(one.counts)
    for token_id, count in other.counts.items():
        counts[token_id] = counts.get(token_id, 0) + count
    return Match(one.length, counts)
