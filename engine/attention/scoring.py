"""How a layer makes scores of products of queries and keys."""

from typing import NamedTuple

import torch
from torch import Tensor


class Scoring(NamedTuple):
    """The scale of scores, the window of positions that a token sees (None: all), and the cap of scores (None: none)."""

    scale: float
    window: int | None = None
    softcap: float | None = None

    def capped(self, scores: Tensor) -> Tensor:
        """Return scaled scores within the cap."""
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap
