"""Drafts from cached text: the law of what followed the longest known end of the text (texts.py). Costs no model pass.

Its law is a true law q, so draws from it are verified like any other's; where nothing is known the tree ends.
Shape key: P proposals, V vocabulary.
"""

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from engine.draft.drafter import FrontierNode, Proposal
from engine.draft.texts import CachedLaw, TextCache
from engine.plan import Feeding, Row
from engine.types import Request


class FollowsTexts:
    """What drafters from cached text have in common: the cache follows the requests."""

    def __init__(self, texts: TextCache) -> None:
        self.texts = texts

    def begin(self, request: Request, history: Sequence[int]) -> None:
        """Follow a request's text."""
        self.texts.begin(request, history)

    def advance(self, running: Iterable[str]) -> None:
        """Follow these requests' texts up to what is committed."""
        self.texts.advance(running)

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
        laws = {index: law for index, asked in enumerate(frontier) if (law := law_at(self.texts, asked)) is not None}
        logits_PV = odds_rows(list(laws.values()), self._vocab_size, self._device).log()
        return Proposal(tuple(laws), logits_PV, origins={index: law.origins for index, law in laws.items()})


def law_at(texts: TextCache, asked: FrontierNode) -> CachedLaw | None:
    """Return what the cache says of a node's text."""
    return texts.law_after(asked.tree.row, asked.law_context.path_ids)


def odds_rows(laws: Sequence[CachedLaw], vocab_size: int, device: torch.device) -> Float[Tensor, "P V"]:
    """Return the laws as rows of probabilities, float32."""
    odds_PV = torch.zeros((len(laws), vocab_size), device=device)
    rows = torch.tensor([row for row, law in enumerate(laws) for _ in law.odds], dtype=torch.int64, device=device)
    ids = torch.tensor([token_id for law in laws for token_id in law.odds], dtype=torch.int64, device=device)
    odds = torch.tensor([odds for law in laws for odds in law.odds.values()], dtype=torch.float32, device=device)
    return odds_PV.index_put_((rows, ids), odds)
