"""Counts which tokens followed each context in texts that grow.

The index is the suffix tree of the reversed texts, cut at a depth. One walk finds the tokens that followed the longest known end
of a text, and how often. One walk also adds a token. Both cost the length of the match, not of the history. A suffix automaton,
as in SAM-Decoding (arXiv 2411.10666), finds the longest match as fast. But it counts occurrences only once a text is complete.
Tables of n-grams cost every length for every token. SuffixDecoding's tree (arXiv 2411.04975) runs forward in time, so that each
new token extends a suffix of every length.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAX_CONTEXT = 32  # tokens of a context that are compared; longer matches are all trusted alike
_START = -1  # precedes each text; equals no token


class Match(NamedTuple):
    """The longest known end of a text: its length in tokens (at most MAX_CONTEXT), and how often each token followed it."""

    length: int
    counts: Mapping[int, int]


@dataclass(slots=True)
class _ContextNode:
    """A context of `depth` tokens that occurred more than once, after different tokens or at the maximal depth.

    `position` is one that follows the context: the tokens before it are the label of the edge from the parent. `counts` are of
    all tokens that followed. Children are keyed by the next older token. A child is a node or, for a context that occurred once,
    the position after it.
    """

    depth: int
    position: int
    counts: dict[int, int]
    children: "dict[int, _ContextNode | int]"


class ContextTree:
    """Several texts, of which the last can grow. Each token takes a position and at most one node of memory."""

    def __init__(self) -> None:
        self._text: list[int] = []
        self._begin = 0  # of the last text's context
        self._root = _ContextNode(0, 0, {}, {})

    def begin(self, context: Sequence[int] = ()) -> None:
        """Begin another text. Its first token follows `context`, which is not counted itself."""
        self._text.append(_START)
        self._begin = len(self._text)
        self._text.extend(context[-MAX_CONTEXT:])

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens to the last text."""
        for token_id in token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Add a token to the last text: count it at every node whose context precedes it."""
        text, position, node = self._text, len(self._text), self._root
        max_depth = min(position - self._begin, MAX_CONTEXT)
        while node.depth < max_depth:
            older = text[position - 1 - node.depth]
            child = node.children.get(older)
            if child is None:
                node.children[older] = position
                break
            if isinstance(child, int) or child.depth > node.depth + 1:
                child = node.children[older] = self._node_on_edge(child, position, node.depth + 1, max_depth)
            node = child
            node.counts[token_id] = node.counts.get(token_id, 0) + 1
        text.append(token_id)

    def _node_on_edge(self, child: "_ContextNode | int", position: int, known: int, max_depth: int) -> _ContextNode:
        """Return the node where the context before `position` leaves the edge to a child, or the child if it reaches it."""
        text = self._text
        if isinstance(child, int):
            return self._new_node(child, self._common_length(text, position, child, known, max_depth), {text[child]: 1}, child)
        depth = self._common_length(text, position, child.position, known, child.depth)
        return child if depth == child.depth else self._new_node(child.position, depth, dict(child.counts), child)

    def _new_node(self, position: int, depth: int, counts: dict[int, int], below: "_ContextNode | int") -> _ContextNode:
        """Return a node at that depth. `below` is its child, unless the context ends there."""
        older = self._text[position - 1 - depth]
        has_child = depth < MAX_CONTEXT and older != _START
        return _ContextNode(depth, position, counts, {older: below} if has_child else {})

    def _common_length(self, text: Sequence[int], end: int, position: int, known: int, max_length: int) -> int:
        """Return how many tokens before `end` equal the tokens before `position`: at least `known`, at most `max_length`."""
        own, length, last, other = self._text, known, end - 1, position - 1
        while length < max_length and text[last - length] == own[other - length]:
            length += 1
        return length

    def match(self, text: Sequence[int], end: int | None = None, min_length: int = 1) -> Match | None:
        """Return the match of the first `end` tokens of a text (all by default), or None if it is shorter than `min_length`."""
        end = len(text) if end is None else end
        node, depth, max_depth = self._root, 0, min(end, MAX_CONTEXT)
        while depth < max_depth and (child := node.children.get(text[end - 1 - depth])) is not None:
            depth += 1
            if isinstance(child, int):
                depth = self._common_length(text, end, child, depth, max_depth)
                return Match(depth, {self._text[child]: 1}) if depth >= min_length else None
            node = child
            if depth < node.depth:
                depth = self._common_length(text, end, node.position, depth, min(max_depth, node.depth))
                if depth < node.depth:
                    break
        return Match(depth, node.counts) if depth >= min_length else None


def merged(one: Match, other: Match) -> Match:
    """Return the match in a tree of two texts from the matches in each one's tree: the longer, or both counts added."""
    if one.length != other.length:
        return max(one, other, key=lambda match: match.length)
    counts = dict(one.counts)
    for token_id, count in other.counts.items():
        counts[token_id] = counts.get(token_id, 0) + count
    return Match(one.length, counts)
