"""Trees of ranked rows, grown by the library for a draft head that it runs, in one call.

Shape key: M tokens that the head knows.
"""

import ctypes
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from jaxtyping import Int
from msgspec import structs
from torch import Tensor

from engine.native import library
from engine.native.distributions import KeptTokens
from engine.native.texts import TextsHandle
from engine.utils.host_transfer import as_longs

IS_RATHER_CACHED, IS_PREDICTED = 1, 2  # bits of a token's origin (ranked_tree.h)


class RankedRow(NamedTuple):
    """A row whose tree is to grow: its slots, the limits of the tree, the parameters that rank its nodes, and costs.

    `slots` are by position, up to the last that a node may have. `least_chances` are the acceptance thresholds of the likeliest
    node, of the next one and so on, [max_nodes], ascending. `scale` and `sharpness` are those of AgreementWeights, `shares` those
    of Reliability. `offered` and `continued` are a prior: the number of offers, and how many of them have an accepted token,
    given that their node is accepted. `texts` are the cached texts of its request.
    """

    root_position: int
    slots: Sequence[int]
    max_nodes: int
    depth: int
    branches: int
    seed: int
    has_noise: bool
    least_chances: Sequence[float]
    level_cost: float
    offered: float
    continued: float
    scale: float
    shares: Sequence[Sequence[float]]
    temperature: float
    sharpness: float
    truncation: KeptTokens
    texts: TextsHandle | None = None


class FedRow(msgspec.Struct, frozen=True):
    """Committed tokens that the first round feeds to the head, from a position on.

    `slots` are by position, up to the last token's. `tree` is the tree whose root is the last token, if any.
    """

    token_ids: Sequence[int]
    first_position: int
    slots: Sequence[int]
    tree: int | None


class Offered(msgspec.Struct, frozen=True, eq=False):
    """The best tokens after a node, best first, with their probabilities and noise (0 for a row without noise)."""

    token_ids: library.Numbers
    probs: library.Numbers
    noise: library.Numbers

    def index_of(self, token_id: int) -> int | None:
        """Return the place of a token, None if it is not among the best."""
        return self.token_ids.index(token_id) if token_id in self.token_ids else None


class Offers(msgspec.Struct, frozen=True, eq=False):
    """Offers of a step by place: NUM_SCORES tokens followed by their number, probabilities, and noise.

    Its first one is the `first`th of the arrays.
    """

    tokens: memoryview
    odds: memoryview
    noise: memoryview
    first: int = 0

    def at(self, place: int) -> Offered:
        """Return the offer of a place."""
        place += self.first
        first = place * library.NUM_SCORES
        count = self.tokens[first + place + library.NUM_SCORES]
        end = first + count
        tokens = self.tokens[first + place : end + place]
        return Offered(array("q", tokens), array("f", self.odds[first:end]), array("d", self.noise[first:end]))


class GrownTree(msgspec.Struct, frozen=True):
    """A grown tree; node 0 is the root. `by_age` has the other nodes in the order in which they were offered.

    `offers` are the places of the nodes' offers, -1 for a node without one. `keeps_slot`: the node was fed under its final
    number. `origins` are IS_RATHER_CACHED and IS_PREDICTED, added, of the other nodes. `chances` are acceptance probabilities.
    `given_parent` are conditional on the parent, and uncorrected. The tree grew in `num_rounds` rounds.
    """

    parents: tuple[int, ...]
    token_ids: tuple[int, ...]
    offers: tuple[int, ...]
    keeps_slot: tuple[int, ...]
    by_age: tuple[int, ...]
    origins: tuple[int, ...]
    chances: tuple[float, ...]
    given_parent: tuple[float, ...]
    num_rounds: int


class GrownTrees(msgspec.Struct, frozen=True):
    """The trees of a step, the offers of their nodes, and the counts of tokens that each round fed to the head."""

    trees: list[GrownTree]
    offers: Offers
    fed: list[library.Fed]


class NativeGrowth:
    """Grows the trees of a step, or of several in a row. Owns the memory behind `inputs` and `results`.

    The `fed` rows are fed to the head first. `addresses` are those of Runner.shared_addresses. A token at position 0 reads slot
    `before_all`. Each tree's root is the last token of one of the `fed` rows.
    """

    def __init__(
        self,
        head: library.Decoder,
        vocab_M: Int[Tensor, " M"],
        rows: Sequence[RankedRow],
        fed: Sequence[FedRow],
        before_all: int,
        addresses: library.Pass,
        num_steps: int = 1,
    ) -> None:
        structures = library.structures(library.RankedRowStructure, len(rows))
        fed_structures = library.structures(library.FedRowStructure, len(fed))
        kept: list[object] = [head, vocab_M, addresses]
        for index, row in enumerate(rows):
            slots, least_chances = as_longs(row.slots), array("d", row.least_chances)
            shares = array("d", [*row.shares[0], *row.shares[1]])
            assert len(slots) > row.root_position + row.max_nodes, "a node has no slot"
            assert len(least_chances) == row.max_nodes
            assert len(shares) == 2 * library.NUM_SHARES
            pointers = library.address_of(slots), library.address_of(shares), library.address_of(least_chances)
            structures[index] = _structure(row, *pointers)
            kept += slots, shares, least_chances, row.texts
        trees_fed: list[int] = []
        for index, one in enumerate(fed):
            fed_ids, slots, tree = as_longs(one.token_ids), as_longs(one.slots), -1 if one.tree is None else one.tree
            begins = library.address_of(fed_ids), library.address_of(slots)
            fed_structures[index] = library.FedRowStructure(len(fed_ids), one.first_position, *begins, tree)
            kept += fed_ids, slots
            if tree >= 0:
                trees_fed.append(tree)
        assert sorted(trees_fed) == [*range(len(rows))]
        self._kept = kept
        self.inputs = library.GrowthStructure(
            *(ctypes.pointer(head), vocab_M.data_ptr(), structures, len(rows), fed_structures, len(fed), before_all),
            ctypes.pointer(addresses),
        )
        self.num_trees, self.most_nodes = len(rows), sum(1 + row.max_nodes for row in rows)
        most, most_rounds = self.most_nodes, max((row.depth for row in rows), default=1)
        self._counts, self._rounds = (library.empty_array("q", num_steps * len(rows)) for _ in range(2))
        self._nodes = library.empty_array("q", num_steps * 6 * most)
        self._chances = library.empty_array("d", num_steps * 2 * most)
        places = num_steps * most
        tokens = np.empty(places * (library.NUM_SCORES + 1), dtype=np.int64)  # of NumPy: most of the memory is never used
        odds, noise = (np.empty(places * library.NUM_SCORES, dtype=dtype) for dtype in (np.float32, np.float64))
        self._offers = Offers(tokens.data, odds.data, noise.data)
        self._fed, self._num_fed = library.structures(library.Fed, num_steps * most_rounds), library.empty_array("q", num_steps)
        self.results = library.GrownTreesStructure(
            *(most, most_rounds),
            *map(library.address_of, (self._counts, self._rounds, self._nodes, self._chances)),
            *map(library.address, (tokens, odds, noise)),
            *(self._fed, library.address_of(self._num_fed)),
        )

    def run(self) -> None:
        """Feed the head, and grow the trees of one step."""
        library.library().latebranch_grow(ctypes.byref(self.inputs), ctypes.byref(self.results), library.num_threads())

    def trees(self, step: int = 0) -> GrownTrees:
        """Return the trees of a step that has run."""
        most, num_trees = self.most_nodes, self.num_trees
        own, first_node, first_chance = slice(step * num_trees, (step + 1) * num_trees), step * 6 * most, step * 2 * most
        trees, first = [], 0
        for count, num_rounds in zip(self._counts[own], self._rounds[own], strict=True):
            end = first + count
            parents, token_ids, places, keeps_slot, by_age, origins = [
                tuple(self._nodes[start + first : start + end]) for start in range(first_node, first_node + 6 * most, most)
            ]
            of_tree, given_parent = [
                tuple(self._chances[start + first : start + end]) for start in (first_chance, first_chance + most)
            ]
            by_age, origins = by_age[:-1], origins[:-1]
            trees.append(GrownTree(parents, token_ids, places, keeps_slot, by_age, origins, of_tree, given_parent, num_rounds))
            first = end
        first_round = step * self.results.most_rounds
        fed = self._fed[first_round : first_round + self._num_fed[step]]
        return GrownTrees(trees, structs.replace(self._offers, first=step * most), fed)


def _structure(row: RankedRow, slots: int, shares: int, least_chances: int) -> library.RankedRowStructure:
    """Return a row for the library; `slots`, `shares` and `least_chances` are addresses."""
    return library.RankedRowStructure(
        root_position=row.root_position,
        slots=slots,
        max_nodes=row.max_nodes,
        depth=row.depth,
        branches=row.branches,
        seed=row.seed & (1 << 64) - 1,
        has_noise=row.has_noise,
        least_chances=least_chances,
        level_cost=row.level_cost,
        offered=row.offered,
        continued=row.continued,
        scale=row.scale,
        shares=shares,
        temperature=row.temperature,
        sharpness=row.sharpness,
        truncation=row.truncation,
        texts=None if row.texts is None else ctypes.addressof(row.texts.structure),
    )
