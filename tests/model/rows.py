"""Handmade rows and drafters, for tests of the code between a plan and a verdict."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.core.step_plan import Feeding, Row
from engine.core.tree import Expansion
from engine.core.types import SamplingParams
from engine.draft.drafter import FrontierNode, Proposal

SAMPLED = SamplingParams(temperature=1.0)
GREEDY = SamplingParams(temperature=0.0)
BUSHY = Expansion(2, 2, 2)


def decoding_row(
    text: Sequence[int] = (5, 6, 7),
    expansion: Expansion = BUSHY,
    sampling: SamplingParams = SAMPLED,
    verifier: str = "traversal",
    seed: int = 0,
    request_id: str = "r",
    first_slot: int = 0,
) -> Row:
    """Return a row whose whole text is still to be fed, to both models."""
    slots = tuple(range(first_slot, first_slot + len(text) + expansion.num_draft_tokens))
    return Row(request_id, 0, tuple(text), 0, True, 0, tuple(text), expansion, slots, sampling, verifier, seed, tuple(text), 0)


class TableDrafter:
    """A distribution for each last token: logits [V, V], by token. It needs no feeding."""

    name = "table"
    feeding = Feeding.TARGET_CACHE

    def __init__(self, logits_VV: Tensor) -> None:
        self._logits_VV = logits_VV

    def feed(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> Proposal:
        return self.extend(roots)

    def extend(self, frontier: Sequence[FrontierNode]) -> Proposal:
        last = torch.tensor([node.tree.token_ids[node.node] for node in frontier], dtype=torch.int64)
        return Proposal(tuple(range(len(frontier))), self._logits_VV[last])
