"""Rules that select one of several i.i.d. draws, with the distribution of the selected token.

Shape key: A families, C tries, V vocabulary. Formulas write p for the target distribution, q for the draft distribution, k for
the number of draws.
"""

import torch
from torch import Tensor

from engine.verify.node_plans import NodeFamilies
from engine.verify.one_token import SelectedDraw, one_hot


class FirstDraw:
    """NaiveTree: the first draw, distributed as q. Its residual may select another draw."""

    def choose(self, trying: NodeFamilies) -> SelectedDraw:
        """Choose try 0."""
        return SelectedDraw(one_hot(torch.zeros_like(trying.probs_rows_M), trying), trying.draft_AV())


class BestRanked:
    """Tournament: rank tokens by p / q, ties by token id, and select the draw of highest rank.

    The selected token is at most x if all draws are: s(x) = F(x)^k - F(x-)^k, F the cumulative distribution of q in that order.
    """

    def choose(self, trying: NodeFamilies) -> SelectedDraw:
        """Choose the draw of highest rank; a token drawn twice has one rank."""
        target_AV, draft_AV = trying.target_MV(), trying.draft_AV()
        ratio_AV = torch.where(draft_AV > 0.0, target_AV / draft_AV, 0.0)  # q = 0 is never drawn, so its rank does not matter
        order_AV = ratio_AV.argsort(dim=-1, stable=True)  # worst first
        upto_AV = draft_AV.gather(1, order_AV).cumsum(-1, dtype=torch.float64)
        at_most_AV = (upto_AV / upto_AV[:, -1:]).pow_(trying.is_try_MC.sum(-1, keepdim=True))
        won_AV = at_most_AV.diff(dim=-1, prepend=torch.zeros_like(at_most_AV[:, :1])).clamp_(min=0.0)
        probs_AV = draft_AV.scatter_(1, order_AV, won_AV.to(draft_AV.dtype))
        rank_AC = inverse_permutation(order_AV).gather(1, trying.tokens_MC)
        return SelectedDraw(one_hot(torch.where(trying.is_try_MC, rank_AC, -1).argmax(-1), trying), probs_AV)


def inverse_permutation(order_AV: Tensor) -> Tensor:
    """Return the index of each token in an order of tokens."""
    numbers_V = torch.arange(order_AV.shape[-1], device=order_AV.device)
    return torch.empty_like(order_AV).scatter_(1, order_AV, numbers_V.expand_as(order_AV))
