"""How a layer makes weights of products of queries and keys.

Shape key: H key-value heads, G query heads for each, Q queries, L keys.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class Scoring(NamedTuple):
    """The scale of scores, the window of positions that a token sees (None: all), and the cap of scores (None: none).

    `sinks_HG` has a learned score of each query head that takes part in its softmax and has no value (None: no sinks).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks_HG: Float[Tensor, "H G"] | None = None

    def capped(self, scores: Tensor) -> Tensor:
        """Return scaled scores within the cap."""
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap

    def weights(self, scores: Float[Tensor, "*B H G Q L"]) -> Float[Tensor, "*B H G Q L"]:
        """Return the softmax of capped scores in float32, in which a sink takes its share."""
        if self.sinks_HG is None:
            return torch.softmax(scores, dim=-1, dtype=torch.float32)
        sinks = self.sinks_HG[:, :, None, None].to(scores.dtype).expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1, dtype=torch.float32)[..., :-1]
