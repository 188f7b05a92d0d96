"""Tables of values that depend on the position alone, extended on demand."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

T = TypeVar("T")
_FIRST = 1024  # positions


class RotaryTable(Generic[T]):
    """Computes a table for all positions up to the next power of two. A position's values must not depend on the table's size."""

    def __init__(self, make: Callable[[Int[Tensor, " N"]], T], device: torch.device | str = "cpu") -> None:
        self._make, self._device = make, device
        self._made: tuple[int, T] | None = None  # replaced in one assignment: other threads may read it

    def below(self, end: int) -> T:
        """Return a table of at least all positions below `end`."""
        made = self._made
        if made is None or end > made[0]:
            count = max(_FIRST, 1 << (end - 1).bit_length())
            self._made = made = count, self._make(torch.arange(count, device=self._device))
        return made[1]
