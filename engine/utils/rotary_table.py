"""What depends on a position alone, computed for as many positions as were needed so far. Knows nothing of what it is."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

T = TypeVar("T")
_FIRST = 1024  # positions


class RotaryTable(Generic[T]):
    """Makes anew for twice as many positions and more; what belongs to a position must not depend on how many there are."""

    def __init__(self, make: Callable[[Int[Tensor, " N"]], T], device: torch.device | str = "cpu") -> None:
        self._make, self._device = make, device
        self._made: tuple[int, T] | None = None  # replaced as one: another thread may look

    def below(self, end: int) -> T:
        """Return what was made for all positions below `end`, and perhaps more."""
        made = self._made
        if made is None or end > made[0]:
            count = max(_FIRST, 1 << (end - 1).bit_length())
            self._made = made = count, self._make(torch.arange(count, device=self._device))
        return made[1]
