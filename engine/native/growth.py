"""Trees of ranked rows, grown by the library for a draft head that it runs, with one call a round.

Shape key: M tokens that the head knows.
"""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from jaxtyping import Int
from torch import Tensor

from engine.native import library
from engine.native.distributions import KeptTokens
from engine.native.library import Fed
from engine.native.mixture import Predicted, flattened
from engine.utils.host_transfer import as_longs


@dataclass(frozen=True, slots=True)
class RankedRow:
    """A row whose tree is to grow: its slots, the limits of the tree, the parameters that rank its nodes, and costs.

    `slots` are by position, up to the last that a node may have. `least_chances` are the acceptance thresholds of the likeliest
    node, of the next one and so on, [max_nodes], ascending. `scale` and `sharpness` are those of AgreementWeights, `shares` those
    of Reliability. `offered` and `continued` are a prior: the number of offers, and how many of them have an accepted token,
    given that their node is accepted.
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


class FedRow(NamedTuple):
    """Committed tokens that the first round feeds to the head, from a position on.

    `slots` are by position, up to the last token's. `tree` is the tree whose root is the last token, if any.
    """

    token_ids: Sequence[int]
    first_position: int
    slots: Sequence[int]
    tree: int | None


class FrontierEntry(NamedTuple):
    """A node for which the next round needs a distribution, and its token; the root's token is -1."""

    tree: int
    node: int
    parent: int
    token_id: int


class Offered(NamedTuple):
    """The best tokens after a node, best first, with their probabilities and noise (0 for a row without noise)."""

    token_ids: tuple[int, ...]
    odds: tuple[float, ...]
    noise: tuple[float, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Offers:
    """Offers by place: tokens followed by their number, probabilities, and noise."""

    tokens: library.Numbers
    odds: library.Numbers
    noise: library.Numbers

    def at(self, place: int) -> Offered:
        """Return the offer of a place."""
        first, begin = place * (library.NUM_SCORES + 1), place * library.NUM_SCORES
        count = self.tokens[first + library.NUM_SCORES]
        of_tokens = slice(begin, begin + count)
        return Offered(tuple(self.tokens[first : first + count]), tuple(self.odds[of_tokens]), tuple(self.noise[of_tokens]))


@dataclass(frozen=True, slots=True)
class GrownTree:
    """A grown tree; node 0 is the root. `by_age` has the other nodes in the order in which they were offered.

    `offers` are the places of the nodes' offers, -1 for a node without one. `keeps_slot`: the node was fed under its final
    number. `chances` are acceptance probabilities. `given_parent` are conditional on the parent, and uncorrected.
    """

    parents: tuple[int, ...]
    token_ids: tuple[int, ...]
    offers: tuple[int, ...]
    keeps_slot: tuple[int, ...]
    by_age: tuple[int, ...]
    chances: tuple[float, ...]
    given_parent: tuple[float, ...]


class Growing:
    """The trees of a step, a context manager: call `round` until the frontier is empty, then `finish`.

    `addresses` are those of Runner.shared_addresses; `keeps` owns the memory that they point at. A token at position 0 reads slot
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
        keeps: object,
    ) -> None:
        assert sorted(row.tree for row in fed if row.tree is not None) == [*range(len(rows))]
        assert all(len(row.slots) > row.root_position + row.max_nodes for row in rows), "a node has no slot"
        self._rows, self._pass = rows, addresses
        slots = [as_longs(row.slots) for row in rows]
        shares = [array("d", chain.from_iterable(row.shares)) for row in rows]
        least_chances = [array("d", row.least_chances) for row in rows]
        assert all(len(own) == row.max_nodes for own, row in zip(least_chances, rows, strict=True))
        assert all(len(own) == library.NUM_SHARES for row in rows for own in row.shares)
        fed_ids, fed_slots = [as_longs(row.token_ids) for row in fed], [as_longs(row.slots) for row in fed]
        self._library = library.library()
        structures = (library.RankedRowStructure * len(rows))(
            *(
                _structure(row, library.address_of(own), library.address_of(own_shares), library.address_of(least))
                for row, own, own_shares, least in zip(rows, slots, shares, least_chances, strict=True)
            )
        )
        fed_structures = (library.FedRowStructure * len(fed))(
            *(
                library.FedRowStructure(
                    *(len(ids), row.first_position, library.address_of(ids), library.address_of(own)),
                    -1 if row.tree is None else row.tree,
                )
                for row, ids, own in zip(fed, fed_ids, fed_slots, strict=True)
            )
        )
        self._kept = (head, vocab_M, slots, shares, least_chances, fed_ids, fed_slots, keeps)
        self._max_frontier = sum(max(1, min(row.branches, row.max_nodes)) for row in rows)
        self._handle = self._library.latebranch_grow(
            ctypes.byref(head), vocab_M.data_ptr(), structures, len(rows), fed_structures, len(fed), before_all
        )
        self._num_offers = 0
        self.frontier = [FrontierEntry(tree, 0, -1, -1) for tree in range(len(rows))]

    def __enter__(self) -> "Growing":
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Free the library's trees."""
        self._library.latebranch_end_growth(self._handle)

    def round(
        self, predicted: Sequence[Predicted], is_sure: Sequence[bool], unknown: Sequence[int]
    ) -> tuple[list[list[bool]], Fed]:
        """Rank tokens after the frontier's nodes, and replace the frontier by that of the next round.

        `predicted` is cached text's prediction at each node; columns from M on are of `unknown` tokens. The head does not run on
        a node whose prediction `is_sure`. Return, for each predicted token, whether most of its probability comes from cached
        text; and the counts of fed tokens.
        """
        assert len(predicted) == len(is_sure) == len(self.frontier)
        firsts, columns, odds = flattened(predicted)
        places = array("q", [*firsts, *columns, *unknown])
        flags = array("B", [*is_sure, *bytes(firsts[-1])])
        begin, share, flag = library.address_of(places), library.address_of(odds), library.address_of(flags)
        most = self._max_frontier
        entries, fed = library.empty_array("q", 4 * most), Fed()
        structure = library.Predictions(
            firsts=begin,
            columns=begin + 8 * len(firsts),
            odds=share,
            chances=share + 4 * firsts[-1],
            is_sure=flag,
            unknown=begin + 8 * (len(firsts) + firsts[-1]),
            num_unknown=len(unknown),
            is_rather_cached=flag + len(predicted),
        )
        count = self._library.latebranch_grow_round(
            self._handle,
            ctypes.byref(structure),
            ctypes.byref(self._pass),
            *(library.address_of(entries), most, ctypes.byref(fed), library.num_threads()),
        )
        self._num_offers += len(predicted)
        columns_of = (entries[first : first + count] for first in range(0, 4 * most, most))
        self.frontier = [FrontierEntry(*entry) for entry in zip(*columns_of, strict=True)]
        is_rather_cached = [*map(bool, flags[len(predicted) :])]
        return [is_rather_cached[first:end] for first, end in pairwise(firsts)], fed

    def finish(self) -> tuple[list[GrownTree], Offers]:
        """Return the trees, and the offers of their nodes."""
        most = sum(1 + row.max_nodes for row in self._rows)
        counts, nodes = library.empty_array("q", len(self._rows)), library.empty_array("q", 5 * most)
        chances = library.empty_array("d", 2 * most)
        tokens = library.empty_array("q", self._num_offers * (library.NUM_SCORES + 1))
        odds, noise = (library.empty_array(kind, self._num_offers * library.NUM_SCORES) for kind in "fd")
        self._library.latebranch_grown(
            *(self._handle, library.address_of(counts), library.address_of(nodes), library.address_of(chances), most),
            *map(library.address_of, (tokens, odds, noise)),
        )
        trees = []
        for first, end in pairwise(accumulate(counts, initial=0)):
            parents, token_ids, offers, keeps_slot, by_age = (
                tuple(nodes[start + first : start + end]) for start in range(0, 5 * most, most)
            )
            of_tree, given_parent = (tuple(chances[start + first : start + end]) for start in (0, most))
            trees.append(GrownTree(parents, token_ids, offers, keeps_slot, by_age[:-1], of_tree, given_parent))
        return trees, Offers(tokens, odds, noise)


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
    )
