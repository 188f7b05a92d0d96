"""A batched solver of small transport problems: parcels that pairs of places share are moved from surplus to deficit.

Knows amounts only. It is push-relabel (Goldberg and Tarjan 1988) in lock step over the batch, with a fixed number of rounds so
that nothing waits for the host; the places still in surplus after the last round keep what they have.

Shape key: A problems, H places.
"""

import torch
from jaxtyping import Float
from torch import Tensor

_ROUNDS_PER_PLACE = 3  # 2 reached the optimum of every problem tried, up to 100 places
_DUST = 1e-15  # a surplus below this is rounding


def rebalanced(surplus_AH: Float[Tensor, "A H"], held_AHH: Float[Tensor, "A H H"]) -> Float[Tensor, "A H H"]:
    """Return `held` after moving as much as possible from places of positive surplus to places of negative surplus.

    `held_AHH[i, j]` is what place i holds of the parcel that it shares with j, [j, i] is j's part; i gives to j at most what
    it holds. The sum of both parts does not change. A place keeps the surplus that can reach no deficit.
    """
    surplus_AH, held_AHH = surplus_AH.clone(), held_AHH.clone()
    num_places = surplus_AH.shape[-1]
    height_AH = torch.zeros_like(surplus_AH)  # a lower bound of the number of moves to the nearest deficit
    for _ in range(_ROUNDS_PER_PLACE * num_places):
        is_active_AH = (surplus_AH > _DUST) & (height_AH < num_places)
        lowest_AH = _lowest(held_AHH, height_AH).values
        height_AH = torch.where(is_active_AH & (height_AH <= lowest_AH), (lowest_AH + 1.0).clamp(max=num_places), height_AH)

        lowest_AH, to_AH = _lowest(held_AHH, height_AH)
        is_giving_AH = is_active_AH & (height_AH > lowest_AH)
        _give_(surplus_AH, held_AHH, to_AH[..., None], is_giving_AH)
    return held_AHH


def _lowest(held_AHH: Tensor, height_AH: Tensor) -> "torch.return_types.min":
    """Return for each place the lowest place that it can give to, and its height: infinite if there is none."""
    return torch.where(held_AHH > 0.0, height_AH[:, None, :], torch.inf).min(-1)


def _give_(surplus_AH: Tensor, held_AHH: Tensor, to_AH1: Tensor, is_giving_AH: Tensor) -> None:
    """Move what each giving place has in surplus, and holds of the parcel, to its chosen place; in place."""
    amount_AH1 = torch.minimum(surplus_AH[..., None], held_AHH.gather(-1, to_AH1)).where(is_giving_AH[..., None], 0.0)
    moved_AHH = torch.zeros_like(held_AHH).scatter_(-1, to_AH1, amount_AH1)
    held_AHH.add_(moved_AHH.mT - moved_AHH)
    surplus_AH.add_(moved_AHH.sum(-2) - amount_AH1[..., 0])
