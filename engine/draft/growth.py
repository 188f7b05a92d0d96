"""Grows the delayed trees of a step, level by level, all requests and branches of a level in one draft pass.

A decision where and how much to sample is made before the token it concerns is drawn, and a drawn token is never dropped or
re-ranked: so every verifier of i.i.d. draws is exact on these trees (docs/verification.md). Greedy and coupled rows draw
nothing: they take the best of a ranking, and any tree is exact for them. Shape key: P proposals, V vocabulary, R kept laws.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from engine.draft.drafter import Drafter, FrontierNode, GrowingTree, Proposal
from engine.forest import Forest
from engine.keys import Stream, stream_key, uniform
from engine.noise import gumbels
from engine.plan import Row
from engine.sampling import processed_laws
from engine.tree import ROOT, Expansion, TokenTree


@dataclass(frozen=True)
class Growth:
    """The step's trees, one for each decoding row, and the nodes of each whose keys the drafter has cached."""

    forest: Forest
    fed: tuple[frozenset[int], ...]


def num_draws(expansion: Expansion, depth: int, num_paths: int) -> int:
    """Return how many children are drawn for a node at `depth` through which `num_paths` sampled paths pass."""
    if depth >= expansion.max_depth:
        return 0
    return num_paths * expansion.branches if depth == expansion.trunk else num_paths


def grow(drafter: Drafter, rows: Sequence[Row], vocab_size: int, device: torch.device) -> Growth:
    """Feed the drafter what it lacks and grow every decoding row's tree to its expansion."""
    trees = [GrowingTree(row) for row in rows if row.is_decoding]
    frontier = _wanting([FrontierNode(tree, ROOT, 1) for tree in trees])
    feeding = [row for row in rows if row.draft_ids]
    laws: list[Tensor] = []
    if feeding or frontier:
        proposal = drafter.feed(feeding, frontier)
        while frontier:
            frontier = _wanting(_drawn(frontier, proposal, laws))
            if frontier:
                proposal = drafter.extend(frontier)
    frozen = tuple(tree.frozen() for tree in trees)
    laws_RV = torch.cat(laws) if laws else torch.empty((0, vocab_size), device=device)
    forest = Forest(frozen, laws_RV, tuple(tuple(tree.law_rows) for tree in trees))
    return Growth(forest, tuple(frozenset(tree.fed) for tree in trees))


def plain_growth(rows: Sequence[Row], vocab_size: int, device: torch.device) -> Growth:
    """Return roots alone: the step of an engine without a drafter."""
    trees = tuple(TokenTree.single(row.certain_ids[-1]) for row in rows if row.is_decoding)
    forest = Forest(trees, torch.empty((0, vocab_size), device=device), tuple((None,) for _ in trees))
    return Growth(forest, tuple(frozenset() for _ in trees))


def _wanting(nodes: Sequence[FrontierNode]) -> list[FrontierNode]:
    """Turn (node, paths through it) into (node, draws for it), leaving out nodes that get no children."""
    counted = [FrontierNode(n.tree, n.node, num_draws(n.tree.row.expansion, n.tree.depths[n.node], n.num_draws)) for n in nodes]
    return [node for node in counted if node.num_draws]


def _drawn(frontier: Sequence[FrontierNode], proposal: Proposal, laws: list[Tensor]) -> list[FrontierNode]:
    """Give the answered nodes their children; return the children with the number of paths through each.

    Where the draft logits are broken (NaN, infinity) the tree ends: any tree is lossless, and the target says what is an error.
    """
    answered = [frontier[index] for index in proposal.indices]
    for asked in answered:
        asked.tree.fed.add(asked.node)
    sound = torch.isfinite(proposal.logits_PV.amax(-1)).nonzero()[:, 0].tolist()
    ranked = [i for i in sound if answered[i].tree.row.is_ranked]
    sampled = [i for i in sound if not answered[i].tree.row.is_ranked]
    tokens: dict[int, list[int]] = {}
    if ranked:
        chosen = _ranked([answered[i] for i in ranked], _rows(proposal.logits_PV, ranked))
        tokens.update(zip(ranked, chosen, strict=True))
    if sampled:
        drawn = _sampled([answered[i] for i in sampled], _rows(proposal.logits_PV, sampled), laws)
        tokens.update(zip(sampled, drawn, strict=True))
    return [child for i in sound for child in _children(answered[i], tokens[i])]


def _rows(logits_PV: Tensor, indices: list[int]) -> Tensor:
    return logits_PV if len(indices) == len(logits_PV) else logits_PV[torch.tensor(indices, device=logits_PV.device)]


def _children(asked: FrontierNode, token_ids: Sequence[int]) -> list[FrontierNode]:
    paths: dict[int, int] = {}
    for token_id in token_ids:
        child = asked.tree.add(asked.node, token_id)
        paths[child] = paths.get(child, 0) + 1
    return [FrontierNode(asked.tree, child, count) for child, count in paths.items()]


def _ranked(asked: Sequence[FrontierNode], logits_PV: Float[Tensor, "P V"]) -> list[list[int]]:
    """Return the best tokens by draft logits, or by log q plus the position's own Gumbel noise for a coupled row."""
    scores_PV = logits_PV.double()
    coupled = [i for i, node in enumerate(asked) if not node.tree.row.sampling.is_greedy]
    if coupled:
        index = torch.tensor(coupled, device=logits_PV.device)
        laws_PV = processed_laws(logits_PV[index], [asked[i].law_context for i in coupled])
        keys = [_token_key(asked[i]) for i in coupled]
        scores_PV[index] = laws_PV.double().log() + gumbels(keys, logits_PV.shape[-1], logits_PV.device)
    top = scores_PV.topk(min(max(node.num_draws for node in asked), logits_PV.shape[-1]), dim=-1)
    best = zip(top.values.tolist(), top.indices.tolist(), asked, strict=True)
    return [
        [token_id for score, token_id in zip(scores, ids, strict=True) if score > float("-inf")][: node.num_draws]
        for scores, ids, node in best
    ]


def _token_key(asked: FrontierNode) -> int:
    row = asked.tree.row
    return stream_key(row.seed, row.root_position + asked.tree.depths[asked.node] + 1, Stream.TOKEN)


def _sampled(asked: Sequence[FrontierNode], logits_PV: Float[Tensor, "P V"], laws: list[Tensor]) -> list[list[int]]:
    """Draw i.i.d. from each node's processed law by inverse distribution functions in float64; keep the laws."""
    first_row = sum(len(kept) for kept in laws)
    laws_PV = processed_laws(logits_PV, [node.law_context for node in asked])
    laws.append(laws_PV)
    for offset, node in enumerate(asked):
        node.tree.law_rows[node.node] = first_row + offset
    width = max(node.num_draws for node in asked)
    draws_PD = torch.tensor([_uniforms(node, width) for node in asked], dtype=torch.float64, device=laws_PV.device)
    cumulative_PV = laws_PV.cumsum(-1, dtype=torch.float64)
    total_P1 = cumulative_PV[:, -1:]
    # A product that rounds up to the total would fall past the last token.
    points_PD = torch.minimum(draws_PD * total_P1, torch.nextafter(total_P1, torch.zeros_like(total_P1)))
    drawn = torch.searchsorted(cumulative_PV, points_PD, right=True).tolist()
    return [ids[: node.num_draws] for ids, node in zip(drawn, asked, strict=True)]


def _uniforms(asked: FrontierNode, count: int) -> list[float]:
    """Return the draws of a node: its own part of the tree's stream, whatever else grows beside it."""
    row = asked.tree.row
    key = stream_key(row.seed, row.root_position, Stream.DRAFT)
    first = asked.node * row.expansion.branches
    return [uniform(key, first + draw) for draw in range(count)]
