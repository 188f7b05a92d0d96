"""Trees of rows that rank, grown by the library for a draft head that it runs: a call a round.

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
from engine.native.library import Fed
from engine.native.mixture import Predicted, flattened
from engine.utils.host_transfer import as_longs


@dataclass(frozen=True, slots=True)
class RankedRow:
    """A row whose tree is to grow: where it lies, how large the tree may become, what ranks its nodes and what they cost.

    `slots` are by position, up to the last that a node may have. `least_chances` are those that its likeliest node must have, the
    next one and so on, [max_nodes], none below the one before it. `scale` and `sharpness` are those of
    AgreementWeights, `shares` are the Reliability's. `offered` and `continued` are a prior: of so many offers so many
    have a token that is accepted, given that their node is.
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


class FedRow(NamedTuple):
    """Committed tokens that the head is fed in the first round, from a position on.

    `slots` are by position, up to the last of them. `tree` is whose root the last is, if it is one.
    """

    token_ids: Sequence[int]
    first_position: int
    slots: Sequence[int]
    tree: int | None


class Ask(NamedTuple):
    """A node that the next round asks about, and its token; the root's is not told."""

    tree: int
    node: int
    parent: int
    token_id: int


class Offered(NamedTuple):
    """The best tokens of a node's law, best first, with their odds and their noise (0 for a row that has none)."""

    token_ids: tuple[int, ...]
    odds: tuple[float, ...]
    noise: tuple[float, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Offers:
    """What nodes were offered, by place: tokens and behind them how many they are, odds and noise."""

    tokens: library.Numbers
    odds: library.Numbers
    noise: library.Numbers

    def at(self, place: int) -> Offered:
        """Return one."""
        first, begin = place * (library.NUM_SCORES + 1), place * library.NUM_SCORES
        count = self.tokens[first + library.NUM_SCORES]
        of_tokens = slice(begin, begin + count)
        return Offered(tuple(self.tokens[first : first + count]), tuple(self.odds[of_tokens]), tuple(self.noise[of_tokens]))


@dataclass(frozen=True, slots=True)
class GrownTree:
    """A tree as it has grown; node 0 is the root. `by_age` are the others in the order in which they were offered.

    `offers` are the places of what nodes were offered, -1 where that was nothing; who `keeps_slot` was fed under its number.
    `chances` are those to be accepted; those `given_parent`, that it is if its parent is, are uncorrected.
    """

    parents: tuple[int, ...]
    token_ids: tuple[int, ...]
    offers: tuple[int, ...]
    keeps_slot: tuple[int, ...]
    by_age: tuple[int, ...]
    chances: tuple[float, ...]
    given_parent: tuple[float, ...]


class Growing:
    """The trees of a step, a context: `round` until nothing is asked, then `finish`.

    `where` says where everything lies (Runner.places); it `keeps` what it points at. A token at position 0 reads slot
    `before_all`. Each tree's root is the last token of one of the `fed` rows.
    """

    def __init__(
        self,
        head: library.Decoder,
        vocab_M: Int[Tensor, " M"],
        rows: Sequence[RankedRow],
        fed: Sequence[FedRow],
        before_all: int,
        where: library.Pass,
        keeps: object,
    ) -> None:
        assert sorted(row.tree for row in fed if row.tree is not None) == [*range(len(rows))]
        assert all(len(row.slots) > row.root_position + row.max_nodes for row in rows), "a node has no slot"
        self._rows, self._pass = rows, where
        slots = [as_longs(row.slots) for row in rows]
        shares = [array("d", chain.from_iterable(row.shares)) for row in rows]
        least_chances = [array("d", row.least_chances) for row in rows]
        assert all(len(own) == row.max_nodes for own, row in zip(least_chances, rows, strict=True))
        assert all(len(own) == library.NUM_SHARES for row in rows for own in row.shares)
        fed_ids, fed_slots = [as_longs(row.token_ids) for row in fed], [as_longs(row.slots) for row in fed]
        self._library = library.library()
        structures = (library.RankedRow * len(rows))(
            *(
                _structure(row, library.address_of(own), library.address_of(own_shares), library.address_of(least))
                for row, own, own_shares, least in zip(rows, slots, shares, least_chances, strict=True)
            )
        )
        fed_structures = (library.FedRow * len(fed))(
            *(
                library.FedRow(
                    *(len(ids), row.first_position, library.address_of(ids), library.address_of(own)),
                    -1 if row.tree is None else row.tree,
                )
                for row, ids, own in zip(fed, fed_ids, fed_slots, strict=True)
            )
        )
        self._kept = (head, vocab_M, slots, shares, least_chances, fed_ids, fed_slots, keeps)
        self._most_asks = sum(max(1, min(row.branches, row.max_nodes)) for row in rows)
        self._handle = self._library.latebranch_grow(
            ctypes.byref(head), vocab_M.data_ptr(), structures, len(rows), fed_structures, len(fed), before_all
        )
        self._num_offers = 0
        self.frontier = [Ask(tree, 0, -1, -1) for tree in range(len(rows))]

    def __enter__(self) -> "Growing":
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let the library forget it."""
        self._library.latebranch_end_growth(self._handle)

    def round(self, told: Sequence[Predicted], is_sure: Sequence[bool], unknown: Sequence[int]) -> tuple[list[list[bool]], Fed]:
        """Answer the nodes of `frontier`, which become those of the next round; return how that went.

        What cached text foretells there is `told`; columns from M on are of `unknown` tokens. Where it `is_sure` the head is not
        asked. Of each foretold token is returned whether more of its chance is the cache's, and what was fed.
        """
        assert len(told) == len(is_sure) == len(self.frontier)
        firsts, columns, odds = flattened(told)
        places = array("q", [*firsts, *columns, *unknown])
        flags = array("B", [*is_sure, *bytes(firsts[-1])])
        begin, share, flag = library.address_of(places), library.address_of(odds), library.address_of(flags)
        most = self._most_asks
        asks, fed = library.room("q", 4 * most), Fed()
        structure = library.Told(
            firsts=begin,
            columns=begin + 8 * len(firsts),
            odds=share,
            chances=share + 4 * firsts[-1],
            is_sure=flag,
            unknown=begin + 8 * (len(firsts) + firsts[-1]),
            num_unknown=len(unknown),
            is_rather_cached=flag + len(told),
        )
        count = self._library.latebranch_grow_round(
            self._handle,
            ctypes.byref(structure),
            ctypes.byref(self._pass),
            *(library.address_of(asks), most, ctypes.byref(fed), library.num_threads()),
        )
        self._num_offers += len(told)
        self.frontier = [
            Ask(*one) for one in zip(*(asks[first : first + count] for first in range(0, 4 * most, most)), strict=True)
        ]
        is_rather_cached = [*map(bool, flags[len(told) :])]
        return [is_rather_cached[first:end] for first, end in pairwise(firsts)], fed

    def finish(self) -> tuple[list[GrownTree], Offers]:
        """Return the trees, and what their nodes were offered."""
        most = sum(1 + row.max_nodes for row in self._rows)
        counts, nodes, chances = library.room("q", len(self._rows)), library.room("q", 5 * most), library.room("d", 2 * most)
        tokens = library.room("q", self._num_offers * (library.NUM_SCORES + 1))
        odds, noise = (library.room(kind, self._num_offers * library.NUM_SCORES) for kind in "fd")
        self._library.latebranch_grown(
            *(self._handle, library.address_of(counts), library.address_of(nodes), library.address_of(chances), most),
            *map(library.address_of, (tokens, odds, noise)),
        )
        trees = []
        for first, end in pairwise(accumulate(counts, initial=0)):
            parents, token_ids, offers, keeps_slot, by_age = (
                tuple(nodes[start + first : start + end]) for start in range(0, 5 * most, most)
            )
            worth = (tuple(chances[start + first : start + end]) for start in (0, most))
            trees.append(GrownTree(parents, token_ids, offers, keeps_slot, by_age[:-1], *worth))
        return trees, Offers(tokens, odds, noise)


def _structure(row: RankedRow, slots: int, shares: int, least_chances: int) -> library.RankedRow:
    """Return a row for the library; its slots, shares and least chances lie at those addresses."""
    return library.RankedRow(
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
    )
