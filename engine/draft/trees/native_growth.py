"""Grows a step's trees in one call of the native library: the trees of engine.draft.trees.best_first. Runs steps in a row.

Supports noise-aware trees and chains of greedy and coupled rows without logit edits and typical-p, for a draft head that the
library runs. All other trees grow in engine.draft.trees.grow.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count
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
from engine.native.draft_steps import DraftedRow, DraftSteps
from engine.native.growth import IS_PREDICTED, IS_RATHER_CACHED, GrownTree, GrownTrees, NativeGrowth, Offered, Offers, RankedRow
from engine.native.texts import TextsHandle
from engine.native.walks import WalkedPath
from engine.sampling.distributions import is_typical, ranking_params, ranking_temperature, truncation, walk_temperature
from engine.structured_output.masks import GrammarMasks
from engine.utils.host_transfer import as_longs
from engine.verify.forest import Forest

# By the library's number of a token's origin.
_SOURCES = {
    0: DraftSource.MODEL,
    IS_RATHER_CACHED: DraftSource.CACHE,
    IS_PREDICTED: DraftSource.PREDICTION,
    IS_PREDICTED + IS_RATHER_CACHED: DraftSource.PREDICTION,
}
_ARE_CACHED = (False, True, False, True)


class DraftedStep(NamedTuple):
    """A step of several in a row: its trees, the path of each, and the seconds of growing them and of the target's pass."""

    growth: Growth
    paths: list[WalkedPath]
    draft_s: float
    target_s: float


@dataclass(frozen=True)
class NativeTreeGrower:
    """Grows a drafter's trees in the native library: a model with vocabulary `vocab`, and optionally cached text.

    `new_growth` takes the rows to be fed, the native rows of the trees to be grown, and the number of steps.
    """

    new_growth: Callable[[Sequence[Row], Sequence[RankedRow], int], NativeGrowth]
    vocab: TrimmedVocabulary
    fed_only_share: float
    texts: TextCache | None = None

    def can_grow(self, rows: Sequence[Row]) -> bool:
        """Return whether the native library supports all trees of a step."""
        return all(_is_supported(row) for row in rows if row.is_drafting)

    def grow(self, rows: Sequence[Row], calibrations: Calibrations, grammars: GrammarMasks | None = None) -> Growth:
        """Feed the drafter the missing tokens and grow every decoding row's tree."""
        del grammars  # a row with a grammar edits its logits
        growth = self._new_growth(rows, calibrations, 1)
        growth.run()
        return self._read([row for row in rows if row.is_decoding], growth.trees())

    def start_steps(self, rows: Sequence[Row], calibrations: Calibrations, num_steps: int) -> DraftSteps:
        """Return steps in a row, which have not run. All rows decode, their slots suffice, and the library reorders these."""
        places = count()
        drafted = [
            DraftedRow(
                tree=next(places) if row.is_drafting else None,
                root_id=row.certain_ids[-1],
                root_position=row.root_position,
                slots=as_longs(row.slots),
                num_remaining=row.num_remaining,
                seed=row.seed,
                temperature=walk_temperature(row.sampling),
                truncation=truncation(row.sampling),
                stop_ids=row.sampling.stop_token_ids,
            )
            for row in rows
        ]
        return DraftSteps(num_steps, drafted, self._new_growth(rows, calibrations, num_steps))

    def finish_steps(self, rows: Sequence[Row], steps: DraftSteps) -> list[DraftedStep]:
        """Return the steps that ran, with each row's tree and path. Cached text has learned the tokens of some."""
        for tree, row in enumerate(row for row in rows if row.is_drafting):
            if self.texts is not None:
                self.texts.note_learned(row.request_id, *steps.learned(tree))
        drafted, root_ids = [], [row.certain_ids[-1] for row in rows]
        for step in range(steps.num_complete):
            growth = self._read(rows, steps.growth.trees(step), root_ids)
            paths = steps.paths(step, [tree.num_nodes for tree in growth.forest.trees])
            drafted.append(DraftedStep(growth, paths, *steps.seconds(step)))
            root_ids = [path.extra_id for path in paths]
        return drafted

    def _new_growth(self, rows: Sequence[Row], calibrations: Calibrations, num_steps: int) -> NativeGrowth:
        drafting = [row for row in rows if row.is_drafting]
        texts = [None if self.texts is None else self.texts.native_texts(row) for row in drafting]
        native_rows = [_native_row(row, calibrations.of(row), own) for row, own in zip(drafting, texts, strict=True)]
        return self.new_growth(rows, native_rows, num_steps)

    def _read(self, rows: Sequence[Row], grown: GrownTrees, root_ids: Sequence[int] | None = None) -> Growth:
        """Return the trees of a step with these decoding rows. `root_ids` are those of a later step."""
        passes = [ModelPasses.one(one.num_tokens, one.num_queried, self.fed_only_share) for one in grown.fed if one.num_tokens]
        trees = iter(grown.trees)
        of_rows = [
            _row_growth(row, root_id, next(trees), grown.offers) if row.is_drafting else _RowGrowth(TokenTree.single(root_id))
            for row, root_id in zip(rows, root_ids or [row.certain_ids[-1] for row in rows], strict=True)
        ]
        trees_of_rows, fed_nodes, candidates, sources, draft_probs, rounds, values = zip(*of_rows, strict=True)
        no_probs = no_distributions(self.vocab.size, self.vocab.ids_M.device)
        forest = Forest(trees_of_rows, no_probs, tuple([(None,) * tree.num_nodes for tree in trees_of_rows]))
        all_passes = sum(passes, start=ModelPasses())
        return Growth(forest, fed_nodes, candidates, sources, draft_probs, rounds, values, len(grown.fed), all_passes)


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


def _row_growth(row: Row, root_id: int, grown: GrownTree, proposals: Offers) -> _RowGrowth:
    draws: list[list[int]] = [[] for _ in grown.parents]
    for node in grown.by_age:
        draws[grown.parents[node]].append(node)
    tree = TokenTree(grown.parents, (root_id, *grown.token_ids[1:]), tuple(map(tuple, draws)))
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
