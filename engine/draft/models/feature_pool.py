"""Per-slot features of a draft head: the target's features and the head's own states.

Shape key: T tokens, S slots and two more rows, W numbers of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.attention.packing import PackedBatch
from engine.kv_cache.canary import Canary, NoCanary
from engine.utils import huge_pages
from engine.utils.host_transfer import integers


@dataclass(frozen=True)
class FedTokens:
    """Packed tokens, and for each the slot of the token before it.

    Committed tokens read the target's features, nodes of a tree the head's own states.
    """

    batch: PackedBatch
    previous_slots: Sequence[int]
    are_committed: bool


class FeaturePool:
    """A tensor with one row for each slot: features, states to make features of, or the head's states in their place.

    `zero_row` contains zeros and is read at position 0. `padding_row` belongs to the cache's slot for padding: it is written, but
    never read.
    """

    def __init__(self, num_slots: int, width: int, dtype: torch.dtype, device: torch.device, canary: Canary) -> None:
        self.padding_row, self.zero_row = num_slots, num_slots + 1
        self._canary = canary
        shape = (num_slots + 2, width)
        is_on_cpu = device.type == "cpu"
        self._pool_SW = huge_pages.empty(shape, dtype) if is_on_cpu else torch.empty(shape, dtype=dtype, device=device)
        canary.watch(self._pool_SW[None, :num_slots])
        self._pool_SW[self.zero_row] = 0.0

    def write(self, slots_T: Int[Tensor, " T"], features_TW: Float[Tensor, "T W"]) -> None:
        """Store the features of T tokens."""
        self._pool_SW.index_copy_(0, slots_T, features_TW)

    def read_checked(self, slots: Sequence[int]) -> Float[Tensor, "T W"]:
        """Return the slots' rows after a check by the canary."""
        slots_T = integers(slots, self._pool_SW.device)
        features_TW = self.read(slots_T)
        self._canary.check("features", slots_T, features_TW)
        return features_TW

    def read(self, slots_T: Int[Tensor, " T"]) -> Float[Tensor, "T W"]:
        """Return the slots' rows without a check; the slot numbers are on the device."""
        return self._pool_SW.index_select(0, slots_T)

    def check(self, slots: Sequence[int]) -> None:
        """Check slots that native code is going to read in place."""
        if not isinstance(self._canary, NoCanary):
            self.read_checked(slots)

    @property
    def rows_SW(self) -> Float[Tensor, "S W"]:
        """All rows, for native code that reads and writes them in place."""
        return self._pool_SW
