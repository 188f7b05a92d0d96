"""Directions: the mass that a child inherits from its parent, and the probability that the accepted path ends at each node.

A direction uses one tree's masses only. A mass fixed at 1 verifies top-down; an inherited mass verifies bottom-up
(docs/verification.md).
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from engine.core.tree import ROOT, TokenTree


class AcceptanceProbs(NamedTuple):
    """The results of phase 1 for one tree, by node. They do not depend on random numbers.

    `tries[v]`: the children tried after node v, in order. `tried[v]`: the probability that each try is accepted if the earlier
    tries were refused. `final[v]`: the probability that v is accepted if all its children were refused.
    """

    tries: Sequence[Sequence[int]]
    tried: Sequence[Sequence[float]]
    final: Sequence[float]


class Direction(Protocol):
    """The order in which the nodes of a tree are verified."""

    def inherited(self, tried: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Return the prefix mass that each try gives to its child."""
        ...

    def stop_distribution(self, tree: TokenTree, probs: AcceptanceProbs) -> list[float]:
        """Return the probability that the accepted path ends at each node; they sum to 1."""
        ...


class BottomUp:
    """Deepest first: the first node in post-order that is accepted with its own mass ends the path.

    A child has one mass. If it is tried more than once, the plan must give it its mass at one of the tries.
    """

    def inherited(self, tried: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Pass the mass on."""
        return tried

    def stop_distribution(self, tree: TokenTree, probs: AcceptanceProbs) -> list[float]:
        """Return final[v] times the product of 1 - final[w] over all w before v in post-order."""
        stops, refused = [0.0] * tree.num_nodes, 1.0
        for node in tree.post_order:
            stops[node] = refused * probs.final[node]
            refused *= 1.0 - probs.final[node]
        return stops


class TopDown:
    """Root first: descend into the accepted try, stop if none is accepted. A node once reached is never refused."""

    def inherited(self, tried: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Return mass 1 for every child."""
        return torch.ones_like(tried)

    def stop_distribution(self, tree: TokenTree, probs: AcceptanceProbs) -> list[float]:
        """Return the product of branching probabilities along the path times the probability that no child is accepted."""
        left = [0.0] * tree.num_nodes  # probability to reach a node and refuse its tries so far
        left[ROOT] = 1.0
        for node, (children, tried) in enumerate(zip(probs.tries, probs.tried, strict=True)):  # parents before children
            for child, chance in zip(children, tried, strict=True):
                left[child] += left[node] * chance
                left[node] *= 1.0 - chance
        return left


def first_accept_probs(probs: Float[Tensor, "*batch C"]) -> Float[Tensor, "*batch C"]:
    """Return the probability that each try is the first to be accepted; probs[j] holds if the tries before j were refused."""
    refused = (1.0 - probs).cumprod(-1)
    return probs * torch.cat([torch.ones_like(probs[..., :1]), refused[..., :-1]], -1)
