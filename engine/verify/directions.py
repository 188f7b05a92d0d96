"""Directions: what a child inherits of its parent's mass, and with what probability a verdict ends at each node.

Knows masses and tables, not laws. Holding the mass at 1 verifies top-down, passing it on verifies bottom-up
(docs/verification.md).

Shape key: P packed nodes and the dummy, M nodes of one level, C tries.
"""

from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from engine.verify.layout import Layout


class Masses(NamedTuple):
    """Phase 1, float64. None of them depends on a uniform.

    `prefix_P`: mass a node had when its children were tried; `tried_PC`: chance that a try is taken, those before it
    refused; `final_P`: chance that a node is accepted, all its children refused. The dummy has 0 everywhere.
    """

    prefix_P: Float[Tensor, " P"]
    tried_PC: Float[Tensor, "P C"]
    final_P: Float[Tensor, " P"]


class Direction(Protocol):
    """The order in which a tree is judged."""

    def inherited(self, tried_MC: Float[Tensor, "M C"]) -> Float[Tensor, "M C"]:
        """Return the prefix mass that each try hands to its child."""
        ...

    def stop_law(self, layout: Layout, masses: Masses) -> Float[Tensor, " P"]:
        """Return the probability that the accepted path of its tree ends at each node; 1 over each tree."""
        ...


class BottomUp:
    """Deepest first: the first node in post-order that accepts with its own mass ends the path.

    Needs a plan that gives each child its mass at one try, if it is tried more than once: a child has one mass.
    """

    def inherited(self, tried_MC: Float[Tensor, "M C"]) -> Float[Tensor, "M C"]:
        """Pass the mass on."""
        return tried_MC

    def stop_law(self, layout: Layout, masses: Masses) -> Float[Tensor, " P"]:
        """Return final[v] times the product of 1 - final[w] over the w before v in post-order."""
        order_BW = layout.post_order_BW
        return torch.zeros_like(masses.final_P).scatter_(0, order_BW.flatten(), in_turn(masses.final_P[order_BW]).flatten())


class TopDown:
    """Root first: descend into the try that is taken, stop where none is. A node once reached is never given up."""

    def inherited(self, tried_MC: Float[Tensor, "M C"]) -> Float[Tensor, "M C"]:
        """Start every child anew with all the mass."""
        return torch.ones_like(tried_MC)

    def stop_law(self, layout: Layout, masses: Masses) -> Float[Tensor, " P"]:
        """Return the product of branching probabilities along the path times the chance that no child is taken."""
        shares_PC = in_turn(masses.tried_PC)
        reached_P = torch.zeros_like(masses.final_P)
        reached_P[layout.nodes_BW[:, 0]] = 1.0
        for level in layout.levels:
            entered_MC = reached_P[level.nodes_M, None] * shares_PC[level.nodes_M]
            reached_P.index_add_(0, layout.children_PC[level.nodes_M].flatten(), entered_MC.flatten())
        return reached_P * (1.0 - masses.tried_PC).prod(-1)


def in_turn(odds: Float[Tensor, "*batch C"]) -> Float[Tensor, "*batch C"]:
    """Return the chance that each is the first to be taken, where odds[j] holds if those before j were refused."""
    refused = (1.0 - odds).cumprod(-1)
    return odds * torch.cat([torch.ones_like(odds[..., :1]), refused[..., :-1]], -1)
