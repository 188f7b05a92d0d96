"""Texts on their way into context trees: a bounded number of tokens at a time, and drafted from as far as they have come.

Indexing a long text takes longer than a step may wait, and its first tokens are of use before the last ones are in. A text that
does not change is indexed once for all requests that have it. Knows token ids and turns, not what the texts are to a request.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple
from weakref import ReferenceType, WeakValueDictionary, ref

from engine.draft.text.suffix_counts import MAX_CONTEXT, ContextTree

_TURN = 64  # tokens that an index takes in before the next has its turn: short texts do not wait for long ones


class Text(NamedTuple):
    """Tokens to be found after what stands before them, and `context`, which stands before the first and is not to be found."""

    context: tuple[int, ...]
    token_ids: tuple[int, ...]


class TextIndex:
    """A context tree, and the texts that it has still to take in, in order."""

    def __init__(self) -> None:
        self.tree = ContextTree()
        self._waiting: deque[Text] = deque()
        self._num_taken = 0  # tokens of the first text that waits

    @property
    def is_complete(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting

    def add(self, text: Text) -> None:
        """Let a text wait for its turn."""
        self._waiting.append(text)

    def take_in(self, most_tokens: int) -> int:
        """Index so many tokens, or what is left if that is less; return how many."""
        num_left = most_tokens
        while num_left > 0 and self._waiting:
            num_left -= self._take_first(num_left)
        return most_tokens - num_left

    def _take_first(self, most_tokens: int) -> int:
        """Do so with the first text, and let it go if that was the last of it."""
        text, begin = self._waiting[0], self._num_taken
        if not begin:
            self.tree.begin(text.context)
        part = text.token_ids[begin : begin + most_tokens]
        for token_id in part:
            self.tree.append(token_id)
        self._num_taken += len(part)
        if self._num_taken == len(text.token_ids):
            self._waiting.popleft()
            self._num_taken = 0
        return len(part)


class Indexer:
    """Gives indexes their turns. It keeps none alive: what nobody drafts from any more is not indexed either."""

    def __init__(self) -> None:
        self._turns: deque[ReferenceType[TextIndex]] = deque()
        self._shared: WeakValueDictionary[tuple[str, Text], TextIndex] = WeakValueDictionary()

    def add(self, index: TextIndex, text: Text) -> None:
        """Let an index take in a text when its turns come."""
        if index.is_complete:
            self._turns.append(ref(index))
        index.add(text)

    def index_of(self, tenant: str, text: Text) -> TextIndex:
        """Return the index of a text that does not change: the living one, if another request of the tenant has that text."""
        index = self._shared.get((tenant, text))
        if index is None:
            index = self._shared[tenant, text] = TextIndex()
            self.add(index, text)
        return index

    def advance(self, most_tokens: int) -> int:
        """Index so many tokens, or what is left if that is less, in turns; return how many."""
        num_left = most_tokens
        while num_left > 0 and self._turns:
            index = self._turns.popleft()()
            if index is None:
                continue
            num_left -= index.take_in(min(num_left, _TURN))
            if not index.is_complete:
                self._turns.append(ref(index))
        return most_tokens - num_left


def text_after(before: Sequence[int], token_ids: Sequence[int]) -> Text:
    """Return a text with as much as counts of what stands before it."""
    return Text(tuple(before[-MAX_CONTEXT:]), tuple(token_ids))
