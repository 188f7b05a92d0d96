"""Khisti et al.'s choice: draws meet in pairs, and who wins a pair is weighted so that the winner's law covers the target's.

Knows the choice and the truncated linear program that weighs it; the program's solver is rebalance.py. Source: arXiv
2410.18234 (two drafts, canonical decomposition), folded over further draws.

Shape key: A families, C tries, V vocabulary, H tokens of the head. Formulas write p for the target law, a for the
prefix mass; what is wanted is a p.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.verify.one_token import Choice
from engine.verify.plans import Families
from engine.verify.rebalance import rebalanced
from engine.verify.selections import places


@dataclass(frozen=True)
class Duels:
    """The champion so far, of law s, meets the next draw, of law q; the winner's law is told exactly.

    Tokens are ordered by a p - s q, most wanting first, and the earlier wins; among the first `head_size` of them each pair is
    shared so that sum min(a p, winner's law) is largest. With as many as the vocabulary and two draws no rule accepts more.
    """

    head_size: int = 10

    def choose(self, trying: Families) -> Choice:
        """Return the chance of every draw to win all its duels. Rows are float64."""
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
        return Choice(chance_AC, probs_AV.to(trying.target_probs_NV.dtype))


@dataclass(frozen=True)
class Duel:
    """`place_AV`: of each token in the order; `wins_AHH[i, j]`: chance that the token at i beats that at j; the winner's law."""

    place_AV: Int[Tensor, "A V"]
    wins_AHH: Float[Tensor, "A H H"]
    probs_AV: Float[Tensor, "A V"]

    @classmethod
    def between(
        cls, first_AV: Float[Tensor, "A V"], second_AV: Float[Tensor, "A V"], wanted_AV: Float[Tensor, "A V"], head_size: int
    ) -> "Duel":
        """Order the tokens, let the earlier win, then share the pairs of the head anew."""
        order_AV = (wanted_AV - first_AV * second_AV).argsort(dim=-1, descending=True, stable=True)
        first_AV, second_AV = first_AV.gather(1, order_AV), second_AV.gather(1, order_AV)
        load_AV = first_AV * second_AV + first_AV * _after(second_AV) + second_AV * _after(first_AV)

        head_size = min(head_size, load_AV.shape[-1])
        pair_AHH = first_AV[:, :head_size, None] * second_AV[:, None, :head_size]
        pair_AHH = pair_AHH + pair_AHH.mT
        held_AHH = pair_AHH.triu(1)
        surplus_AH = load_AV[:, :head_size] - wanted_AV.gather(1, order_AV[:, :head_size])
        shared_AHH = rebalanced(surplus_AH, held_AHH)
        load_AV[:, :head_size] += (shared_AHH - held_AHH).sum(-1)
        wins_AHH = torch.where(pair_AHH > 0.0, shared_AHH / pair_AHH, held_AHH)
        load_AV.clamp_(min=0.0)  # rounding
        return cls(places(order_AV), wins_AHH, torch.zeros_like(load_AV).scatter_(1, order_AV, load_AV))

    def stays(self, tokens_AC: Int[Tensor, "A C"], newcomer_A: Int[Tensor, " A"]) -> Float[Tensor, "A C"]:
        """Return the chance that each token, were it the champion, beats the newcomer; 1 if they are the same."""
        champion_AC = self.place_AV.gather(1, tokens_AC)
        newcomer_AC = self.place_AV.gather(1, newcomer_A[:, None]).expand_as(champion_AC)
        last = self.wins_AHH.shape[-1] - 1
        by_place_AC = (champion_AC <= newcomer_AC).double()
        families_A1 = torch.arange(len(tokens_AC), device=tokens_AC.device)[:, None]
        shared_AC = self.wins_AHH[families_A1, champion_AC.clamp(max=last), newcomer_AC.clamp(max=last)]
        in_head_AC = (champion_AC <= last) & (newcomer_AC <= last) & (champion_AC != newcomer_AC)
        return torch.where(in_head_AC, shared_AC, by_place_AC)


def _after(probs_AV: Tensor) -> Tensor:
    """Return the probability of all later entries of each row."""
    return probs_AV.flip(-1).cumsum(-1).flip(-1) - probs_AV
