"""An allocator whose sums the library makes, where there is one: selector.allocation says what it finds, and why.

Shape key: B sequences, M entries of a menu, C candidates.
"""

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from engine.native.library import address
from engine.tree import GrowthPrices
from selector.allocation import ODDS, SPREAD, Allocation, Allocator, Array, BatchLoad, Places, Question, mean_levels
from selector.cost import CostModel
from selector.estimators import Estimates
from selector.menu import Menu
from selector.native import library
from selector.native.costs import CompiledCosts

_SPREAD = array("d", SPREAD)


def allocator_of(
    menu: Menu, estimates: Estimates, is_allowed_BM: NDArray[np.bool_] | None, load: BatchLoad, costs: CostModel
) -> Allocator:
    """Return an allocator, compiled if its costs are."""
    if isinstance(costs, CompiledCosts):
        return CompiledAllocator(menu, estimates, is_allowed_BM, load, costs)
    return Allocator(menu, estimates, is_allowed_BM, load, costs)


class CompiledAllocator(Allocator):
    """An allocator whose candidates the library prices, and which it goes through where that needs no prices of a token."""

    def __init__(
        self, menu: Menu, estimates: Estimates, is_allowed_BM: NDArray[np.bool_] | None, load: BatchLoad, costs: CompiledCosts
    ) -> None:
        super().__init__(menu, estimates, is_allowed_BM, load, costs)
        self._library = library.required()
        num_rows, size = self._num_rows, (self._num_rows, len(menu))
        rows = array("d", (*load.context_B, *load.unfed_B, *load.draws_B))
        told_4BM = np.ascontiguousarray(estimates.told_4BM, dtype=np.float64)
        is_allowed = np.ascontiguousarray(self._is_allowed_BM, dtype=np.bool_)
        if told_4BM.shape != (4, *size) or is_allowed.shape != size or len(rows) != 3 * num_rows:
            raise ValueError(f"{told_4BM.shape} numbers and {is_allowed.shape} permissions for {size} sequences and entries")
        self._pointed_at = rows, told_4BM, is_allowed
        told, of_told, begin, of_rows = address(told_4BM), 8 * is_allowed.size, rows.buffer_info()[0], 8 * num_rows
        num_more = max(0, menu.deepest - 1)
        self._compiled = library.Step(
            ctypes.addressof(costs.compiled),
            *(told, told + of_told, told + 2 * of_told, told + 3 * of_told, address(is_allowed)),
            *(begin, begin + of_rows, begin + 2 * of_rows),
            *(address(menu.depths), address(menu.num_nodes), _address_of_levels(num_more)),
            *(num_rows, len(menu), len(ODDS), menu.is_by_chance),
            library.Work(*load.base),
            *(load.base_tokens, load.model_share, menu.least_chance),
        )

    @property
    def is_finite(self) -> bool:
        """Whether all that is expected is a finite number."""
        return bool(self._library.selector_is_finite(self._compiled))

    def ceiling(self) -> float:
        """Return the tokens a second that the best number of nodes would bring if every one came."""
        return float(self._library.selector_ceiling(self._compiled))

    def of(self, places: Sequence[int]) -> Allocation:
        """Return a given choice with what is expected of it."""
        chosen, found = array("q", places), array("d", (0.0, 0.0))
        begin = found.buffer_info()[0]
        self._library.selector_price(self._compiled, chosen.buffer_info()[0], 1, begin, begin + 8)
        return Allocation((*places,), *found)

    def prices(self, chosen: Allocation, num_sharing: int) -> GrowthPrices:
        """Return what a node and a level more cost in a choice's step."""
        found, places = array("d", bytes(8 * (2 + self._menu.most_nodes))), array("q", chosen.places)
        count = self._library.selector_growth_prices(
            *(self._compiled, places.buffer_info()[0], chosen.rate, num_sharing),
            *(_SPREAD.buffer_info()[0], len(_SPREAD), found.buffer_info()[0]),
        )
        return GrowthPrices(found[0], found[1], tuple(found[2 : 2 + count]))

    def _tried(self, places: Sequence[int], asked: Sequence[Question]) -> tuple[list[float], list[float]]:
        questions, count = array("q"), 0
        for indices, entries in asked:
            questions.extend((len(indices), len(entries), *indices, *entries))
            count += len(entries)
        chosen, found = array("q", places), array("d", bytes(16 * count))
        begin = found.buffer_info()[0]
        self._library.selector_try(
            *(self._compiled, chosen.buffer_info()[0], questions.buffer_info()[0], len(asked)),
            *(begin, begin + 8 * count),
        )
        told = found.tolist()
        return told[:count], told[count:]

    def _best_alike(self) -> Allocation:
        places, found = array("q", bytes(8 * self._num_rows)), array("d", (0.0, 1.0))
        self._library.selector_best_alike(self._compiled, places.buffer_info()[0], found.buffer_info()[0])
        return Allocation((*places,), *found)

    def _priced(self, places_CB: Places) -> tuple[Array, Array]:
        places_CB, priced_2C = np.ascontiguousarray(places_CB), np.empty((2, len(places_CB)))
        begin, count = address(priced_2C), len(places_CB)
        self._library.selector_price(self._compiled, address(places_CB), count, begin, begin + 8 * count)
        return priced_2C[0], priced_2C[1]


@cache
def _address_of_levels(num_more: int) -> int:
    return address(mean_levels(num_more))  # which are kept for good
