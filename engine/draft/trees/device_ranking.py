"""The candidates of nodes on a device, for many trees together and without a wait: engine.draft.trees.sampling's ranking rules.

What differs between trees is a column of numbers there, and never a shape, so that a graph of these operations stays valid.
Shape key: B trees, W lanes of a tree, P = B W lanes, N drafted nodes of a tree, E scored children of a node, K kept tokens of a
node, M the drafter's tokens, F fields.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from engine.draft.trees.calibration import MIN_PROB, Reliability
from engine.sampling.distributions import Truncations, truncated_among
from engine.sampling.noise import gumbels_of

_CANDIDATES = 1024  # likeliest tokens among which a nucleus ends


class RoundShape(NamedTuple):
    """The sizes and operations of rounds: B, W, N, the number of rounds, E, K, and whether any row needs the operations."""

    num_trees: int
    width: int
    num_nodes: int
    num_rounds: int
    num_scored: int
    num_kept: int
    has_noise: bool
    truncates: bool


class TreeNumbers(NamedTuple):
    """Columns of each tree's numbers: integers, then floats.

    The first five are flags: ranked with noise, valued by agreement, of a fixed shape, truncated, with logits at the root. A tree
    has at most `rounds` rounds with `lanes` nodes each, `max_nodes` fed nodes, `branches` children of a node, and its nodes above
    `depth` have children. A place of a fixed shape has a number of children, and their places. `keys` are those of
    the noise after each depth. `slots` are the nodes', `tails` the places of their keys in the table, `position` is the root's.
    """

    is_noisy: Tensor
    is_valued: Tensor
    is_fixed: Tensor
    is_truncated: Tensor
    has_root: Tensor
    rounds: Tensor
    lanes: Tensor
    max_nodes: Tensor
    branches: Tensor
    depth: Tensor
    position: Tensor
    top_k: Tensor
    tails: Tensor
    keys: Tensor
    slots: Tensor
    num_children: Tensor
    places: Tensor

    temperature: Tensor
    sharpness: Tensor
    log_prob_weight: Tensor
    noise_weight: Tensor
    level_cost: Tensor
    top_p: Tensor
    min_p: Tensor
    shares: Tensor
    thresholds: Tensor


FIRST_FLOAT = TreeNumbers._fields.index("temperature")


def field_widths(shape: RoundShape) -> dict[str, int]:
    """Return the number of columns of each field."""
    end = shape.num_nodes + 1
    wide = {
        "tails": 3,
        "keys": shape.num_rounds + 1,
        "slots": end,
        "num_children": end,
        "places": end * shape.num_scored,
        "shares": len(Reliability.EDGES) + 1,
        "thresholds": shape.num_nodes,
    }
    return {name: wide.get(name, 1) for name in TreeNumbers._fields}


def split_numbers(shape: RoundShape, device: torch.device) -> tuple[Int[Tensor, "B F"], TreeNumbers]:
    """Return a table of 64-bit numbers, and the fields that are views of its columns."""
    sizes = [*field_widths(shape).values()]
    table_BF = torch.zeros(shape.num_trees, sum(sizes), dtype=torch.int64, device=device)
    parts = table_BF.split_with_sizes(sizes, dim=1)
    return table_BF, TreeNumbers(*parts[:FIRST_FLOAT], *(part.view(torch.float64) for part in parts[FIRST_FLOAT:]))


class Ranked(NamedTuple):
    """The best tokens of each lane's node, and the sum of squares of its distribution, which is not finite if that is invalid."""

    ids_PK: Int[Tensor, "P K"]
    probs_PK: Float[Tensor, "P K"]
    noise_PK: Float[Tensor, "P K"]
    squares_P1: Float[Tensor, "P 1"]


def lanes_of(numbers_BF: Tensor, width: int) -> Tensor:
    """Return the numbers of each lane's tree, [P, F]."""
    return numbers_BF[:, None].expand(-1, width, -1).flatten(0, 1)


def ranked(
    shape: RoundShape,
    given: TreeNumbers,
    logits_PM: Float[Tensor, "P M"],
    depths_BW: Int[Tensor, "B W"],
    ids_M: Int[Tensor, " M"],
) -> Ranked:
    """Return the best tokens by probability, or by log q plus the noise of the position after the node."""
    width = shape.width
    probs_PM = torch.softmax(logits_PM / lanes_of(given.temperature, width).to(logits_PM.dtype), dim=-1)
    if shape.truncates:
        top_k = lanes_of(given.top_k, width).clamp(1, logits_PM.shape[1])
        top_p, min_p = (lanes_of(one, width).to(probs_PM.dtype) for one in (given.top_p, given.min_p))
        kept_PM = truncated_among(probs_PM, Truncations(top_k, top_p, min_p), _CANDIDATES)
        probs_PM = torch.where(lanes_of(given.is_truncated, width) > 0, kept_PM, probs_PM)
    scores_PM, noise_PM = probs_PM, None
    if shape.has_noise:
        keys_P = given.keys.gather(1, depths_BW.clamp(max=shape.num_rounds)).flatten()
        noise_PM = gumbels_of(keys_P, ids_M)
        noisy_PM = lanes_of(given.sharpness, width) * probs_PM.double().log() + noise_PM
        scores_PM = torch.where(lanes_of(given.is_noisy, width) > 0, noisy_PM, probs_PM.double())
    best_PK = scores_PM.topk(shape.num_kept, dim=-1).indices
    probs_PK = probs_PM.gather(-1, best_PK).double()
    noise_PK = torch.zeros_like(probs_PK) if noise_PM is None else noise_PM.gather(-1, best_PK)
    noise_PK = torch.where(lanes_of(given.is_noisy, width) > 0, noise_PK, 0.0)
    return Ranked(ids_M[best_PK], probs_PK, noise_PK, probs_PM.square().sum(-1, keepdim=True).double())


def agreements(given: TreeNumbers, found: Ranked, is_offered_PK: Bool[Tensor, "P K"], width: int) -> Float[Tensor, "P K"]:
    """Return the probabilities that the target selects the offered tokens, as calibration.AgreementWeights.chances does."""
    log_probs_PK = lanes_of(given.temperature, width) * found.probs_PK.clamp(min=MIN_PROB).log()
    noise_PK = lanes_of(given.temperature, width) * found.noise_PK
    scores_PK = log_probs_PK * lanes_of(given.log_prob_weight, width) + noise_PK * lanes_of(given.noise_weight, width)
    scores_PK = torch.where(is_offered_PK, scores_PK, -torch.inf)
    best_P1 = scores_PK.amax(-1, keepdim=True)
    weights_PK = (scores_PK - torch.where(best_P1.isfinite(), best_P1, 0.0)).exp()
    total_P1 = weights_PK.sum(-1, keepdim=True)
    return weights_PK / torch.where(total_P1 > 0.0, total_P1, 1.0)
