"""Grows a step's trees in one call of the native library: the trees of engine.draft.trees.best_first.

Supports noise-aware trees and chains of greedy and coupled rows without logit edits and typical-p, for a draft head that the
library runs. All other trees grow in engine.draft.trees.grow.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple, Protocol, runtime_checkable

from engine.core.enums import DraftSource
from engine.core.step_plan import Row
from engine.core.tree import FREE_GROWTH, TokenTree, TreeKind
from engine.draft.drafter import ModelPasses, TrimmedVocabulary
from engine.draft.text.text_cache import TextCache
from engine.draft.trees.best_first import PRIOR_CONTINUED, PRIOR_EXPANDED
from engine.draft.trees.calibration import Calibrations, RuleCalibration
from engine.draft.trees.grower import NO_CANDIDATES, Growth, NodeValues, no_distributions
from engine.draft.trees.sampling import RANKED_KINDS, ChildCandidates
from engine.native.growth import IS_PREDICTED, IS_RATHER_CACHED, GrownTree, GrownTrees, Offered, Offers, RankedRow
from engine.native.texts import TextsHandle
from engine.sampling.distributions import is_typical, ranking_params, ranking_temperature, truncation
from engine.structured_output.masks import GrammarMasks
from engine.verify.forest import Forest

# By the library's number of a token's origin.
_SOURCES = {
    0: DraftSource.MODEL,
    IS_RATHER_CACHED: DraftSource.CACHE,
    IS_PREDICTED: DraftSource.PREDICTION,
    IS_PREDICTED + IS_RATHER_CACHED: DraftSource.PREDICTION,
}
_ARE_CACHED = (False, True, False, True)


@dataclass(frozen=True)
class NativeTreeGrower:
    """Grows a drafter's trees in the native library: a model with vocabulary `vocab`, and optionally cached text.

    `grow_trees` takes the rows to be fed, the native rows of the trees to be grown, and the request ids of these.
    """

    grow_trees: Callable[[Sequence[Row], Sequence[RankedRow], Sequence[str]], GrownTrees]
    vocab: TrimmedVocabulary
    fed_only_share: float
    texts: TextCache | None = None

    def can_grow(self, rows: Sequence[Row]) -> bool:
        """Return whether the native library supports all trees of a step."""
        return all(_is_supported(row) for row in rows if row.is_drafting)

    def grow(self, rows: Sequence[Row], calibrations: Calibrations, grammars: GrammarMasks | None = None) -> Growth:
        """Feed the drafter the missing tokens and grow every decoding row's tree."""
        del grammars  # a row with a grammar edits its logits
        drafting = [row for row in rows if row.is_drafting]
        native_rows, passes = [], ModelPasses()
        for row in drafting:
            texts = None if self.texts is None else self.texts.native_texts(row)
            native_rows.append(_native_row(row, calibrations.of(row), texts))
        grown = self.grow_trees(rows, native_rows, [row.request_id for row in drafting])
        for one in grown.fed:
            if one.num_tokens:
                passes += ModelPasses.one(one.num_tokens, one.num_queried, self.fed_only_share)
        trees = iter(grown.trees)
        of_rows = [
            _row_growth(row, next(trees), grown.offers) if row.is_drafting else _RowGrowth(TokenTree.single(row.certain_ids[-1]))
            for row in rows
            if row.is_decoding
        ]
        trees_of_rows, fed_nodes, candidates, sources, draft_probs, rounds, values = zip(*of_rows, strict=True)
        no_probs = no_distributions(self.vocab.size, self.vocab.ids_M.device)
        forest = Forest(trees_of_rows, no_probs, tuple([(None,) * len(tree.parents) for tree in trees_of_rows]))
        return Growth(forest, fed_nodes, candidates, sources, draft_probs, rounds, values, len(grown.fed), passes)


@runtime_checkable
class HasNativeGrower(Protocol):
    """A drafter whose trees the native library may be able to grow."""

    def native_grower(self) -> NativeTreeGrower | None:
        """Return the grower, None if the library cannot run this drafter."""
        ...


def _is_supported(row: Row) -> bool:
    is_noise_aware = row.expansion.tree == "noise_aware"
    is_top_ranked = row.draw_kind in RANKED_KINDS and (is_noise_aware or row.expansion.kind is TreeKind.PATH)
    return is_top_ranked and not (row.sampling.edits_logits or is_typical(ranking_params(row.sampling)))


class _RowGrowth(NamedTuple):
    """The part of a Growth that belongs to one row, in the order of its fields."""

    tree: TokenTree
    fed: frozenset[int] = frozenset()
    candidates: Mapping[int, ChildCandidates | Offered] = NO_CANDIDATES
    sources: tuple[DraftSource, ...] = ()
    draft_probs: tuple[float, ...] = ()
    num_rounds: int = 0
    node_values: NodeValues | None = None


def _row_growth(row: Row, grown: GrownTree, proposals: Offers) -> _RowGrowth:
    draws: list[list[int]] = [[] for _ in grown.parents]
    for node in grown.by_age:
        draws[grown.parents[node]].append(node)
    tree = TokenTree(grown.parents, (row.certain_ids[-1], *grown.token_ids[1:]), tuple(map(tuple, draws)))
    fed = frozenset(compress(range(len(grown.parents)), grown.keeps_slot))
    sources = tuple(map(_SOURCES.__getitem__, grown.origins))
    candidates = _LazyCandidates(proposals, grown.offers)
    draft_probs = _draft_probs(tree, candidates) if row.is_traced else ()
    if row.expansion.is_delayed:  # the calibrations do not learn from chains
        return _RowGrowth(tree, fed, NO_CANDIDATES, sources, draft_probs, grown.num_rounds)
    are_cached = tuple(map(_ARE_CACHED.__getitem__, grown.origins))
    values = NodeValues(grown.chances[1:], grown.given_parent[1:], are_cached)
    return _RowGrowth(tree, fed, candidates, sources, draft_probs, grown.num_rounds, values)


def _draft_probs(tree: TokenTree, candidates: Mapping[int, Offered]) -> tuple[float, ...]:
    """Return each node's draft probability, without the root."""
    by_parent = {node: dict(zip(one.token_ids.tolist(), one.probs.tolist(), strict=True)) for node, one in candidates.items()}
    nodes = zip(tree.parents[1:], tree.token_ids[1:], strict=True)
    return tuple(by_parent.get(parent, {}).get(token_id, math.nan) for parent, token_id in nodes)


class _LazyCandidates(Mapping[int, Offered]):
    """The candidate children of a tree's nodes. They are read from the library's arrays on access: most are not."""

    def __init__(self, proposals: Offers, indices: Sequence[int]) -> None:
        self._proposals, self._indices = proposals, indices

    def __getitem__(self, node: int) -> Offered:
        """Return a node's candidates."""
        if self._indices[node] < 0:
            raise KeyError(node)
        return self._proposals.at(self._indices[node])

    def get(self, node: int, default: Any = None) -> Any:
        """Return a node's candidates, or `default` if it has none."""
        place = self._indices[node]
        return default if place < 0 else self._proposals.at(place)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the nodes that have candidates."""
        return (node for node, index in enumerate(self._indices) if index >= 0)

    def __len__(self) -> int:
        """Return how many nodes have candidates."""
        return sum(index >= 0 for index in self._indices)


def _native_row(row: Row, calibration: RuleCalibration, texts: TextsHandle | None = None) -> RankedRow:
    """Return a row's parameters for the library. A chain is a tree of one child a node, grown without costs."""
    expansion = row.expansion
    growth_costs = FREE_GROWTH if expansion.is_delayed else row.growth_costs
    temperature = ranking_temperature(row.sampling)
    return RankedRow(
        root_position=row.root_position,
        slots=row.slots,
        max_nodes=expansion.num_draft_tokens,
        depth=expansion.max_depth if expansion.is_delayed else expansion.depth,
        branches=expansion.branches,
        seed=row.seed,
        has_noise=row.draw_kind is TreeKind.SHARED_NOISE,
        least_chances=growth_costs.least_chances(expansion),
        level_cost=growth_costs.level,
        offered=PRIOR_EXPANDED,
        continued=PRIOR_CONTINUED,
        scale=calibration.agreement.score_scale(temperature),
        shares=calibration.reliability.shares,
        temperature=temperature,
        sharpness=calibration.agreement.sharpness,
        truncation=truncation(ranking_params(row.sampling)),
        texts=texts,
    )
