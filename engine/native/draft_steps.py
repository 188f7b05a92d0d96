"""Drafting steps in a row: the library grows trees, runs the target over them, keeps the paths, and begins again."""

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from engine.native import library
from engine.native.distributions import KeptTokens
from engine.native.growth import NativeGrowth
from engine.native.walks import WalkedPath


class DraftedRow(NamedTuple):
    """A sequence before the first step. `tree` is its place among the growing trees, None if it decodes plainly.

    `slots` are by position, with room for all steps: the library reorders them so that those of kept tokens come first. It may
    have `num_remaining` further tokens. With `temperature` 0 the likeliest tokens are chosen. No step follows a stop token.
    """

    tree: int | None
    root_id: int
    root_position: int
    slots: "array[int]"
    num_remaining: int
    seed: int
    temperature: float
    truncation: KeptTokens
    stop_ids: Sequence[int]


class DraftSteps:
    """At most `most` steps. `growth` has memory for as many. `num_complete` ran, with a token for every row."""

    def __init__(self, most: int, rows: Sequence[DraftedRow], growth: NativeGrowth) -> None:
        self.growth, self.num_complete = growth, 0
        self.end = 1 + max(len(row.slots) for row in rows)  # of positions
        self._rows = rows
        self._most_nodes = growth.most_nodes + sum(row.tree is None for row in rows)
        structures = (library.DraftedRowStructure * len(rows))()
        self._stops = [array("q", row.stop_ids) for row in rows]
        for index, (row, stops) in enumerate(zip(rows, self._stops, strict=True)):
            temperature = array("f", (row.temperature,))[0]
            structures[index] = library.DraftedRowStructure(
                tree=-1 if row.tree is None else row.tree,
                root_token=row.root_id,
                root_position=row.root_position,
                slots=library.address_of(row.slots),
                num_remaining=row.num_remaining,
                seed=row.seed & (1 << 64) - 1,
                inverse_temperature=1.0 / temperature if temperature else 0.0,
                truncation=row.truncation,
                stop_token_ids=library.address_of(stops),
                num_stops=len(stops),
            )
        self._paths = library.empty_array("q", most * self._most_nodes)
        self._lengths, self._extras = (library.empty_array("q", most * len(rows)) for _ in range(2))
        self._num_learned, self._is_sure = (library.empty_array("q", growth.num_trees) for _ in range(2))
        self._seconds = library.empty_array("d", 2 * most)
        results = self._paths, self._lengths, self._extras, self._num_learned, self._is_sure, self._seconds
        self.structure = library.DraftStepsStructure(
            *(most, len(rows), self._most_nodes, structures), *map(library.address_of, results)
        )

    def run(self, target: library.Decoder, addresses: library.Pass) -> None:
        """Run the steps. `addresses` are those of the target's Runner.shared_addresses."""
        self.num_complete = library.library().latebranch_draft_steps(
            *(ctypes.byref(target), ctypes.byref(addresses), ctypes.byref(self.growth.inputs)),
            *(ctypes.byref(self.growth.results), ctypes.byref(self.structure), library.num_threads()),
        )

    def seconds(self, step: int) -> tuple[float, float]:
        """Return the seconds in which a step's trees grew, and those of the target's pass."""
        draft_s, target_s = self._seconds[2 * step : 2 * step + 2]
        return draft_s, target_s

    def learned(self, tree: int) -> tuple[int, bool]:
        """Return how many tokens the cached text of a tree has learned, and whether it is sure of the token after them."""
        return self._num_learned[tree], bool(self._is_sure[tree])

    def paths(self, step: int, sizes: Sequence[int]) -> list[WalkedPath]:
        """Return the path through each row's tree in a complete step. `sizes` are the trees' numbers of nodes, roots included."""
        first_row, first_node = step * len(self._rows), step * self._most_nodes
        lengths, extras = (numbers[first_row : first_row + len(self._rows)] for numbers in (self._lengths, self._extras))
        firsts = accumulate(sizes, initial=first_node)
        return [
            WalkedPath(tuple(self._paths[first : first + length]), extra)
            for first, length, extra in zip(firsts, lengths, extras, strict=False)
        ]
