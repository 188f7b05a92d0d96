"""The plan of rules that decide on one token and descend if it was drafted, and the decision that accepts a selected draw.

A decision becomes a node plan: the probabilities of drafted tokens are the children's shares, all other probabilities belong to
the extra token. Decisions are made in k_seq.py; draws are selected in selections.py and khisti.py.

Shape key: M families, A <= M of them with tries, C tries, V vocabulary. Formulas write p for the target distribution, a for the
prefix mass, X for the draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from engine.core.tree import TokenTree
from engine.verify.node_plans import AcceptanceSplit, NodeFamilies, clear_tries_, split_by_shares


class Decided(NamedTuple):
    """pi(y|X) for every token y, and pi(none|X) in float64. With a = 1 the first is a distribution and the second is 0."""

    tokens_AV: Float[Tensor, "A V"]
    none_A: Float[Tensor, " A"]


class Decision(Protocol):
    """Decides on one token, or none, after i.i.d. draws. Averaged over the draws, token y must have a p(y)."""

    def decide(self, trying: NodeFamilies) -> Decided:
        """Return the decision given the draws, for families that all have draws."""
        ...


@dataclass(frozen=True)
class OneToken:
    """Descends into the child that carries the decision's token; else the token is the extra one."""

    decision: Decision
    reads_draft = True

    def tries(self, tree: TokenTree) -> Sequence[Sequence[int]]:
        """Return the draws with their multiplicity."""
        return tree.draws

    def split(self, families: NodeFamilies) -> AcceptanceSplit:
        """Give each child the probability of its token, at the token's first draw; later draws of it get 0."""
        trying, count = families.trying(), families.num_trying
        decided = self.decision.decide(trying)
        shares_MC = torch.zeros_like(families.tokens_MC, dtype=torch.float64)
        shares_MC[:count] = decided.tokens_AV.gather(1, trying.tokens_MC).double() * _is_first(trying)
        none_M = 1.0 - families.mass_M
        none_M[:count] = decided.none_A
        return split_by_shares(shares_MC, none_M)

    def residual(self, families: NodeFamilies) -> Float[Tensor, "M V"]:
        """Return the decision's probabilities of tokens outside the tree."""
        weights_MV = families.target_MV()
        weights_MV[: families.num_trying] = self.decision.decide(families.trying()).tokens_AV
        return clear_tries_(weights_MV, families)


def _is_first(trying: NodeFamilies) -> Bool[Tensor, "A C"]:
    """Return whether each try is the first with its token."""
    tokens_MC = trying.tokens_MC
    same_MCC = tokens_MC[:, :, None] == tokens_MC[:, None, :]
    return trying.is_try_MC & ~same_MCC.tril(-1).any(-1)


class SelectedDraw(NamedTuple):
    """`chance_AC`: probability that each try is selected, given the draws; `probs_AV`: the selected token's distribution."""

    chance_AC: Float[Tensor, "A C"]
    probs_AV: Float[Tensor, "A V"]


class Selection(Protocol):
    """Selects one of the draws. Any selection is lossless if it returns the exact distribution of the selected token."""

    def choose(self, trying: NodeFamilies) -> SelectedDraw:
        """Return the selected draw, chances in float64, for families that all have two draws or more."""
        ...


@dataclass(frozen=True)
class AcceptChosen:
    """Select a draw x ~ s; accept it with min(1, a p(x) / s(x)), else draw from (a p - s)+, or none with weight 1 - a.

    This is the plan for one child with s in place of q. With a single draw, s = q.
    """

    selection: Selection

    def decide(self, trying: NodeFamilies) -> Decided:
        """Return the decision; a token of (a p - s)+ may be another draw."""
        selected = self._selected(trying)
        weights_AV = trying.target_MV()
        weights_AV.mul_(trying.mass_M[:, None].to(weights_AV.dtype))
        ratio_AC = weights_AV.gather(1, trying.tokens_MC).double() / selected.probs_AV.gather(1, trying.tokens_MC)
        accept_AC = ratio_AC.clamp(max=1.0).nan_to_num(nan=0.0)  # p = 0 and an s that rounds to 0 make NaN
        taken_AC = torch.where(selected.chance_AC > 0.0, selected.chance_AC * accept_AC, 0.0)
        rest_AV = weights_AV.sub_(selected.probs_AV).clamp_(min=0.0)
        return take_or_spread(trying, taken_AC, Decided(rest_AV, 1.0 - trying.mass_M))

    def _selected(self, trying: NodeFamilies) -> SelectedDraw:
        chance_AC = one_hot(torch.zeros_like(trying.probs_rows_M), trying)
        selected = SelectedDraw(chance_AC, trying.draft_AV())
        if count := trying.num_choosing:
            chance_AC[:count], selected.probs_AV[:count] = self.selection.choose(trying.first(count))
        return selected


def one_hot(chosen_A: Int[Tensor, " A"], trying: NodeFamilies) -> Float[Tensor, "A C"]:
    """Return probabilities that are 1 for the chosen try."""
    return torch.zeros_like(trying.tokens_MC, dtype=torch.float64).scatter_(1, chosen_A[:, None], 1.0)


def take_or_spread(trying: NodeFamilies, taken_AC: Float[Tensor, "A C"], rest: Decided) -> Decided:
    """Give each try its probability and distribute the remaining mass as `rest`, whose weights are overwritten.

    An empty rest stays empty, because then the remaining mass is only rounding.
    """
    missing_A = (1.0 - taken_AC.sum(-1)).clamp(min=0.0)
    total_A = rest.tokens_AV.sum(-1).double() + rest.none_A
    rate_A = torch.where(total_A > 0.0, missing_A / total_A, 0.0)
    tokens_AV = rest.tokens_AV.mul_(rate_A[:, None].to(rest.tokens_AV.dtype))
    tokens_AV.scatter_add_(1, trying.tokens_MC, taken_AC.to(tokens_AV.dtype))
    return Decided(tokens_AV, rest.none_A * rate_A)
