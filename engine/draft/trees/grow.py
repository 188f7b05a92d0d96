"""Grows the trees of a step, round by round, all requests and nodes of a round in one draft pass.

Knows rounds, not which node gets children (strategies, best_first) nor how they are drawn (children). Shape key: V vocabulary,
R kept laws.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.core.step_plan import Row
from engine.core.tree import TokenTree, TreeKind
from engine.draft.drafter import Drafter, FrontierNode, GrowingTree, ModelPasses, Proposal
from engine.draft.trees.best_first import BestFirst
from engine.draft.trees.by_value import CalibratedHeap, GreedySample, Heap, Threshold, conditional_odds
from engine.draft.trees.calibration import Calibration, Calibrations
from engine.draft.trees.grown import Growth, Worth, no_distributions, origins_of, plain_growth, told_by_path
from engine.draft.trees.ranked_growth import GrowsRanked, can_rank, grow_ranked
from engine.draft.trees.sampling import Offer, offers_of
from engine.draft.trees.strategies import Delayed, Static, Strategy
from engine.draft.trees.topology import best_topology
from engine.sampling.distributions import ranking_temperature
from engine.sampling.logits_processors import edited_logits
from engine.structured_output.masks import GrammarMasks
from engine.utils.host_transfer import integers
from engine.verify.forest import Forest
from engine.verify.verdict import Verdict, VerificationFailure


def grow(
    drafter: Drafter,
    rows: Sequence[Row],
    vocab_size: int,
    device: torch.device,
    calibrations: Calibrations | None = None,
    grammars: GrammarMasks | None = None,
) -> Growth:
    """Feed the drafter what it lacks and grow every decoding row's tree to its expansion; rows with a grammar need `grammars`."""
    if all(row.expansion.is_plain for row in rows if row.is_decoding):
        return _nothing_grown(drafter, rows, vocab_size, device)
    calibrations = calibrations or Calibrations()
    grower = drafter.ranked_grower() if isinstance(drafter, GrowsRanked) and can_rank(rows) else None
    if grower is not None:
        return grow_ranked(grower, rows, calibrations, vocab_size, device)
    strategies = [strategy_of(row, calibrations.of(row)) for row in rows if row.is_decoding]
    return grow_by(strategies, drafter, rows, vocab_size, device, grammars)


def grow_by(
    strategies: Sequence[Strategy],
    drafter: Drafter,
    rows: Sequence[Row],
    vocab_size: int,
    device: torch.device,
    grammars: GrammarMasks | None = None,
) -> Growth:
    """Feed the drafter what it lacks and grow the decoding rows' trees by given strategies, one for each."""
    by_tree = {id(strategy.tree): strategy for strategy in strategies}
    frontier = [ask for strategy in strategies for ask in strategy.asks()]
    feeding = [row for row in rows if row.draft_ids]
    probs: list[Tensor] = []
    rounds, num_rounds, passes = Counter[int](), 0, ModelPasses()
    if feeding or frontier:
        proposal = drafter.feed(feeding, frontier)
        passes = proposal.passes
        while frontier:
            num_rounds += 1
            rounds.update({id(ask.tree) for ask in frontier})
            for asked, offer in _answers(frontier, proposal, probs, grammars):
                by_tree[id(asked.tree)].take(asked.node, offer)
                if asked.tree.row.is_traced:
                    asked.tree.odds[asked.sampling_context.path_ids] = dict(zip(offer.token_ids, offer.odds, strict=True))
            frontier = [ask for strategy in strategies for ask in strategy.asks()]
            if frontier:
                proposal = drafter.extend(frontier)
                passes += proposal.passes
    of_trees = tuple(rounds[id(strategy.tree)] for strategy in strategies)
    return replace(_growth(strategies, probs, vocab_size, device, of_trees), num_rounds=num_rounds, passes=passes)


def _nothing_grown(drafter: Drafter, rows: Sequence[Row], vocab_size: int, device: torch.device) -> Growth:
    """Feed the drafter what it lacks and return roots alone."""
    grown, feeding = plain_growth(rows, vocab_size, device), [row for row in rows if row.draft_ids]
    return replace(grown, passes=drafter.feed(feeding, []).passes) if feeding else grown


def strategy_of(row: Row, calibration: Calibration) -> Strategy:
    """Return what grows the row's tree. Rows that rank instead of drawing may take nodes back where the others sample."""
    tree, expansion = GrowingTree(row, calibration.agreement.sharpness), row.expansion
    is_ranked = row.draw_kind in (TreeKind.DETERMINISTIC, TreeKind.SHARED_NOISE)
    if expansion.is_delayed:
        return Delayed(tree)
    if expansion.tree == "static":
        chances = calibration.ranks.chances(expansion.branches)
        return Static(tree, best_topology(chances, expansion.max_nodes, expansion.depth))
    if expansion.tree == "heap":
        return Heap(tree)
    if expansion.tree == "calibrated":
        return CalibratedHeap(tree, calibration.odds)
    if expansion.tree == "threshold":
        return Threshold(tree)
    if expansion.tree == "greedy_sample" and not is_ranked:
        return GreedySample(tree)
    return BestFirst(tree, calibration if expansion.tree == "noise_aware" else None)


def learn(
    calibrations: Calibrations, rows: Sequence[Row], growth: Growth, verdicts: Sequence[Verdict | VerificationFailure]
) -> None:
    """Teach the calibrations what came out of each decoding row."""
    for index, (row, verdict) in enumerate(zip(rows, verdicts, strict=True)):
        if isinstance(verdict, VerificationFailure) or row.expansion.is_plain:
            continue
        tree, calibration = growth.forest.trees[index], calibrations.of(row)
        if row.expansion.tree == "static":
            calibration.ranks.observe(tree, verdict.path)
        if row.expansion.tree == "calibrated":
            _learn_odds(calibration, tree, growth.offers[index], verdict)
        if row.expansion.tree == "noise_aware":
            _learn_agreement(calibration, row, tree, growth.offers[index], verdict)
            _learn_reliability(calibration, tree, growth.worth[index], verdict)


def _learn_odds(calibration: Calibration, tree: TokenTree, offers: Mapping[int, Offer], verdict: Verdict) -> None:
    for node, following in zip(verdict.path, [*verdict.path[1:], None], strict=True):
        for rank, child in enumerate(tree.children[node]):
            calibration.odds.observe(rank, conditional_odds(offers[node])[rank], child == following)
            if child == following:
                break


def _learn_agreement(calibration: Calibration, row: Row, tree: TokenTree, offers: Mapping[int, Offer], verdict: Verdict) -> None:
    following = [*(tree.token_ids[node] for node in verdict.path[1:]), verdict.extra_id]
    temperature = ranking_temperature(row.sampling)
    for node, token_id in zip(verdict.path, following, strict=True):
        if (offer := offers.get(node)) is not None:
            place = offer.token_ids.index(token_id) if token_id in offer.token_ids else None
            calibration.agreement.observe(offer.odds, offer.noise, temperature, place)


def _learn_reliability(calibration: Calibration, tree: TokenTree, worth: Worth | None, verdict: Verdict) -> None:
    """Learn what became of the nodes whose parents were accepted."""
    if worth is None:
        return
    for parent, following in zip(verdict.path, [*verdict.path[1:], None], strict=True):
        for node in tree.children[parent]:
            calibration.reliability.observe(worth.given_parent[node - 1], worth.is_cached[node - 1], node == following)


def _answers(
    frontier: Sequence[FrontierNode], proposal: Proposal, probs: list[Tensor], grammars: GrammarMasks | None
) -> list[tuple[FrontierNode, Offer]]:
    """Return what each answered node is offered.

    Where the draft logits are broken (NaN, infinity), or the drafter knows no token that the request allows, the tree ends: any
    tree is lossless, and the target says what is an error.
    """
    if not proposal.indices:
        return []
    answered = [frontier[index] for index in proposal.indices]
    logits_PM, vocab = proposal.logits_PM, proposal.vocab
    if any(asked.tree.row.sampling.edits_logits for asked in answered):
        contexts = [asked.sampling_context for asked in answered]
        logits_PM, vocab = edited_logits(proposal.logits_PV, contexts, grammars), None
    answers = []
    for index, asked, offer in zip(proposal.indices, answered, offers_of(answered, logits_PM, probs, vocab), strict=True):
        if offer is not None:
            _note(asked, proposal, index)
            answers.append((asked, offer))
    return answers


def _note(asked: FrontierNode, proposal: Proposal, index: int) -> None:
    """Note in the tree whether an answered node was fed, and what proposed its tokens."""
    if index not in proposal.unfed:
        asked.tree.fed.add(asked.node)
    if index in proposal.origins:
        asked.tree.origins[asked.sampling_context.path_ids] = proposal.origins[index]


def _growth(
    strategies: Sequence[Strategy], probs: Sequence[Tensor], vocab_size: int, device: torch.device, rounds: tuple[int, ...]
) -> Growth:
    """Return the step's trees; laws of nodes that got no child are dropped."""
    grown = [strategy.grown() for strategy in strategies]
    origins = (origins_of(one.tree, strategy.tree.origins) for one, strategy in zip(grown, strategies, strict=True))
    sources = tuple(tuple(origin.source for origin in of_tree) for of_tree in origins)
    draft_probs = tuple(_draft_probs(one.tree, strategy.tree) for one, strategy in zip(grown, strategies, strict=True))
    used = sorted({row for one in grown for row in one.probs_rows if row is not None})
    probs_RV = _gathered(probs, used, vocab_size, device)
    new_row = {row: index for index, row in enumerate(used)}
    probs_rows = tuple(tuple(None if row is None else new_row[row] for row in one.probs_rows) for one in grown)
    forest = Forest(tuple(one.tree for one in grown), probs_RV, probs_rows)
    fed, offers = tuple(one.fed for one in grown), tuple(one.offers for one in grown)
    return Growth(forest, fed, offers, sources, draft_probs, rounds, tuple(one.worth for one in grown))


def _draft_probs(tree: TokenTree, growing: GrowingTree) -> tuple[float, ...]:
    """Return each node's draft probability where the row is traced; of other rows nothing was kept."""
    return told_by_path(tree, growing.odds, math.nan) if growing.row.is_traced else ()


def _gathered(probs: Sequence[Tensor], used: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """Return the used rows of all laws, each copied once."""
    parts, first = [], 0
    for probs_PV in probs:
        rows = [row - first for row in used if first <= row < first + len(probs_PV)]
        is_whole = len(rows) == len(probs_PV)
        parts.append(probs_PV if is_whole else probs_PV[integers(rows, device)])
        first += len(probs_PV)
    return torch.cat(parts) if parts else no_distributions(vocab_size, device)
