"""A drafter that uses cached text alone: it proposes the tokens after the longest match (text_cache.py), without any model pass.

Draws are from a true distribution q and are verified like any other drafter's. The tree ends at a node without a match.
Shape key: P proposals, M known tokens.
"""

from collections.abc import Iterable, Sequence

import torch

from engine.core.step_plan import Feeding, Row
from engine.core.types import Request
from engine.draft.drafter import FrontierNode, Proposal
from engine.draft.text.matching import CachedDistribution
from engine.draft.text.mixture import mixtures, vocabulary_of
from engine.draft.text.text_cache import TextCache


class DrafterWithTextCache:
    """Base of the drafters that use cached text: passes the lives of requests on to the cache."""

    def __init__(self, texts: TextCache) -> None:
        self.texts = texts

    def begin(self, request: Request, history: Sequence[int]) -> None:
        """Track a request."""
        self.texts.begin(request, history)

    def advance(self, running: Iterable[str]) -> bool:
        """Learn the committed tokens of these requests; return whether a long chain may start after one of them."""
        return self.texts.advance(running)

    def end(self, request_id: str) -> None:
        """Stop tracking a request."""
        self.texts.end(request_id)


class TextDrafter(DrafterWithTextCache):
    """Proposes wherever the cache has a match."""

    name = "ngram"
    feeding = Feeding.TARGET_CACHE

    def __init__(self, vocab_size: int, device: torch.device, texts: TextCache | None = None) -> None:
        super().__init__(texts or TextCache())
        self._vocab_size = vocab_size
        self._device = device

    def feed(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> Proposal:
        """Propose at the roots; there is nothing to feed."""
        del rows
        return self.extend(roots)

    def extend(self, frontier: Sequence[FrontierNode]) -> Proposal:
        """Propose at the nodes with a match."""
        found = {index: one for index, one in enumerate(distributions_at(self.texts, frontier)) if one is not None}
        distributions = [*found.values()]
        vocab = vocabulary_of(distributions, self._vocab_size, self._device)
        no_rows = [None] * len(distributions)
        logits_PM, origins = mixtures(None, no_rows, distributions, vocab, self._vocab_size, self._device)
        return Proposal(tuple(found), logits_PM, origins=dict(zip(found, origins, strict=True)), vocab=vocab)


def distributions_at(texts: TextCache, frontier: Sequence[FrontierNode]) -> list[CachedDistribution | None]:
    """Return the cached distributions after the nodes of one round."""
    return texts.distributions_after((node.tree.row, node.sampling_context.path_ids) for node in frontier)
