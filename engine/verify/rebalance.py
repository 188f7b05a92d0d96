"""A batched solver of small transport problems: it moves amounts shared by pairs of nodes from surplus to deficit.

The algorithm is push-relabel (Goldberg and Tarjan 1988) in lock step over the batch. The number of rounds is fixed, so that the
device never waits for the host. A node still in surplus after the last round keeps its surplus.

Shape key: A problems, H nodes.
"""

import torch
from jaxtyping import Float
from torch import Tensor

_ROUNDS_PER_NODE = 3  # one more than any tried problem needed
_ROUNDING = 1e-15  # a surplus below this is rounding


def rebalanced(surplus_AH: Float[Tensor, "A H"], amount_AHH: Float[Tensor, "A H H"]) -> Float[Tensor, "A H H"]:
    """Return the amounts after moving as much as possible from nodes of positive surplus to nodes of negative surplus.

    Nodes i and j share one amount: `amount_AHH[i, j]` is i's part, [j, i] is j's. Node i moves at most its own part to j, and the
    sum of both parts does not change. A node keeps the surplus that can reach no deficit.
    """
    surplus_AH, amount_AHH = surplus_AH.clone(), amount_AHH.clone()
    num_nodes = surplus_AH.shape[-1]
    height_AH = torch.zeros_like(surplus_AH)  # a lower bound of the number of moves to the nearest deficit
    for _ in range(_ROUNDS_PER_NODE * num_nodes):
        is_active_AH = (surplus_AH > _ROUNDING) & (height_AH < num_nodes)
        lowest_AH = _lowest(amount_AHH, height_AH).values
        height_AH = torch.where(is_active_AH & (height_AH <= lowest_AH), (lowest_AH + 1.0).clamp(max=num_nodes), height_AH)

        lowest_AH, to_AH = _lowest(amount_AHH, height_AH)
        is_pushing_AH = is_active_AH & (height_AH > lowest_AH)
        _push_(surplus_AH, amount_AHH, to_AH[..., None], is_pushing_AH)
    return amount_AHH


def _lowest(amount_AHH: Tensor, height_AH: Tensor) -> "torch.return_types.min":
    """Return each node's lowest possible receiver and its height, infinite if there is none."""
    return torch.where(amount_AHH > 0.0, height_AH[:, None, :], torch.inf).min(-1)


def _push_(surplus_AH: Tensor, amount_AHH: Tensor, to_AH1: Tensor, is_pushing_AH: Tensor) -> None:
    """Move each pushing node's surplus, up to its part of the amount, to its receiver; in place."""
    pushed_AH1 = torch.minimum(surplus_AH[..., None], amount_AHH.gather(-1, to_AH1)).where(is_pushing_AH[..., None], 0.0)
    moved_AHH = torch.zeros_like(amount_AHH).scatter_(-1, to_AH1, pushed_AH1)
    amount_AHH.add_(moved_AHH.mT - moved_AHH)
    surplus_AH.add_(moved_AHH.sum(-2) - pushed_AH1[..., 0])
