"""Incremental indexing of texts into trees, with a bounded number of tokens in each step.

Indexing a long text takes longer than a step may take. Tokens already indexed can be drafted from before the rest is. A text that
does not change is indexed once for all requests of a tenant that share it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import ReferenceType, WeakValueDictionary, ref

from engine.draft.text.matching import TextTree
from engine.draft.text.suffix_counts import MAX_CONTEXT

_TOKENS_PER_TURN = 64  # of one index before the turn of the next, so that long texts do not delay short texts


class TextWithContext(NamedTuple):
    """Tokens to be indexed, and the `context` before the first of them, which is not indexed itself."""

    context: tuple[int, ...]
    token_ids: tuple[int, ...]


class TextIndex:
    """A tree and a queue of the texts that are still to be indexed."""

    def __init__(self, tree: TextTree) -> None:
        self.tree = tree
        self._pending: deque[TextWithContext] = deque()
        self._num_indexed = 0  # tokens of the first pending text

    @property
    def is_complete(self) -> bool:
        """Whether every text is indexed."""
        return not self._pending

    def add(self, text: TextWithContext) -> None:
        """Queue a text."""
        self._pending.append(text)

    def index_tokens(self, max_tokens: int) -> int:
        """Index at most so many tokens; return how many."""
        num_left = max_tokens
        while num_left > 0 and self._pending:
            num_left -= self._index_first(num_left)
        return max_tokens - num_left

    def _index_first(self, max_tokens: int) -> int:
        """Index tokens of the first pending text; return how many."""
        text, begin = self._pending[0], self._num_indexed
        if not begin:
            self.tree.begin(text.context)
        part = text.token_ids[begin : begin + max_tokens]
        self.tree.extend(part)
        self._num_indexed += len(part)
        if self._num_indexed == len(text.token_ids):
            self._pending.popleft()
            self._num_indexed = 0
        return len(part)


class Indexer:
    """Indexes texts in turns, in trees by `new_tree`. It has weak references alone: an index that no request uses is dropped."""

    def __init__(self, new_tree: Callable[[], TextTree]) -> None:
        self._new_tree = new_tree
        self._queue: deque[ReferenceType[TextIndex]] = deque()
        self._shared: WeakValueDictionary[tuple[str, TextWithContext], TextIndex] = WeakValueDictionary()

    def new_index(self) -> TextIndex:
        """Return an index without texts."""
        return TextIndex(self._new_tree())

    def add(self, index: TextIndex, text: TextWithContext) -> None:
        """Queue a text for an index."""
        if index.is_complete:
            self._queue.append(ref(index))
        index.add(text)

    def index_of(self, tenant: str, text: TextWithContext) -> TextIndex:
        """Return the index of a text that does not change, shared with other requests of the tenant."""
        index = self._shared.get((tenant, text))
        if index is None:
            index = self._shared[tenant, text] = self.new_index()
            self.add(index, text)
        return index

    def advance(self, max_tokens: int) -> int:
        """Index at most so many tokens, in turns; return how many."""
        num_left = max_tokens
        while num_left > 0 and self._queue:
            index = self._queue.popleft()()
            if index is None:
                continue
            num_left -= index.index_tokens(min(num_left, _TOKENS_PER_TURN))
            if not index.is_complete:
                self._queue.append(ref(index))
        return max_tokens - num_left


def text_with_context(before: Sequence[int], token_ids: Sequence[int]) -> TextWithContext:
    """Return a text with the last MAX_CONTEXT tokens before it."""
    return TextWithContext(tuple(before[-MAX_CONTEXT:]), tuple(token_ids))
