"""The table on the device that recorded passes read, and its update in a single transfer."""

from itertools import cycle

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

_NUM_STAGES = 3  # tables in transfer at the same time


class _Stage:
    """Pinned host memory for an asynchronous copy of a table."""

    def __init__(self, capacity: int) -> None:
        self._pinned = torch.empty(capacity, dtype=torch.int32, pin_memory=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def copy_to(self, place: Int[Tensor, " _"], numbers: Int[Tensor, " _"]) -> None:
        self._copied.synchronize()  # waits for the previous copy from this memory
        place.copy_(self._pinned[: len(numbers)].copy_(numbers), non_blocking=True)
        self._copied.record()


class TableBuffer:
    """Owns the table. A loaded table is valid for passes started before the next load."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.table: Int[Tensor, " _"] = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._stages = cycle([_Stage(capacity) for _ in range(_NUM_STAGES)] if device.type == "cuda" else [])

    def load(self, numbers: NDArray[np.int32]) -> bool:
        """Copy a table to the device; return whether it fits."""
        if len(numbers) > len(self.table):
            return False
        place, new = self.table[: len(numbers)], torch.from_numpy(numbers)
        if (stage := next(self._stages, None)) is None:
            place.copy_(new)
        else:
            stage.copy_to(place, new)
        return True
