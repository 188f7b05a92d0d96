"""Trees of rows that rank, grown by the library for a draft head that it runs: a call a round.

Shape key: M tokens that the head knows.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from engine.native import library
from engine.native.mixture import Foretold, flattened
from engine.transfer import as_longs


@dataclass(frozen=True, slots=True)
class RankedRow:
    """A row whose tree is to grow: where it lies, how large the tree may become, what ranks its nodes and what they cost.

    `slots` are by position, up to the last that a node may have. `scale` is the AgreementScale's, `shares` the Reliability's.
    `offered` and `continued` are a prior: of so many offers so many have a token that is accepted, given that their node is.
    """

    root_position: int
    slots: Sequence[int]
    max_nodes: int
    depth: int
    branches: int
    seed: int
    has_noise: bool
    node_price: float
    level_price: float
    offered: float
    continued: float
    scale: float
    shares: Sequence[Sequence[float]]
    temperature: float


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
    """The best tokens of a node's law, best first, with their scores."""

    token_ids: tuple[int, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Offers:
    """What nodes were offered, by place."""

    tokens: NDArray[np.int64]
    scores: NDArray[np.float64]

    def at(self, place: int) -> Offered:
        """Return one."""
        *token_ids, count = self.tokens[place].tolist()
        return Offered(tuple(token_ids[:count]), tuple(self.scores[place, :count].tolist()))


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
        shares = [np.array(row.shares, dtype=np.float64) for row in rows]
        assert all(one.shape == (2, library.NUM_SHARES) for one in shares)
        fed_ids, fed_slots = [as_longs(row.token_ids) for row in fed], [as_longs(row.slots) for row in fed]
        self._library = library.library()
        structures = (library.RankedRow * len(rows))(
            *(
                _structure(row, _address(own), library.address(own_shares))
                for row, own, own_shares in zip(rows, slots, shares, strict=True)
            )
        )
        fed_structures = (library.FedRow * len(fed))(
            *(
                library.FedRow(len(ids), row.first_position, _address(ids), _address(own), -1 if row.tree is None else row.tree)
                for row, ids, own in zip(fed, fed_ids, fed_slots, strict=True)
            )
        )
        self._kept = (head, vocab_M, slots, shares, fed_ids, fed_slots, keeps)
        self._most_asks = sum(max(1, min(row.branches, row.max_nodes)) for row in rows)
        self._handle = self._library.latebranch_grow(
            ctypes.byref(head), vocab_M.data_ptr(), structures, len(rows), fed_structures, len(fed), before_all
        )
        self._num_offers = 0
        self.asks = [Ask(tree, 0, -1, -1) for tree in range(len(rows))]

    def __enter__(self) -> "Growing":
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let the library forget it."""
        self._library.latebranch_end_growth(self._handle)

    def round(self, told: Sequence[Foretold], is_sure: Sequence[bool], unknown: Sequence[int]) -> tuple[list[list[bool]], int]:
        """Answer the nodes of `asks`, which become those of the next round; return how that went.

        What cached text foretells there is `told`; columns from M on are of `unknown` tokens. Where it `is_sure` the head is not
        asked. Of each foretold token is returned whether more of its chance is the cache's, and of all how many tokens were fed.
        """
        assert len(told) == len(is_sure) == len(self.asks)
        firsts, columns, odds = flattened(told)
        places = np.array([*firsts, *columns, *unknown], dtype=np.int64)
        flags = np.array([*is_sure, *(False for _ in range(firsts[-1]))], dtype=np.uint8)
        begin, share, flag = library.address(places), library.address(odds), library.address(flags)
        asks = np.empty((4, self._most_asks), dtype=np.int64)
        num_fed = ctypes.c_int64()
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
            library.address(asks),
            self._most_asks,
            ctypes.byref(num_fed),
            library.num_threads(),
        )
        self._num_offers += len(told)
        self.asks = [Ask(*one) for one in asks[:, :count].T.tolist()]
        is_rather_cached = flags[len(told) :].astype(np.bool_).tolist()
        return [is_rather_cached[first:end] for first, end in pairwise(firsts)], num_fed.value

    def finish(self) -> tuple[list[GrownTree], Offers]:
        """Return the trees, and what their nodes were offered."""
        most = sum(1 + row.max_nodes for row in self._rows)
        counts, nodes = np.empty(len(self._rows), dtype=np.int64), np.empty((5, most), dtype=np.int64)
        chances = np.empty((2, most), dtype=np.float64)
        self._library.latebranch_grown(
            self._handle, library.address(counts), library.address(nodes), library.address(chances), most
        )
        trees = []
        for first, end in pairwise(accumulate(counts.tolist(), initial=0)):
            parents, token_ids, offers, keeps_slot, by_age = map(tuple, nodes[:, first:end].tolist())
            worth = map(tuple, chances[:, first:end].tolist())
            trees.append(GrownTree(parents, token_ids, offers, keeps_slot, by_age[:-1], *worth))
        tokens = np.empty((self._num_offers, library.NUM_SCORES + 1), dtype=np.int64)
        scores = np.empty((self._num_offers, library.NUM_SCORES), dtype=np.float64)
        self._library.latebranch_offers(self._handle, library.address(tokens), library.address(scores))
        return trees, Offers(tokens, scores)


def _address(numbers: Any) -> int:
    return int(numbers.buffer_info()[0])


def _structure(row: RankedRow, slots: int, shares: int) -> library.RankedRow:
    """Return a row for the library; its slots and shares lie at those addresses."""
    return library.RankedRow(
        root_position=row.root_position,
        slots=slots,
        max_nodes=row.max_nodes,
        depth=row.depth,
        branches=row.branches,
        seed=row.seed & (1 << 64) - 1,
        has_noise=row.has_noise,
        node_price=row.node_price,
        level_price=row.level_price,
        offered=row.offered,
        continued=row.continued,
        scale=row.scale,
        shares=shares,
        temperature=row.temperature,
    )
