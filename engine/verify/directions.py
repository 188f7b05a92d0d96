"""Directions: what a child inherits of its parent's mass, and with what probability a verdict ends at each node.

Knows one tree's masses, not laws. Holding the mass at 1 verifies top-down, passing it on verifies bottom-up
(docs/verification.md).
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from engine.core.tree import ROOT, TokenTree


class Odds(NamedTuple):
    """What phase 1 found of one tree, by node: none of it depends on a uniform.

    `tries[v]`: the children tried after node v, in order; `tried[v]`: the chance that each try is taken, those before it refused;
    `final[v]`: the chance that v is accepted, all its children refused.
    """

    tries: Sequence[Sequence[int]]
    tried: Sequence[Sequence[float]]
    final: Sequence[float]


class Direction(Protocol):
    """The order in which a tree is judged."""

    def inherited(self, tried: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Return the prefix mass that each try hands to its child."""
        ...

    def stop_distribution(self, tree: TokenTree, odds: Odds) -> list[float]:
        """Return the probability that the accepted path ends at each node; they sum to 1."""
        ...


class BottomUp:
    """Deepest first: the first node in post-order that accepts with its own mass ends the path.

    Needs a plan that gives each child its mass at one try, if it is tried more than once: a child has one mass.
    """

    def inherited(self, tried: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Pass the mass on."""
        return tried

    def stop_distribution(self, tree: TokenTree, odds: Odds) -> list[float]:
        """Return final[v] times the product of 1 - final[w] over the w before v in post-order."""
        stops, refused = [0.0] * tree.num_nodes, 1.0
        for node in tree.post_order:
            stops[node] = refused * odds.final[node]
            refused *= 1.0 - odds.final[node]
        return stops


class TopDown:
    """Root first: descend into the try that is taken, stop where none is. A node once reached is never given up."""

    def inherited(self, tried: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Start every child anew with all the mass."""
        return torch.ones_like(tried)

    def stop_distribution(self, tree: TokenTree, odds: Odds) -> list[float]:
        """Return the product of branching probabilities along the path times the chance that no child is taken."""
        left = [0.0] * tree.num_nodes  # of the chance to reach a node: what its tries so far have not taken
        left[ROOT] = 1.0
        for node, (children, tried) in enumerate(zip(odds.tries, odds.tried, strict=True)):  # parents before children
            for child, chance in zip(children, tried, strict=True):
                left[child] += left[node] * chance
                left[node] *= 1.0 - chance
        return left


def in_turn(odds: Float[Tensor, "*batch C"]) -> Float[Tensor, "*batch C"]:
    """Return the chance that each is the first to be taken, where odds[j] holds if those before j were refused."""
    refused = (1.0 - odds).cumprod(-1)
    return odds * torch.cat([torch.ones_like(odds[..., :1]), refused[..., :-1]], -1)
