"""Trees of rows that rank, all rounds of them grown by the library: what engine.draft.trees.best_first grows, in a call a round.

Between two rounds nothing is asked but what cached text foretells. Serves noise-aware trees and chains of rows whose laws are a
temperature's alone, for a head that the library runs; all else grows round by round in engine.draft.trees.grow.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from engine.core.enums import DraftSource, Origin
from engine.core.step_plan import Row
from engine.core.tree import FREE_GROWTH, ROOT, TokenTree, TreeKind
from engine.draft.drafter import ModelPasses, TrimmedVocabulary
from engine.draft.text.mixture import UNTOLD, predicted, unknown_of
from engine.draft.text.text_cache import CachedLaw, TextCache
from engine.draft.trees.best_first import START_CONTINUED, START_OFFERED
from engine.draft.trees.calibration import Calibration, Calibrations
from engine.draft.trees.grown import Growth, Worth, no_distributions, origins_of
from engine.draft.trees.sampling import Offer
from engine.native.growth import Growing, GrownTree, Offers, RankedRow
from engine.native.library import Fed
from engine.sampling.distributions import ranking_params, ranking_temperature, truncates
from engine.verify.forest import Forest


@dataclass(frozen=True)
class RankedGrower:
    """What grows ranked trees for a drafter: a model that knows `vocab`, and the texts that are drafted from beside it.

    `begin` takes the rows to be fed and, of those whose trees are to grow, what the library must know and their request ids.
    """

    begin: Callable[[Sequence[Row], Sequence[RankedRow], Sequence[str]], Growing]
    vocab: TrimmedVocabulary
    unqueried_share: float
    texts: TextCache | None = None


@runtime_checkable
class GrowsRanked(Protocol):
    """A drafter whose library may grow ranked trees."""

    def ranked_grower(self) -> RankedGrower | None:
        """Return what does so; None where nothing does."""
        ...


def can_rank(rows: Sequence[Row]) -> bool:
    """Return whether all trees of a step are such ones."""
    return all(_can_rank(row) for row in rows if row.is_decoding and not row.expansion.is_plain)


def _can_rank(row: Row) -> bool:
    is_noise_aware = row.expansion.tree == "noise_aware"
    is_ranked = row.draw_kind in _RANKED and (is_noise_aware or row.expansion.kind is TreeKind.PATH)
    return is_ranked and not (row.is_traced or row.sampling.edits_logits or truncates(ranking_params(row.sampling)))


_RANKED = (TreeKind.DETERMINISTIC, TreeKind.SHARED_NOISE)


class _Texts:
    """What cached text says of one step's nodes. Keeps the path to each node, and where tokens foretold there come from."""

    def __init__(self, texts: TextCache | None, vocab: TrimmedVocabulary, rows: Sequence[Row]) -> None:
        self._texts, self._vocab, self._rows = texts, vocab, rows
        self._paths: list[dict[int, tuple[int, ...]]] = [{ROOT: ()} for _ in rows]
        self.origins: list[dict[tuple[int, ...], Mapping[int, Origin]]] = [{} for _ in rows]

    def answer(self, growing: Growing) -> Fed:
        """Answer a round's nodes; return what was fed."""
        asks = growing.frontier
        if self._texts is None:
            return growing.round([UNTOLD] * len(asks), [False] * len(asks), ())[1]
        paths = [self._path(*ask) for ask in asks]
        probs = [self._texts.probs_after(self._rows[ask.tree], path) for ask, path in zip(asks, paths, strict=True)]
        unknown = unknown_of([distribution for distribution in probs if distribution is not None], self._vocab)
        column_of = {token_id: column for column, token_id in enumerate(unknown, len(self._vocab.ids_M))}
        told = [
            UNTOLD if distribution is None else predicted(distribution, self._columns(distribution, column_of))
            for distribution in probs
        ]
        flags, fed = growing.round(told, [distribution is not None and distribution.is_sure for distribution in probs], unknown)
        for ask, path, distribution, of_probs in zip(asks, paths, probs, flags, strict=True):
            if distribution is not None:
                self.origins[ask.tree][path] = distribution.origins_beside(of_probs)
        return fed

    def _path(self, tree: int, node: int, parent: int, token_id: int) -> tuple[int, ...]:
        paths = self._paths[tree]
        if node != ROOT:
            paths[node] = (*paths[parent], token_id)
        return paths[node]

    def _columns(self, distribution: CachedLaw, column_of_unknown: Mapping[int, int]) -> list[int]:
        known = zip(distribution.odds, self._vocab.columns(distribution.odds), strict=True)
        return [column_of_unknown[token_id] if column < 0 else column for token_id, column in known]


def grow_ranked(
    grower: RankedGrower, rows: Sequence[Row], calibrations: Calibrations, vocab_size: int, device: torch.device
) -> Growth:
    """Feed the drafter what it lacks and grow every decoding row's tree to its expansion."""
    drafting = [row for row in rows if row.is_decoding and not row.expansion.is_plain]
    ranked = [_ranked(row, calibrations.of(row)) for row in drafting]
    texts = _Texts(grower.texts, grower.vocab, drafting)
    rounds, num_rounds, passes = [0] * len(drafting), 0, ModelPasses()
    with grower.begin(rows, ranked, [row.request_id for row in drafting]) as growing:
        while growing.frontier:
            num_rounds += 1
            for tree in dict.fromkeys(ask.tree for ask in growing.frontier):
                rounds[tree] += 1
            if (fed := texts.answer(growing)).num_tokens:
                passes += ModelPasses.one(fed.num_tokens, fed.num_queried, grower.unqueried_share)
        trees, offers = growing.finish()
    grown = iter(zip(drafting, trees, texts.origins, rounds, strict=True))
    of_rows = [_Grown.single(row) if row.expansion.is_plain else _grown(*next(grown), offers) for row in rows if row.is_decoding]
    return Growth(
        forest=Forest(
            tuple(one.tree for one in of_rows),
            no_distributions(vocab_size, device),
            tuple((None,) * one.tree.num_nodes for one in of_rows),
        ),
        fed=tuple(one.fed for one in of_rows),
        offers=tuple(one.offers for one in of_rows),
        sources=tuple(one.sources for one in of_rows),
        draft_probs=((),) * len(of_rows),
        rounds=tuple(one.num_rounds for one in of_rows),
        worth=tuple(one.worth for one in of_rows),
        num_rounds=num_rounds,
        passes=passes,
    )


@dataclass(frozen=True, slots=True)
class _Grown:
    tree: TokenTree
    fed: frozenset[int] = frozenset()
    offers: Mapping[int, Offer] = field(default_factory=dict)
    sources: tuple[DraftSource, ...] = ()
    num_rounds: int = 0
    worth: Worth | None = None

    @classmethod
    def single(cls, row: Row) -> "_Grown":
        return cls(TokenTree.single(row.certain_ids[-1]))


def _grown(
    row: Row, ranked: GrownTree, origins: Mapping[tuple[int, ...], Mapping[int, Origin]], num_rounds: int, offers: Offers
) -> _Grown:
    draws: list[list[int]] = [[] for _ in ranked.parents]
    for node in ranked.by_age:
        draws[ranked.parents[node]].append(node)
    tree = TokenTree(ranked.parents, (row.certain_ids[-1], *ranked.token_ids[1:]), tuple(map(tuple, draws)))
    fed = frozenset(node for node, keeps in enumerate(ranked.keeps_slot) if keeps)
    of_nodes = origins_of(tree, origins)
    sources = tuple(origin.source for origin in of_nodes)
    if row.expansion.is_delayed:  # chains teach nothing
        return _Grown(tree, fed, {}, sources, num_rounds)
    worth = Worth(ranked.chances[1:], ranked.given_parent[1:], tuple(origin.is_rather_cached for origin in of_nodes))
    return _Grown(tree, fed, _Offers(offers, ranked.offers), sources, num_rounds, worth)


class _Offers(Mapping[int, Offer]):
    """What the nodes of a tree were offered: most of it nobody reads."""

    def __init__(self, offers: Offers, places: Sequence[int]) -> None:
        self._offers, self._places = offers, places

    def __getitem__(self, node: int) -> Offer:
        """Return what a node was offered."""
        if self._places[node] < 0:
            raise KeyError(node)
        best = self._offers.at(self._places[node])
        return Offer(best.token_ids, best.odds, best.noise)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the nodes that were offered something."""
        return (node for node, place in enumerate(self._places) if place >= 0)

    def __len__(self) -> int:
        """Return how many they are."""
        return sum(place >= 0 for place in self._places)


def _ranked(row: Row, calibration: Calibration) -> RankedRow:
    """Return what the library must know of a row. A chain is a tree of one child a node, whatever that costs."""
    expansion = row.expansion
    prices = FREE_GROWTH if expansion.is_delayed else row.prices
    temperature = ranking_temperature(row.sampling)
    return RankedRow(
        root_position=row.root_position,
        slots=row.slots,
        max_nodes=expansion.num_draft_tokens,
        depth=expansion.max_depth if expansion.is_delayed else expansion.depth,
        branches=expansion.branches,
        seed=row.seed,
        has_noise=row.draw_kind is TreeKind.SHARED_NOISE,
        least_chances=prices.least_chances(expansion),
        level_cost=prices.level,
        offered=START_OFFERED,
        continued=START_CONTINUED,
        scale=calibration.agreement.score_scale(temperature),
        shares=calibration.reliability.shares,
        temperature=temperature,
        sharpness=calibration.agreement.sharpness,
    )
