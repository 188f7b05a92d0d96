"""Drafts from cached text: the law of what followed the longest known end of the text (texts.py). Costs no model pass.

Its law is a true law q, so draws from it are verified like any other's; where nothing is known the tree ends.
Shape key: P proposals, M tokens known.
"""

from collections.abc import Iterable, Sequence

import torch

from engine.core.step_plan import Feeding, Row
from engine.core.types import Request
from engine.draft.drafter import FrontierNode, Proposal
from engine.draft.text.mixture import mixtures, vocabulary_of
from engine.draft.text.text_cache import CachedLaw, TextCache


class FollowsTexts:
    """What drafters from cached text have in common: the cache follows the requests."""

    def __init__(self, texts: TextCache) -> None:
        self.texts = texts

    def begin(self, request: Request, history: Sequence[int]) -> None:
        """Follow a request's text."""
        self.texts.begin(request, history)

    def advance(self, running: Iterable[str]) -> bool:
        """Follow these requests' texts up to what is committed; return whether a run may begin at the end of one of them."""
        return self.texts.advance(running)

    def end(self, request_id: str) -> None:
        """Let go of a request."""
        self.texts.end(request_id)


class CachedDrafter(FollowsTexts):
    """Proposes wherever the cache knows anything."""

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
        """Propose at the nodes whose text is known to go on."""
        probs = {
            index: distribution
            for index, asked in enumerate(frontier)
            if (distribution := probs_at(self.texts, asked)) is not None
        }
        known = [*probs.values()]
        vocab = vocabulary_of(known, self._vocab_size, self._device)
        logits_PM, origins = mixtures(None, [None] * len(known), known, vocab, self._vocab_size, self._device)
        return Proposal(tuple(probs), logits_PM, origins=dict(zip(probs, origins, strict=True)), vocab=vocab)


def probs_at(texts: TextCache, asked: FrontierNode) -> CachedLaw | None:
    """Return what the cache says of a node's text."""
    return texts.probs_after(asked.tree.row, asked.sampling_context.path_ids)
