"""Drafts from the text itself: the law of what followed the last few tokens whenever they occurred before.

Costs no model pass. Its law is a true law q (counts of continuations), so i.i.d. draws from it are verified like any other's;
where nothing matches the tree ends.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.draft.drafter import FrontierNode, Proposal
from engine.plan import Feeding, Row


class NgramDrafter:
    """Looks the longest suffix of `min_tokens` to `max_tokens` tokens up in the last `window_tokens` of the text."""

    feeding = Feeding.TARGET_CACHE

    def __init__(
        self, vocab_size: int, device: torch.device, min_tokens: int = 2, max_tokens: int = 4, window_tokens: int = 4096
    ) -> None:
        self.name = "ngram"
        self._vocab_size = vocab_size
        self._device = device
        self._sizes = range(max_tokens, min_tokens - 1, -1)
        self._window_tokens = window_tokens

    def feed(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> Proposal:
        """Propose at the roots; there is nothing to feed."""
        del rows
        return self.extend(roots)

    def extend(self, frontier: Sequence[FrontierNode]) -> Proposal:
        """Propose at the nodes whose path and text end in something seen before."""
        counts = [self._continuations(asked) for asked in frontier]
        indices = tuple(index for index, count in enumerate(counts) if count)
        logits_PV = torch.full((len(indices), self._vocab_size), float("-inf"), device=self._device)
        for row, index in enumerate(indices):
            ids = torch.tensor(list(counts[index]), device=self._device)
            logits_PV[row, ids] = torch.tensor(list(counts[index].values()), dtype=torch.float32, device=self._device).log()
        return Proposal(indices, logits_PV)

    def _continuations(self, asked: FrontierNode) -> Counter[int]:
        tree = asked.tree
        drafted = [tree.token_ids[node] for node in tree.path(asked.node)[1:]]
        text = np.asarray([*tree.row.history[-self._window_tokens :], *drafted], dtype=np.int64)
        for size in self._sizes:
            found = continuations(text, size)
            if found:
                return found
        return Counter()


def continuations(text: NDArray[np.int64], size: int) -> Counter[int]:
    """Count the tokens that follow earlier occurrences of the last `size` tokens of `text`."""
    num_starts = len(text) - size
    if num_starts <= 0:
        return Counter()
    matches = np.ones(num_starts, dtype=np.bool_)
    for offset in range(size):
        matches &= text[offset : offset + num_starts] == text[num_starts + offset]
    return Counter(text[size:][matches].tolist())
