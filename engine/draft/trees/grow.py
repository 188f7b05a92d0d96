"""Grows the trees of a step by the first grower that can: roots alone, the native library, or rounds of draft passes.

In rounds, the strategies choose the nodes, and engine.draft.trees.sampling chooses their candidate children. Shape key:
V vocabulary, R recorded distributions.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor

from engine.core.step_plan import Row
from engine.core.tree import ROOT, TokenTree
from engine.draft.drafter import Drafter, FrontierNode, GrowingTree, LevelDrafter, ModelPasses, Proposal, RecordedDrafter
from engine.draft.text.text_cache import TextCache
from engine.draft.trees.best_first import BestFirst, ChosenBestFirst, ChosenNodes
from engine.draft.trees.by_value import CalibratedHeap, GreedySample, Heap, Threshold, conditional_probs
from engine.draft.trees.calibration import Calibrations, RuleCalibration
from engine.draft.trees.device_growth import MOST_RANKED, DeviceGrowth, DeviceOffers, LevelGrowth, StartedRounds
from engine.draft.trees.device_plan import PlannedTree
from engine.draft.trees.grower import (
    Growth,
    NodeValues,
    TreeGrower,
    UnreadGrowth,
    lookup_by_path,
    no_distributions,
    origins_of,
    plain_growth,
    start_of,
)
from engine.draft.trees.native_growth import HasNativeGrower
from engine.draft.trees.sampling import RANKED_KINDS, ChildCandidates, candidates_of
from engine.draft.trees.strategies import Delayed, Static, Strategy
from engine.draft.trees.topology import best_topology
from engine.native.growth import Offered
from engine.native.library import NUM_SCORES
from engine.sampling.distributions import ranking_temperature
from engine.sampling.logits_processors import edited_logits
from engine.structured_output.masks import GrammarMasks
from engine.utils.device_clock import DeviceClock
from engine.utils.host_transfer import arrays_of, integers
from engine.verify.forest import Forest
from engine.verify.verdict import Verdict, VerificationFailure


def growers_of(drafter: Drafter | None, vocab_size: int, device: torch.device) -> tuple[TreeGrower, ...]:
    """Return the ways to grow trees, the fastest first. Without a drafter, all trees are roots."""
    feeder = _RootGrower(drafter, vocab_size, device)
    if drafter is None:
        return (feeder,)
    native = drafter.native_grower() if isinstance(drafter, HasNativeGrower) else None
    own: TreeGrower | None = drafter if isinstance(drafter, TreeGrower) else native
    has_waits = device.type != "cpu"  # which cost more than the ranking of levels that a tree does not reach
    if own is None and has_waits:
        own = _grower_without_waits(drafter, vocab_size, device)
    return (feeder, *([own] if own else ()), RoundGrower(drafter, vocab_size, device))


def _grower_without_waits(drafter: Drafter, vocab_size: int, device: torch.device) -> TreeGrower | None:
    """Return the grower that waits once for a step's trees, None if there is none for the drafter."""
    if isinstance(drafter, HasModel):
        of_model = _grower_without_waits(drafter.model, vocab_size, device)
        return None if of_model is None else ModelAloneGrower(of_model, drafter.texts)
    if isinstance(drafter, LevelDrafter):
        return LevelGrower(drafter, vocab_size, device, LevelGrowth(drafter))
    return DeviceGrower.of(drafter, vocab_size, device) if isinstance(drafter, RecordedDrafter) else None


def grow(
    growers: Sequence[TreeGrower],
    rows: Sequence[Row],
    calibrations: Calibrations | None = None,
    grammars: GrammarMasks | None = None,
) -> Growth:
    """Grow every decoding row's tree with the first grower that can. Rows with a grammar need `grammars`."""
    grower = next(one for one in growers if one.can_grow(rows))
    return grower.grow(rows, calibrations or Calibrations(), grammars)


def start_growth(
    growers: Sequence[TreeGrower], rows: Sequence[Row], calibrations: Calibrations, grammars: GrammarMasks
) -> Growth | UnreadGrowth:
    """Grow every decoding row's tree as `grow` does, without a wait if the grower can do without."""
    for grower in growers:
        if grower.can_grow(rows):
            return start_of(grower)(rows, calibrations, grammars)
    raise AssertionError("the last grower grows any tree")


@dataclass(frozen=True)
class _RootGrower:
    """Feeds the drafter, if there is one, and grows roots alone."""

    drafter: Drafter | None
    vocab_size: int
    device: torch.device

    def can_grow(self, rows: Sequence[Row]) -> bool:
        """Return whether nothing is drafted."""
        return self.drafter is None or not any(row.is_drafting for row in rows)

    def grow(self, rows: Sequence[Row], calibrations: Calibrations, grammars: GrammarMasks | None) -> Growth:
        """Feed the drafter the missing tokens and return a root for each row."""
        del calibrations, grammars
        grown, feeding = plain_growth(rows, self.vocab_size, self.device), [row for row in rows if row.draft_ids]
        return structs.replace(grown, passes=self.drafter.feed(feeding, []).passes) if feeding and self.drafter else grown


@dataclass(frozen=True)
class RoundGrower:
    """Grows trees of every kind with any drafter, in rounds: one draft pass for all frontier nodes of all requests."""

    drafter: Drafter
    vocab_size: int
    device: torch.device

    def can_grow(self, rows: Sequence[Row]) -> bool:
        """Return True."""
        del rows
        return True

    def grow(self, rows: Sequence[Row], calibrations: Calibrations, grammars: GrammarMasks | None) -> Growth:
        """Feed the drafter the missing tokens and grow every decoding row's tree by its strategy."""
        strategies = [strategy_of(row, calibrations.of(row)) for row in rows if row.is_decoding]
        return grow_by(strategies, self.drafter, rows, self.vocab_size, self.device, grammars)


@dataclass(frozen=True)
class LevelGrower:
    """Grows ranked trees with a drafter that predicts all levels from the root: the trees of rounds, with one wait for numbers.

    A level's ranking depends on no drafted token, also where the position's noise is added. Edits of logits do depend on them.
    """

    drafter: LevelDrafter
    vocab_size: int
    device: torch.device
    growth: LevelGrowth | None = None

    def can_grow(self, rows: Sequence[Row]) -> bool:
        """Return whether no tree samples or edits, and the ranked distributions are few."""
        drafting = [row for row in rows if row.is_drafting]
        most_levels = max((row.expansion.max_depth for row in drafting), default=0)
        is_ranked = all(row.draw_kind in RANKED_KINDS and not row.sampling.edits_logits for row in drafting)
        return is_ranked and len(drafting) * most_levels <= MOST_RANKED

    def grow(self, rows: Sequence[Row], calibrations: Calibrations, grammars: GrammarMasks | None) -> Growth:
        """Feed the drafter the missing tokens and grow every decoding row's tree by its strategy."""
        del grammars  # a row with a grammar edits its logits
        strategies = [strategy_of(row, calibrations.of(row)) for row in rows if row.is_decoding]
        offers = _OffersByLevel(self.drafter, [row for row in rows if row.draft_ids])
        return _grown(strategies, offers, self.vocab_size, self.device)

    def start(self, rows: Sequence[Row], calibrations: Calibrations, grammars: GrammarMasks | None) -> Growth | UnreadGrowth:
        """Start to grow the trees on the device if it can."""
        if self.growth is None or not self.growth.can_grow(rows):
            return self.grow(rows, calibrations, grammars)
        started = _started(self.growth.start, rows, calibrations, self.vocab_size, self.device)
        assert started is not None
        return started


@runtime_checkable
class HasModel(Protocol):
    """A drafter that combines cached text with a model."""

    texts: TextCache
    model: Drafter


@dataclass(frozen=True)
class ModelAloneGrower:
    """Grows trees by the model of a combined drafter where cached text predicts nothing after any root.

    A drafted path may end on cached text nevertheless, which the model's tree does not use.
    """

    of_model: TreeGrower
    texts: TextCache

    def can_grow(self, rows: Sequence[Row]) -> bool:
        """Return whether the model can grow all trees of a step, and nothing is cached for their roots."""
        if not self.of_model.can_grow(rows):
            return False
        drafting = (row for row in rows if row.is_drafting)
        return all(self.texts.distribution_after(row, ()) is None for row in drafting)

    def grow(self, rows: Sequence[Row], calibrations: Calibrations, grammars: GrammarMasks | None) -> Growth:
        """Feed the model the missing tokens and grow every decoding row's tree by its strategy."""
        return self.of_model.grow(rows, calibrations, grammars)

    def start(self, rows: Sequence[Row], calibrations: Calibrations, grammars: GrammarMasks | None) -> Growth | UnreadGrowth:
        """Start to grow the trees if the model's grower can."""
        return start_of(self.of_model)(rows, calibrations, grammars)


@dataclass(frozen=True)
class DeviceGrower:
    """Grows ranked trees with a drafter's recorded passes, whose nodes are chosen on the device: one wait for numbers."""

    drafter: RecordedDrafter
    vocab_size: int
    device: torch.device
    growth: DeviceGrowth

    @classmethod
    def of(cls, drafter: RecordedDrafter, vocab_size: int, device: torch.device) -> "DeviceGrower":
        """Return the grower."""
        return cls(drafter, vocab_size, device, DeviceGrowth(drafter))

    def can_grow(self, rows: Sequence[Row]) -> bool:
        """Return whether passes are recorded for all trees of a step."""
        return self.growth.can_grow(rows)

    def grow(self, rows: Sequence[Row], calibrations: Calibrations, grammars: GrammarMasks | None) -> Growth:
        """Feed the drafter the missing tokens and grow every decoding row's tree by its strategy."""
        grown = self.start(rows, calibrations, grammars)
        return grown if isinstance(grown, Growth) else grown.read(arrays_of(grown.results))

    def start(self, rows: Sequence[Row], calibrations: Calibrations, grammars: GrammarMasks | None) -> Growth | UnreadGrowth:
        """Start to grow the trees. If a recorded pass is too small for them, they grow in rounds."""
        del grammars  # a row with a grammar edits its logits
        started = _started(self.growth.start, rows, calibrations, self.vocab_size, self.device)
        if started is not None:
            return started
        strategies = [strategy_of(row, calibrations.of(row)) for row in rows if row.is_decoding]
        offers = _OffersByPass(self.drafter, [row for row in rows if row.draft_ids], None)
        return _grown(strategies, offers, self.vocab_size, self.device)


def _started(
    start: Callable[[Sequence[Row], Sequence[PlannedTree]], StartedRounds | None],
    rows: Sequence[Row],
    calibrations: Calibrations,
    vocab_size: int,
    device: torch.device,
) -> UnreadGrowth | None:
    """Start to grow the trees of a step; None if that is not possible, and nothing ran."""
    decoding, clock = [row for row in rows if row.is_decoding], DeviceClock(device)
    planned = [PlannedTree(row, calibrations.of(row)) for row in decoding if row.is_drafting]
    rounds = start([row for row in rows if row.draft_ids], planned)
    if rounds is None:
        return None

    def read(results: Sequence[NDArray[np.float64]]) -> Growth:
        trees, passes = rounds.read(results)
        by_id = {one.row.request_id: tree for one, tree in zip(planned, trees, strict=True)}
        chosen = {request_id: tree.chosen for request_id, tree in by_id.items()}
        strategies = [strategy_of(row, calibrations.of(row), chosen.get(row.request_id)) for row in decoding]
        return _grown(strategies, DeviceOffers(by_id, passes), vocab_size, device)

    clock.stop()
    return UnreadGrowth(tuple(map(_with_room, decoding)), rounds.nodes, rounds.results, read, clock)


def _with_room(row: Row) -> TokenTree:
    return TokenTree.star(row.certain_ids[-1], row.expansion.num_draft_tokens if row.is_drafting else 0)


def grow_by(
    strategies: Sequence[Strategy],
    drafter: Drafter,
    rows: Sequence[Row],
    vocab_size: int,
    device: torch.device,
    grammars: GrammarMasks | None = None,
) -> Growth:
    """Feed the drafter the missing tokens and grow the decoding rows' trees by given strategies, one for each row."""
    offers = _OffersByPass(drafter, [row for row in rows if row.draft_ids], grammars)
    return _grown(strategies, offers, vocab_size, device)


class _Offers(Protocol):
    """The candidate children of nodes, round by round."""

    probs: list[Tensor]  # distributions from which children were sampled
    passes: ModelPasses  # so far

    def after(self, frontier: Sequence[FrontierNode]) -> list[tuple[FrontierNode, ChildCandidates]]:
        """Return the candidates of the frontier's nodes that have any. The first frontier, which may be empty, is the roots."""
        ...


class _OffersByPass:
    """Candidates by a proposal of the drafter for each frontier."""

    def __init__(self, drafter: Drafter, feeding: Sequence[Row], grammars: GrammarMasks | None) -> None:
        self._drafter, self._feeding, self._grammars = drafter, feeding, grammars
        self.probs: list[Tensor] = []
        self.passes = ModelPasses()
        self._is_first = True

    def after(self, frontier: Sequence[FrontierNode]) -> list[tuple[FrontierNode, ChildCandidates]]:
        """Return the candidates of nodes with a proposal."""
        if self._is_first and not (frontier or self._feeding):
            return []
        proposal = self._drafter.feed(self._feeding, frontier) if self._is_first else self._drafter.extend(frontier)
        self._is_first = False
        self.passes += proposal.passes
        return _node_candidates(frontier, proposal, self.probs, self._grammars) if frontier else []


class _OffersByLevel:
    """Candidates of all levels, ranked together and read at once: those of a node are its level's. Nothing is sampled."""

    def __init__(self, drafter: LevelDrafter, feeding: Sequence[Row]) -> None:
        self._drafter, self._feeding = drafter, feeding
        self.probs: list[Tensor] = []
        self.passes = ModelPasses()
        self._by_level: dict[int, list[ChildCandidates | None]] | None = None

    def after(self, frontier: Sequence[FrontierNode]) -> list[tuple[FrontierNode, ChildCandidates]]:
        """Return the candidates of the nodes' levels, as many as the nodes need."""
        if self._by_level is None:
            self._by_level = self._ranked(frontier)
        found = []
        for node in frontier:
            levels, depth = self._by_level.get(id(node.tree), []), node.tree.depths[node.node]
            if depth < len(levels) and (candidates := levels[depth]) is not None:
                node.tree.fed.add(node.node)
                found.append((node, candidates.first(node.num_draws)))
        return found

    def _ranked(self, roots: Sequence[FrontierNode]) -> dict[int, list[ChildCandidates | None]]:
        """Feed the drafter, and rank the tokens of each level after each root."""
        if not (roots or self._feeding):
            return {}
        levels = self._drafter.feed_levels(self._feeding, roots)
        self.passes = levels.passes
        if not levels.indices:
            return {}
        num_levels, num_known = levels.logits_BLM.shape[1:]
        nodes = [node for index in levels.indices for node in _level_nodes(roots[index], num_levels)]
        ranked = candidates_of(nodes, levels.logits_BLM.reshape(-1, num_known), self.probs, levels.vocab)
        firsts = range(0, len(ranked), num_levels)
        pairs = zip(levels.indices, firsts, strict=True)
        return {id(roots[index].tree): ranked[first : first + num_levels] for index, first in pairs}


def _level_nodes(root: FrontierNode, num_levels: int) -> Iterator[FrontierNode]:
    """Yield a node for each level after a root, with the most draws that the level needs. A chain replaces all paths."""
    chain, expansion = GrowingTree(root.tree.row, root.tree.sharpness), root.tree.row.expansion
    num_draws = max(expansion.branches, NUM_SCORES if expansion.tree == "noise_aware" else 0)
    for depth in range(num_levels):
        yield FrontierNode(chain, depth, num_draws)
        chain.add(depth, root.tree.token_ids[ROOT])


def _grown(strategies: Sequence[Strategy], offers: _Offers, vocab_size: int, device: torch.device) -> Growth:
    """Grow trees until no strategy has a frontier."""
    by_tree = {id(strategy.tree): strategy for strategy in strategies}
    rounds, num_rounds = Counter[int](), 0
    frontier = [node for strategy in strategies for node in strategy.frontier()]
    found = offers.after(frontier)
    while frontier:
        num_rounds += 1
        rounds.update({id(node.tree) for node in frontier})
        for node, candidates in found:
            by_tree[id(node.tree)].expand(node.node, candidates)
            if node.tree.row.is_traced:
                of_tokens = dict(zip(candidates.token_ids, candidates.probs, strict=True))
                node.tree.draft_probs[node.sampling_context.path_ids] = of_tokens
        frontier = [node for strategy in strategies for node in strategy.frontier()]
        found = offers.after(frontier) if frontier else []
    of_trees = tuple(rounds[id(strategy.tree)] for strategy in strategies)
    grown = _growth(strategies, offers.probs, vocab_size, device, of_trees)
    return structs.replace(grown, num_rounds=num_rounds, passes=offers.passes)


def strategy_of(row: Row, calibration: RuleCalibration, chosen: ChosenNodes | None = None) -> Strategy:
    """Return the strategy of a row. Only deterministic and shared-noise rows may drop nodes, so only they use BestFirst.

    `chosen` are the nodes of a best-first tree if a device has grown it.
    """
    tree, expansion = GrowingTree(row, calibration.agreement.sharpness), row.expansion
    is_sampled = row.draw_kind not in RANKED_KINDS
    if expansion.is_delayed:
        return Delayed(tree)
    if expansion.tree == "static":
        chances = calibration.by_rank.chances(expansion.branches)
        return Static(tree, best_topology(chances, expansion.max_nodes, expansion.depth))
    if expansion.tree == "heap":
        return Heap(tree)
    if expansion.tree == "calibrated":
        return CalibratedHeap(tree, calibration.by_prob)
    if expansion.tree == "threshold":
        return Threshold(tree)
    if expansion.tree == "greedy_sample" and is_sampled:
        return GreedySample(tree)
    valued = calibration if expansion.tree == "noise_aware" else None
    return BestFirst(tree, valued) if chosen is None else ChosenBestFirst(tree, valued, chosen)


def learn(
    calibrations: Calibrations, rows: Sequence[Row], growth: Growth, verdicts: Sequence[Verdict | VerificationFailure]
) -> None:
    """Update the calibrations with the verdict of each decoding row."""
    for index, (row, verdict) in enumerate(zip(rows, verdicts, strict=True)):
        if not row.is_drafting or isinstance(verdict, VerificationFailure):
            continue
        tree, calibration = growth.forest.trees[index], calibrations.of(row)
        if row.expansion.tree == "static":
            calibration.by_rank.observe(tree, verdict.path)
        if row.expansion.tree == "calibrated":
            _learn_by_prob(calibration, tree, growth.candidates[index], verdict)
        if row.expansion.tree == "noise_aware":
            _learn_agreement(calibration, row, tree, growth.candidates[index], verdict)
            _learn_reliability(calibration, tree, growth.node_values[index], verdict)


def _learn_by_prob(
    calibration: RuleCalibration, tree: TokenTree, candidates: Mapping[int, ChildCandidates | Offered], verdict: Verdict
) -> None:
    for node, following in zip(verdict.path, [*verdict.path[1:], None], strict=True):
        for rank, child in enumerate(tree.children[node]):
            of_node = candidates[node]
            assert isinstance(of_node, ChildCandidates)  # the library grows no tree that is calibrated by probability
            calibration.by_prob.observe(rank, conditional_probs(of_node)[rank], child == following)
            if child == following:
                break


def _learn_agreement(
    calibration: RuleCalibration, row: Row, tree: TokenTree, candidates: Mapping[int, ChildCandidates | Offered], verdict: Verdict
) -> None:
    following = [*[tree.token_ids[node] for node in verdict.path[1:]], verdict.extra_id]
    temperature = ranking_temperature(row.sampling)
    for node, token_id in zip(verdict.path, following, strict=True):
        if (of_node := candidates.get(node)) is not None:
            calibration.agreement.observe(of_node.probs, of_node.noise, temperature, of_node.index_of(token_id))


def _learn_reliability(calibration: RuleCalibration, tree: TokenTree, values: NodeValues | None, verdict: Verdict) -> None:
    """Learn from the nodes whose parents were accepted."""
    if values is None:
        return
    for parent, following in zip(verdict.path, [*verdict.path[1:], None], strict=True):
        for node in tree.children[parent]:
            calibration.reliability.observe(values.given_parent[node - 1], values.is_cached[node - 1], node == following)


def _node_candidates(
    frontier: Sequence[FrontierNode], proposal: Proposal, probs: list[Tensor], grammars: GrammarMasks | None
) -> list[tuple[FrontierNode, ChildCandidates]]:
    """Return the candidate children of each node with a proposal.

    A node gets none if its draft logits are invalid (NaN, infinity) or if the request allows none of the drafter's tokens. Any
    tree is lossless, and errors are detected in the target's logits.
    """
    if not proposal.indices:
        return []
    nodes = [frontier[index] for index in proposal.indices]
    logits_PM, vocab = proposal.logits_PM, proposal.vocab
    if any(node.tree.row.sampling.edits_logits for node in nodes):
        contexts = [node.sampling_context for node in nodes]
        logits_PM, vocab = edited_logits(proposal.logits_PV, contexts, grammars), None
    found = []
    for index, node, candidates in zip(proposal.indices, nodes, candidates_of(nodes, logits_PM, probs, vocab), strict=True):
        if candidates is not None:
            _record(node, proposal, index)
            found.append((node, candidates))
    return found


def _record(node: FrontierNode, proposal: Proposal, index: int) -> None:
    """Record in the tree whether the node was fed, and the origins of its proposed tokens."""
    if index not in proposal.unfed:
        node.tree.fed.add(node.node)
    if index in proposal.origins:
        node.tree.origins[node.sampling_context.path_ids] = proposal.origins[index]


def _growth(
    strategies: Sequence[Strategy], probs: Sequence[Tensor], vocab_size: int, device: torch.device, rounds: tuple[int, ...]
) -> Growth:
    """Return the step's trees. Distributions of nodes without children are dropped."""
    finished = [strategy.finish() for strategy in strategies]
    origins = (origins_of(one.tree, strategy.tree.origins) for one, strategy in zip(finished, strategies, strict=True))
    sources = tuple(tuple(origin.source for origin in of_tree) for of_tree in origins)
    draft_probs = tuple(_draft_probs(one.tree, strategy.tree) for one, strategy in zip(finished, strategies, strict=True))
    used = sorted({row for one in finished for row in one.probs_rows if row is not None})
    probs_RV = _gathered(probs, used, vocab_size, device)
    new_row = {row: index for index, row in enumerate(used)}
    probs_rows = tuple(tuple(None if row is None else new_row[row] for row in one.probs_rows) for one in finished)
    forest = Forest(tuple(one.tree for one in finished), probs_RV, probs_rows)
    fed, candidates = tuple(one.fed for one in finished), tuple(one.candidates for one in finished)
    node_values = tuple(one.node_values for one in finished)
    return Growth(forest, fed, candidates, sources, draft_probs, rounds, node_values)


def _draft_probs(tree: TokenTree, growing: GrowingTree) -> tuple[float, ...]:
    """Return each node's draft probability if the row is traced; others record none."""
    return lookup_by_path(tree, growing.draft_probs, math.nan) if growing.row.is_traced else ()


def _gathered(probs: Sequence[Tensor], used: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """Return the used rows of all distributions, each copied once."""
    parts, first = [], 0
    for probs_PV in probs:
        rows = [row - first for row in used if first <= row < first + len(probs_PV)]
        is_all = len(rows) == len(probs_PV)
        parts.append(probs_PV if is_all else probs_PV[integers(rows, device)])
        first += len(probs_PV)
    return torch.cat(parts) if parts else no_distributions(vocab_size, device)
