"""Ways to choose one of several i.i.d. draws by a fixed rule, and the law of the chosen token.

Knows one family's draws, their law and the target's. Shape key: A families, C tries, V vocabulary. Formulas write p for the
target law, q for the draft law, k for the number of draws.
"""

import torch
from torch import Tensor

from engine.verify.one_token import Choice, certain
from engine.verify.plans import Families


class FirstDraw:
    """NaiveTree: the first draw, of law q. Its residual may still hit another draw."""

    def choose(self, trying: Families) -> Choice:
        """Choose try 0."""
        return Choice(certain(torch.zeros_like(trying.probs_rows_M), trying), trying.draft_AV())


class BestRanked:
    """Tournament: rank tokens by p / q, ties by token id, and take the draw that ranks best.

    The chosen token is at most x if all draws are: s(x) = F(x)^k - F(x-)^k, F the distribution function of q in that order.
    """

    def choose(self, trying: Families) -> Choice:
        """Choose the best-ranked draw; a token drawn twice has one rank."""
        target_AV, draft_AV = trying.target_MV(), trying.draft_AV()
        ratio_AV = torch.where(draft_AV > 0.0, target_AV / draft_AV, 0.0)  # no draw has q = 0: its place does not matter
        order_AV = ratio_AV.argsort(dim=-1, stable=True)  # worst first
        upto_AV = draft_AV.gather(1, order_AV).cumsum(-1, dtype=torch.float64)
        at_most_AV = (upto_AV / upto_AV[:, -1:]).pow_(trying.is_try_MC.sum(-1, keepdim=True))
        won_AV = at_most_AV.diff(dim=-1, prepend=torch.zeros_like(at_most_AV[:, :1])).clamp_(min=0.0)
        probs_AV = draft_AV.scatter_(1, order_AV, won_AV.to(draft_AV.dtype))
        rank_AC = places(order_AV).gather(1, trying.tokens_MC)
        return Choice(certain(torch.where(trying.is_try_MC, rank_AC, -1).argmax(-1), trying), probs_AV)


def places(order_AV: Tensor) -> Tensor:
    """Return the place of each token in an order of tokens."""
    numbers_V = torch.arange(order_AV.shape[-1], device=order_AV.device)
    return torch.empty_like(order_AV).scatter_(1, order_AV, numbers_V.expand_as(order_AV))
