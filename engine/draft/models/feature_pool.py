"""What a draft head reads by slot, of the target's and of its own, and what it is fed.

Shape key: T tokens, S slots and two rows more, W numbers of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.attention.packing import PackedBatch
from engine.kv_cache.canary import Canary, NoCanary
from engine.utils.host_transfer import integers


@dataclass(frozen=True)
class Fed:
    """Packed tokens, and for each the slot of the token before it.

    Committed tokens read the target's features, nodes of a tree the head's own states.
    """

    batch: PackedBatch
    before: Sequence[int]
    are_committed: bool


class FeaturePool:
    """Features, what they are made of or what stands in for them, a row for each slot.

    `before_all` names the row of zeros that position 0 reads, `nobody` the one of the cache's slot of that name, which is written
    and never read.
    """

    def __init__(self, num_slots: int, width: int, dtype: torch.dtype, device: torch.device, canary: Canary) -> None:
        self.nobody, self.before_all = num_slots, num_slots + 1
        self._canary = canary
        self._pool_SW = torch.empty(num_slots + 2, width, dtype=dtype, device=device)
        canary.watch(self._pool_SW[:num_slots])
        self._pool_SW[self.before_all] = 0.0

    def write(self, slots_T: Int[Tensor, " T"], features_TW: Float[Tensor, "T W"]) -> None:
        """Store the features of T tokens."""
        self._pool_SW.index_copy_(0, slots_T, features_TW)

    def at(self, slots: Sequence[int]) -> Float[Tensor, "T W"]:
        """Return what the slots hold."""
        slots_T = integers(slots, self._pool_SW.device)
        features_TW = self.read(slots_T)
        self._canary.check("features", slots_T, features_TW)
        return features_TW

    def read(self, slots_T: Int[Tensor, " T"]) -> Float[Tensor, "T W"]:
        """Return what the slots hold, for whoever has their numbers on the device and no canary beside it."""
        return self._pool_SW.index_select(0, slots_T)

    def check(self, slots: Sequence[int]) -> None:
        """Let a canary look at these slots, which are to be read where they lie."""
        if not isinstance(self._canary, NoCanary):
            self.at(slots)

    @property
    def rows_SW(self) -> Float[Tensor, "S W"]:
        """The rows of all slots, for whoever reads and writes where they lie."""
        return self._pool_SW
