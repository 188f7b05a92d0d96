"""The plan of rules that decide on one token and descend if it was drafted, and the decision that accepts a chosen draw.

Knows how a decision becomes a local plan: its tokens among the children are their shares, the others are the extra token.
Does not know how decisions are made (k_seq.py) or draws are chosen (selections.py, duels.py).

Shape key: M families, A <= M of them with tries, C tries, V vocabulary. Formulas write p for the target law, a for the prefix
mass, X for the draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from engine.core.tree import TokenTree
from engine.verify.plans import Families, Split, clear_tries_, split_by_shares


class Decided(NamedTuple):
    """pi(y|X) for every token y, and pi(none|X) in float64; with a = 1 the first is a law and the second 0."""

    tokens_AV: Float[Tensor, "A V"]
    none_A: Float[Tensor, " A"]


class Decision(Protocol):
    """Decides on one token, or none, after i.i.d. draws. Averaged over the draws, token y must have a p(y)."""

    def decide(self, trying: Families) -> Decided:
        """Return what is decided given the draws, for families that all have draws."""
        ...


@dataclass(frozen=True)
class OneToken:
    """Descends into the child that carries the decision's token; else the token is the extra one."""

    decision: Decision
    reads_draft = True

    def tries(self, tree: TokenTree) -> Sequence[Sequence[int]]:
        """Return the draws with their multiplicity."""
        return tree.draws

    def split(self, families: Families) -> Split:
        """Give each child the chance that the decision names it, at its first draw; later ones get nothing."""
        trying, count = families.trying(), families.num_trying
        decided = self.decision.decide(trying)
        shares_MC = torch.zeros_like(families.tokens_MC, dtype=torch.float64)
        shares_MC[:count] = decided.tokens_AV.gather(1, trying.tokens_MC).double() * _is_first(trying)
        none_M = 1.0 - families.mass_M
        none_M[:count] = decided.none_A
        return split_by_shares(shares_MC, none_M)

    def residual(self, families: Families) -> Float[Tensor, "M V"]:
        """Return what the decision gives to tokens off the tree."""
        weights_MV = families.target_MV()
        weights_MV[: families.num_trying] = self.decision.decide(families.trying()).tokens_AV
        return clear_tries_(weights_MV, families)


def _is_first(trying: Families) -> Bool[Tensor, "A C"]:
    """Return which tries are the first of their token."""
    tokens_MC = trying.tokens_MC
    same_MCC = tokens_MC[:, :, None] == tokens_MC[:, None, :]
    return trying.is_try_MC & ~same_MCC.tril(-1).any(-1)


class Choice(NamedTuple):
    """`chance_AC`: with what chance each try is chosen, given the draws; `law_AV`: the chosen token's law over all draws."""

    chance_AC: Float[Tensor, "A C"]
    probs_AV: Float[Tensor, "A V"]


class Selection(Protocol):
    """Chooses one of the draws. Any way to choose is lossless as long as the law of the chosen token is told exactly."""

    def choose(self, trying: Families) -> Choice:
        """Return the choice, chances in float64, for families that all have two draws or more."""
        ...


@dataclass(frozen=True)
class AcceptChosen:
    """Choose a draw x, of law s; accept it with min(1, a p(x) / s(x)), else decide by (a p - s)+ and none: 1 - a.

    This is the plan for one child with s in place of q. Where there is one draw there is no choice, and s = q.
    """

    selection: Selection

    def decide(self, trying: Families) -> Decided:
        """Return what is decided; a token of (a p - s)+ may be another draw."""
        choice = self._choice(trying)
        weights_AV = trying.target_MV()
        weights_AV.mul_(trying.mass_M[:, None].to(weights_AV.dtype))
        ratio_AC = weights_AV.gather(1, trying.tokens_MC).double() / choice.probs_AV.gather(1, trying.tokens_MC)
        odds_AC = ratio_AC.clamp(max=1.0).nan_to_num(nan=0.0)  # p = 0 and an s that rounds to 0 make NaN
        taken_AC = torch.where(choice.chance_AC > 0.0, choice.chance_AC * odds_AC, 0.0)
        rest_AV = weights_AV.sub_(choice.probs_AV).clamp_(min=0.0)
        return take_or_spread(trying, taken_AC, Decided(rest_AV, 1.0 - trying.mass_M))

    def _choice(self, trying: Families) -> Choice:
        chance_AC = certain(torch.zeros_like(trying.probs_rows_M), trying)
        choice = Choice(chance_AC, trying.draft_AV())
        if count := trying.num_choosing:
            chance_AC[:count], choice.probs_AV[:count] = self.selection.choose(trying.first(count))
        return choice


def certain(chosen_A: Int[Tensor, " A"], trying: Families) -> Float[Tensor, "A C"]:
    """Return chances that are 1 for the chosen try."""
    return torch.zeros_like(trying.tokens_MC, dtype=torch.float64).scatter_(1, chosen_A[:, None], 1.0)


def take_or_spread(trying: Families, taken_AC: Float[Tensor, "A C"], rest: Decided) -> Decided:
    """Give each try its chance and spread what is missing to 1 as `rest`, whose weights are overwritten.

    An empty rest stays empty: then nothing but rounding is missing.
    """
    missing_A = (1.0 - taken_AC.sum(-1)).clamp(min=0.0)
    total_A = rest.tokens_AV.sum(-1).double() + rest.none_A
    rate_A = torch.where(total_A > 0.0, missing_A / total_A, 0.0)
    tokens_AV = rest.tokens_AV.mul_(rate_A[:, None].to(rest.tokens_AV.dtype))
    tokens_AV.scatter_add_(1, trying.tokens_MC, taken_AC.to(tokens_AV.dtype))
    return Decided(tokens_AV, rest.none_A * rate_A)
