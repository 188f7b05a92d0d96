"""The selection of Khisti et al.: draws are compared in pairs, with weights that fit the winner's distribution to the target's.

The weights solve a truncated linear program (solver: rebalance.py). Source: arXiv 2410.18234 (two drafts, canonical
decomposition), folded over further draws.

Shape key: A families, C tries, V vocabulary, H tokens of the head. Formulas write p for the target distribution, a for the
prefix mass; the wanted distribution is a p.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.verify.node_plans import NodeFamilies
from engine.verify.one_token import SelectedDraw
from engine.verify.rebalance import rebalanced
from engine.verify.selections import inverse_permutation


@dataclass(frozen=True)
class Duels:
    """The current winner, with distribution s, is compared with the next draw, from q. The winner's distribution is exact.

    Tokens are ordered by a p - s q, largest first, and the earlier token wins. Among the first `head_size` tokens each pair is
    shared so that sum min(a p, winner's distribution) is largest. With two draws and a head of the whole vocabulary, no rule
    accepts more.
    """

    head_size: int = 10

    def choose(self, trying: NodeFamilies) -> SelectedDraw:
        """Return the probability that each draw wins all its comparisons. Rows are float64."""
        wanted_AV, draft_AV = trying.target_MV().double(), trying.draft_AV().double()
        wanted_AV.mul_(trying.mass_M[:, None])
        draft_AV.div_(draft_AV.sum(-1, keepdim=True))
        probs_AV = draft_AV.clone()
        chance_AC = torch.zeros_like(trying.tokens_MC, dtype=torch.float64)
        chance_AC[:, 0] = 1.0
        for rank, count in enumerate(trying.num_tried[1:], start=1):
            duel = Duel.between(probs_AV[:count], draft_AV[:count], wanted_AV[:count], self.head_size)
            stays_AC = duel.stays(trying.tokens_MC[:count, :rank], trying.tokens_MC[:count, rank])
            chance_AC[:count, rank] = (chance_AC[:count, :rank] * (1.0 - stays_AC)).sum(-1)
            chance_AC[:count, :rank] *= stays_AC
            probs_AV[:count] = duel.probs_AV
        return SelectedDraw(chance_AC, probs_AV.to(trying.target_probs_NV.dtype))


@dataclass(frozen=True)
class Duel:
    """One comparison. `place_AV`: each token's index in the order; `wins_AHH[i, j]`: probability that token i beats token j.

    `probs_AV` is the winner's distribution.
    """

    place_AV: Int[Tensor, "A V"]
    wins_AHH: Float[Tensor, "A H H"]
    probs_AV: Float[Tensor, "A V"]

    @classmethod
    def between(
        cls, first_AV: Float[Tensor, "A V"], second_AV: Float[Tensor, "A V"], wanted_AV: Float[Tensor, "A V"], head_size: int
    ) -> "Duel":
        """Order the tokens, let the earlier win, then rebalance the pairs of the head."""
        order_AV = (wanted_AV - first_AV * second_AV).argsort(dim=-1, descending=True, stable=True)
        first_AV, second_AV = first_AV.gather(1, order_AV), second_AV.gather(1, order_AV)
        load_AV = first_AV * second_AV + first_AV * _after(second_AV) + second_AV * _after(first_AV)

        head_size = min(head_size, load_AV.shape[-1])
        pair_AHH = first_AV[:, :head_size, None] * second_AV[:, None, :head_size]
        pair_AHH = pair_AHH + pair_AHH.mT
        part_AHH = pair_AHH.triu(1)
        surplus_AH = load_AV[:, :head_size] - wanted_AV.gather(1, order_AV[:, :head_size])
        shared_AHH = rebalanced(surplus_AH, part_AHH)
        load_AV[:, :head_size] += (shared_AHH - part_AHH).sum(-1)
        wins_AHH = torch.where(pair_AHH > 0.0, shared_AHH / pair_AHH, part_AHH)
        load_AV.clamp_(min=0.0)  # rounding
        return cls(inverse_permutation(order_AV), wins_AHH, torch.zeros_like(load_AV).scatter_(1, order_AV, load_AV))

    def stays(self, tokens_AC: Int[Tensor, "A C"], next_A: Int[Tensor, " A"]) -> Float[Tensor, "A C"]:
        """Return the probability that each token, as the current winner, beats the next draw; 1 if they are equal."""
        winner_AC = self.place_AV.gather(1, tokens_AC)
        next_AC = self.place_AV.gather(1, next_A[:, None]).expand_as(winner_AC)
        last = self.wins_AHH.shape[-1] - 1
        by_place_AC = (winner_AC <= next_AC).double()
        families_A1 = torch.arange(len(tokens_AC), device=tokens_AC.device)[:, None]
        shared_AC = self.wins_AHH[families_A1, winner_AC.clamp(max=last), next_AC.clamp(max=last)]
        in_head_AC = (winner_AC <= last) & (next_AC <= last) & (winner_AC != next_AC)
        return torch.where(in_head_AC, shared_AC, by_place_AC)


def _after(probs_AV: Tensor) -> Tensor:
    """Return the probability of all later entries of each row."""
    return probs_AV.flip(-1).cumsum(-1).flip(-1) - probs_AV
