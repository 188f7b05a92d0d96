"""Shares a step's tokens out among sequences: the marginal allocation that brings the batch most tokens a second.

A step's seconds are common to the batch, so a node is worth drafting where it adds more tokens a second than the batch has
already. For one price of a packed token, each sequence takes the entry with the largest surplus: its tokens less what its seconds
are worth. For every price and every number of draft passes (which all sequences share, so depth is paid once) the whole step is
priced, and the best is kept. Sequences alike would all change at one price: on the way to what other prices give they are
switched one by one, those first that gain most for a node, and the best number of them is taken. Entries that differ by the
least chance of a node need no prices: each is tried for all sequences, and for those alone that gain most.

Shape key: B sequences, M entries by depth, P prices, D numbers of passes, C candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from engine.tree import GrowthPrices
from selector.cost import CostModel, Works
from selector.estimators import Estimates
from selector.menu import Menu

Array = NDArray[np.float64]
Places = NDArray[np.int64]
Question = tuple[Sequence[int], Sequence[int]]  # sequences, and places on the menu, each of which all of them would have

_NUM_PRICES = 8
SPREAD = (-1.28, -0.52, 0.0, 0.52, 1.28)  # standard deviations, each as likely
ODDS = np.linspace(0.0, 1.0, 65)  # of a tree to go on for another level
_AHEAD = 4.0  # packed tokens a sequence, up to where prices of a token are taken from T(N)


@dataclass(frozen=True)
class BatchLoad:
    """What the batch's step runs whatever is chosen, and what a node adds for each sequence.

    `base` is plain decoding's work, with the trees that requests ask for themselves; `base_tokens` what it brings.
    `context_B` are cached tokens of each sequence, `draws_B` whether it draws (1) or ranks (0). Of the tokens that its drafter
    must be fed before it can draft, `unfed_B` weigh in the choice, and the `lag_B` others are written off over steps to come:
    only a probe, which may be the last for long, pays for them. `model_share` of the rounds of growth run the model.
    """

    base: Works
    base_tokens: float
    context_B: Sequence[float]
    unfed_B: Sequence[float]
    lag_B: Sequence[float]
    draws_B: Sequence[float]
    model_share: float


@dataclass(frozen=True)
class Allocation:
    """Each sequence's place on the menu, and what is expected of the step."""

    places: tuple[int, ...]
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Trials:
    """A choice with each of some entries for some of its sequences: what is expected of each, and the seconds that it loses."""

    places: tuple[int, ...]  # of the choice
    indices: Sequence[int]
    entries: Sequence[int]
    tokens: Sequence[float]
    seconds: Sequence[float]
    losses_s: Sequence[float]

    def of(self, trial: int) -> Allocation:
        """Return one as an allocation."""
        places = [*self.places]
        for index in self.indices:
            places[index] = self.entries[trial]
        return Allocation((*places,), self.tokens[trial], self.seconds[trial])


class Allocator:
    """Finds allocations for one step. Knows its estimates, its costs and what the step runs anyway."""

    def __init__(
        self, menu: Menu, estimates: Estimates, is_allowed_BM: NDArray[np.bool_] | None, load: BatchLoad, costs: CostModel
    ) -> None:
        """Allocate what `is_allowed_BM` says, anything if it is None."""
        self._menu = menu
        self._estimates = estimates
        self._is_allowed_BM = _everything(len(load.context_B), len(menu)) if is_allowed_BM is None else is_allowed_BM
        self._load = load
        self._costs = costs
        self._num_rows = len(load.context_B)

    @property
    def is_finite(self) -> bool:
        """Whether all that is expected is a finite number."""
        return bool(np.isfinite(self._estimates.told_4BM.sum()))

    @cached_property
    def _fed_BM(self) -> Array:
        unfed_BM = np.where(self._menu.depths > 0, np.array(self._load.unfed_B)[:, None], 0.0)
        return np.asarray(self._load.model_share * (self._estimates.fed + unfed_BM))

    @cached_property
    def _rows(self) -> Places:
        return np.arange(self._num_rows)

    @cached_property
    def _draws_B(self) -> Array:
        return np.array(self._load.draws_B, dtype=np.float64)

    @cached_property
    def _context_B(self) -> Array:
        return np.array(self._load.context_B, dtype=np.float64)

    def plain(self) -> Allocation:
        """Return plain decoding of every sequence."""
        return self.of((0,) * self._num_rows)

    def ceiling(self) -> float:
        """Return the tokens a second that the best number of nodes would bring if every one came: no drafter brings more.

        Drafting them is taken to cost nothing, for cached text needs no pass of a model; of sequences that differ all nodes are
        taken to be of the one whose nodes are cheapest.
        """
        load, num_rows = self._load, self._num_rows
        nodes_C = np.arange(1.0, num_rows * self._menu.deepest + 1.0)
        nothing_C = np.zeros_like(nodes_C)
        works = self._works(nodes_C, nodes_C * min(load.draws_B), nodes_C * min(load.context_B), nothing_C, nothing_C)
        return float(((load.base_tokens + num_rows + nodes_C) / self._costs.step_s(works)).max(initial=0.0))

    def of(self, places: Sequence[int]) -> Allocation:
        """Return a given choice with what is expected of it."""
        return self._best_of(np.array([places]))

    def prices(self, chosen: Allocation, num_sharing: int) -> GrowthPrices:
        """Return what a node and a level more cost in a choice's step, in tokens that its seconds would bring.

        A node's is the mean over sequences. A level's is that of one that `num_sharing` sequences take together, and of a token
        fed in it. A tree's first node is one more than what all others have, and so on: the mean over what they may have, each
        of them as widely spread as what is expected of it is large. No node is less likely than the menu has any.
        """
        load, places_B = self._load, np.array(chosen.places)
        num_nodes = float(self._estimates.nodes[self._rows, places_B].sum())
        more = self._costs.marginals(float(load.base.num_tokens) + num_nodes)
        shared_s = more.drawn_s * sum(load.draws_B) + more.score_s * sum(load.context_B)
        node_s = more.token_s + shared_s / self._num_rows
        level_s = self._costs.prices["round"] + load.model_share * float(self._costs.pass_s(load.base.num_keys))
        level_s = level_s / max(1, num_sharing) + load.model_share * more.draft_token_s
        num_drafting = np.count_nonzero(places_B)
        if not num_drafting:
            return GrowthPrices(node_s * chosen.rate, level_s * chosen.rate)
        own, num_others = num_nodes / num_drafting, num_drafting - 1
        spread_Z = np.array(SPREAD) * own * num_others**0.5 if num_others else np.zeros(1)
        others_Z = np.maximum(0.0, num_others * own + spread_Z)
        sizes_N = float(load.base.num_tokens) + np.arange(1.0 + float(self._menu.num_nodes[places_B].max()))
        tokens_s = np.array([self._costs.tokens_s(sizes_N + others) for others in others_Z.tolist()]).mean(0)
        nodes = np.maximum((shared_s / self._num_rows + np.diff(tokens_s)) * chosen.rate, self._menu.least_chance)
        return GrowthPrices(node_s * chosen.rate, level_s * chosen.rate, tuple(_never_less(nodes)))

    def trials(self, chosen: Allocation, asked: Sequence[Question]) -> list[Trials]:
        """Return the choice with each of some entries for some sequences, and the seconds that each loses; no entry is plain.

        A loss is what the step takes longer, less what the tokens that it brings are worth at the choice's own rate.
        """
        tokens, seconds = self._tried(chosen.places, asked)
        lag_s = self._load.model_share * self._costs.prices["draft_token"]
        found, begin = [], 0
        for indices, entries in asked:
            end = begin + len(entries)
            told = tokens[begin:end], seconds[begin:end]
            lost_s = lag_s * sum(self._load.lag_B[index] for index in indices)
            losses_s = [lost_s + taken_s - brought / chosen.rate for brought, taken_s in zip(*told, strict=True)]
            found.append(Trials(chosen.places, indices, entries, *told, losses_s))
            begin = end
        return found

    def _tried(self, places: Sequence[int], asked: Sequence[Question]) -> tuple[list[float], list[float]]:
        """Return the tokens and the seconds of a choice with each entry that is asked about, question by question."""
        parts = []
        for indices, entries in asked:
            places_CB = np.repeat(np.array([places]), len(entries), axis=0)
            places_CB[:, indices] = np.array(entries, dtype=np.int64)[:, None]
            parts.append(places_CB)
        tokens_C, seconds_C = self._priced(np.concatenate(parts))
        return tokens_C.tolist(), seconds_C.tolist()

    def best(self, plain: Allocation) -> Allocation:
        """Return the best allocation that is found; never a worse one than plain decoding."""
        if len(self._menu) == 1:
            return plain
        if self._num_rows == 1 or self._menu.is_by_chance:
            return max(plain, self._best_alike(), key=lambda one: one.rate)
        chosen_PDB = self._by_price(plain)
        _, num_depths, num_rows = chosen_PDB.shape
        places_CB = chosen_PDB.reshape(-1, num_rows)
        tokens_C, seconds_C = self._priced(places_CB)
        best = int((tokens_C / seconds_C).argmax())
        found = [plain, _of_candidate(places_CB, tokens_C, seconds_C, best)]
        if num_rows > 1:
            depths = {min(1, num_depths - 1), best % num_depths}
            goals = [*(to_B for depth in sorted(depths) for to_B in chosen_PDB[:, depth]), np.array(plain.places)]
            if self._menu.least_chances.any():  # whose depths are all alike
                goals.append(np.array(self._best_alike().places))
            different = {to_B.tobytes(): to_B for to_B in goals}
            found.append(self._best_of(np.concatenate([self._switched(places_CB[best], to_B) for to_B in different.values()])))
        return max(found, key=lambda one: one.rate)

    def _best_alike(self) -> Allocation:
        """Return the best allocation of one entry for all that may have it, or for some of them, those first that gain most.

        Where entries differ by the least chance of a node that is all: what a node costs is the same for everybody.
        """
        num_rows = self._num_rows
        if num_rows == 1:
            return self._best_of(np.flatnonzero(self._is_allowed_BM[0])[:, None])
        gain_MB = np.where(self._is_allowed_BM, self._estimates.tokens - 1.0, -1.0)[:, 1:].T
        spent_MB = (self._estimates.nodes + self._fed_BM)[:, 1:].T
        rank_MB = np.argsort(np.argsort(-gain_MB / np.maximum(spent_MB, 1e-9), axis=1, kind="stable"), axis=1)
        drafts_MCB = (rank_MB[:, None] <= self._rows[:, None]) & self._is_allowed_BM[:, 1:].T[:, None]
        places_MCB = drafts_MCB * np.arange(1, len(self._menu))[:, None, None]
        return self._best_of(places_MCB.reshape(-1, num_rows))

    def _by_price(self, plain: Allocation) -> NDArray[np.int64]:
        """Return what each sequence takes at each price and within each number of passes, [P, D, B]."""
        surplus_PBM = self._estimates.tokens.astype(np.float32) - np.float32(plain.rate) * self._seconds_added()
        best_PBM = np.maximum.accumulate(surplus_PBM, axis=2)
        is_new = np.ones(best_PBM.shape, dtype=np.bool_)
        np.greater(best_PBM[..., 1:], best_PBM[..., :-1], out=is_new[..., 1:])
        places_PBM = np.maximum.accumulate(is_new * np.arange(len(self._menu), dtype=np.int16), axis=2)
        return places_PBM[:, :, self._menu.last_of_depth].transpose(0, 2, 1).astype(np.int64)

    def _seconds_added(self) -> NDArray[np.float32]:
        """Return the seconds that entries add to the step, but for the passes, at each price of a token, [P, B, M].

        T(N) bends, and how far the batch will go along it is what is sought: prices run from less than the next token's to more
        than the dearest within reach (a second is worth more in a batch that speculates than in the plain one).
        """
        load, nodes_BM = self._load, self._estimates.nodes
        start, reach = float(load.base.num_tokens), _AHEAD * self._num_rows
        marginals = self._costs.marginals(start)
        ends = (marginals.token_s, *(self._costs.marginals(start + reach * part).token_s for part in (0.25, 0.5, 1.0)))
        least, growth = 0.6 * min(ends), (5.0 * max(ends) / min(ends)) ** (1.0 / (_NUM_PRICES - 1))
        prices_P = np.array([least * growth**step for step in range(_NUM_PRICES)], dtype=np.float32)
        else_B = marginals.drawn_s * self._draws_B + marginals.score_s * self._context_B
        else_BM = nodes_BM * else_B[:, None] + self._fed_BM * marginals.draft_token_s
        else_BM = np.where(self._is_allowed_BM, else_BM, np.inf).astype(np.float32)
        return (prices_P[:, None, None] * nodes_BM.astype(np.float32) + else_BM).astype(np.float32, copy=False)

    def _switched(self, from_B: Places, to_B: Places) -> Places:
        """Return the choices on the way from one to another, [C, B]: sequence by sequence, best gain for a node first."""
        moved = np.flatnonzero(from_B != to_B)
        estimates = self._estimates
        gain = estimates.tokens[moved, to_B[moved]] - estimates.tokens[moved, from_B[moved]]
        spent = estimates.nodes[moved, to_B[moved]] - estimates.nodes[moved, from_B[moved]]
        order = moved[np.argsort(-gain / np.where(np.abs(spent) < 1e-9, 1e-9, spent), kind="stable")]
        is_switched_CB = np.zeros((len(order) + 1, len(from_B)), dtype=np.bool_)
        is_switched_CB[:, order] = np.tri(len(order) + 1, len(order), -1, dtype=np.bool_)
        return np.where(is_switched_CB, to_B, from_B)

    def _best_of(self, places_CB: Places) -> Allocation:
        tokens_C, seconds_C = self._priced(places_CB)
        return _of_candidate(places_CB, tokens_C, seconds_C, int((tokens_C / seconds_C).argmax()))

    def _priced(self, places_CB: Places) -> tuple[Array, Array]:
        """Return the tokens and the seconds of each candidate."""
        load = self._load
        index_CB = places_CB + self._rows * len(self._menu)
        nodes_CB = self._estimates.nodes.take(index_CB)
        rounds_C = self._rounds(places_CB, self._estimates.passes.take(index_CB))
        fed_C = self._fed_BM.take(index_CB).sum(1)
        works = self._works(nodes_CB.sum(1), nodes_CB @ self._draws_B, nodes_CB @ self._context_B, fed_C, rounds_C)
        tokens_C = load.base_tokens + self._estimates.tokens.take(index_CB).sum(1)
        return tokens_C, self._costs.step_s(works)

    def _works(self, nodes_C: Array, drawn_C: Array, scores_C: Array, fed_C: Array, rounds_C: Array) -> Works:
        """Return the work of steps with so much beside what the batch runs anyway."""
        base = self._load.base
        num_rounds_C = np.maximum(base.num_rounds, rounds_C)
        return Works(
            num_rows=base.num_rows,
            num_tokens=base.num_tokens + nodes_C,
            num_drawn=base.num_drawn + drawn_C,
            num_keys=base.num_keys,
            num_scores=base.num_scores + scores_C,
            num_passes=self._load.model_share * num_rounds_C,
            num_draft_tokens=base.num_draft_tokens + fed_C,
            num_rounds=num_rounds_C,
        )

    def _rounds(self, places_CB: Places, passes_CB: Array) -> Array:
        """Return the rounds that all trees of each candidate take together: the step ends with the tree that goes on longest.

        A tree goes on to its end or ends at once, for want of anything to propose, as often as its own expected passes say; one
        that ends by its nodes' chances goes on from level to level, each time as likely.
        """
        if self._menu.is_by_chance:
            return self._rounds_by_chance(passes_CB)
        more_C = np.maximum(self._menu.depths[places_CB].max(1) - 1.0, 0.0)
        goes_on_CB = np.minimum(np.maximum((passes_CB - 1.0) / np.maximum(more_C, 1.0)[:, None], 0.0), 1.0)
        return np.asarray(np.minimum(passes_CB.max(1), 1.0) + more_C * (1.0 - (1.0 - goes_on_CB).prod(1)))

    def _rounds_by_chance(self, passes_CB: Array) -> Array:
        """Return the rounds of trees that end by their nodes' chances; one tree's are those expected of it."""
        if passes_CB.shape[1] == 1:
            return passes_CB[:, 0]
        num_more = self._menu.deepest - 1
        odds_CB = np.interp(passes_CB - 1.0, mean_levels(num_more), ODDS)
        reaches_DCB = odds_CB ** np.arange(1, num_more + 1)[:, None, None]
        rounds_C: Array = np.minimum(passes_CB.max(1), 1.0) + (1.0 - (1.0 - reaches_DCB).prod(2)).sum(0)
        return rounds_C


def _of_candidate(places_CB: Places, tokens_C: Array, seconds_C: Array, candidate: int) -> Allocation:
    return Allocation((*places_CB[candidate].tolist(),), float(tokens_C[candidate]), float(seconds_C[candidate]))


@lru_cache
def _everything(num_rows: int, num_entries: int) -> NDArray[np.bool_]:
    """Return what is allowed where everything is, [B, M]."""
    everything_BM = np.ones((num_rows, num_entries), dtype=np.bool_)
    everything_BM.flags.writeable = False
    return everything_BM


@cache
def mean_levels(num_more: int) -> Array:
    """Return the levels behind the first that a tree has on the mean, of so many, if it goes on with each of `ODDS`."""
    return np.asarray((ODDS[:, None] ** np.arange(1, num_more + 1)).sum(1))


def _never_less(prices: Array) -> list[float]:
    """Return prices of one thing after another of which none is below the one before: the nearest by least squares.

    What costs less than what has to be bought first is bought with it, at their mean price.
    """
    blocks: list[tuple[float, int]] = []
    for price in prices.tolist():
        mean, count = price, 1
        while blocks and blocks[-1][0] >= mean:
            before, more = blocks.pop()
            mean, count = (before * more + mean * count) / (more + count), more + count
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]
