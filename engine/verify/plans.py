"""Local plans: how one node shares its mass among its drafted children, an extra token and refusal.

Knows one family (a node, the law after it, its children, the law they were drawn from) at a time, many families at once;
does not know trees, depths or uniforms. A plan for a node of prefix mass a is lossless when, averaged over the children X
drawn from Q, sum_X Q(X) pi(y|X) = a p(y) for every token y: docs/verification.md.

Shape key: M families, A <= M of them still trying, C tries, V vocabulary.
Formulas write p for the target law, q for the draft law and a for the prefix mass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from engine.tree import TokenTree


@dataclass(frozen=True)
class Families:
    """M nodes with their children. Rows of laws are copied out only when a plan asks for them.

    `num_tried[j]` families, the first ones, have more than j tries; `is_try_MC` says the same entry by entry.
    """

    target_laws_NV: Float[Tensor, "N V"]
    draft_laws_RV: Float[Tensor, "R V"]
    nodes_M: Int[Tensor, " M"]
    law_rows_M: Int[Tensor, " M"]
    tokens_MC: Int[Tensor, "M C"]
    is_try_MC: Bool[Tensor, "M C"]
    mass_M: Float[Tensor, " M"]
    num_tried: tuple[int, ...]

    @property
    def num_trying(self) -> int:
        """Families with tries; they come first."""
        return sum(self.num_tried[:1])

    @property
    def num_choosing(self) -> int:
        """Families with two tries or more; they come first."""
        return sum(self.num_tried[1:2])

    def target_MV(self) -> Float[Tensor, "M V"]:
        """Return a fresh copy of the law after each node."""
        return self.target_laws_NV.index_select(0, self.nodes_M)

    def draft_AV(self) -> Float[Tensor, "A V"]:
        """Return a fresh copy of the law that the children of each family with tries were drawn from."""
        return self.draft_laws_RV.index_select(0, self.law_rows_M[: self.num_trying])

    def first(self, count: int) -> "Families":
        """Return the first families, those with most tries."""
        return replace(
            self,
            nodes_M=self.nodes_M[:count],
            law_rows_M=self.law_rows_M[:count],
            tokens_MC=self.tokens_MC[:count],
            is_try_MC=self.is_try_MC[:count],
            mass_M=self.mass_M[:count],
            num_tried=tuple(min(count, num) for num in self.num_tried),
        )

    def trying(self) -> "Families":
        """Return the families with tries."""
        return self.first(self.num_trying)

    def target_at_tries_MC(self) -> Float[Tensor, "M C"]:
        """Return the target probability of each try in float64, 0 where there is none."""
        return self.target_laws_NV[self.nodes_M[:, None], self.tokens_MC].double() * self.is_try_MC


class Split(NamedTuple):
    """Float64. `tried_MC`: chance that a try is taken, those before it refused; `final_M`: mass kept when all are refused."""

    tried_MC: Float[Tensor, "M C"]
    final_M: Float[Tensor, " M"]


class LocalPlan(Protocol):
    """A lossless way to treat one node."""

    reads_draft: bool

    def tries(self, tree: TokenTree) -> Sequence[Sequence[int]]:
        """Return for every node its children in the order of trying, a child as often as it is tried."""
        ...

    def split(self, families: Families) -> Split:
        """Return what each try gets and what is left for the node itself."""
        ...

    def residual(self, families: Families) -> Float[Tensor, "M V"]:
        """Return unnormalised weights of the extra token when all tries are refused; all 0 where that cannot happen."""
        ...


class TargetDraw:
    """NSS: draw y from the target's law and descend if y is a child: pi(y|X) = a p(y) whatever X. Exact on any tree."""

    reads_draft = False

    def tries(self, tree: TokenTree) -> Sequence[Sequence[int]]:
        """Return the distinct children."""
        return tree.children

    def split(self, families: Families) -> Split:
        """Give each child its own share of the target's law."""
        return split_by_shares(families.mass_M[:, None] * families.target_at_tries_MC(), 1.0 - families.mass_M)

    def residual(self, families: Families) -> Float[Tensor, "M V"]:
        """Return the target's law off the tree."""
        return clear_tries_(families.target_MV(), families)


def split_by_shares(shares_MC: Float[Tensor, "M C"], none_M: Float[Tensor, " M"]) -> Split:
    """Return the odds that make pi(x|X) of each try, one after another, and pi(none|X), all in float64, come true."""
    left_MC = 1.0 - shares_MC.cumsum(-1)  # after each try
    before_MC = torch.cat([torch.ones_like(left_MC[:, :1]), left_MC[:, :-1]], -1)
    final_M = torch.where(none_M > 0.0, 1.0 - none_M / left_MC[:, -1], 1.0)
    return Split((shares_MC / before_MC).nan_to_num(0.0).clamp(0.0, 1.0), final_M.clamp(0.0, 1.0))


def clear_tries_(weights_MV: Float[Tensor, "M V"], families: Families) -> Float[Tensor, "M V"]:
    """Set the weights of the drafted tokens to 0 in place: they are children, not extra tokens."""
    for rank, count in enumerate(families.num_tried):
        weights_MV[:count].scatter_(1, families.tokens_MC[:count, rank : rank + 1], 0.0)
    return weights_MV


class WithReplacement:
    """SpecInfer (arXiv 2305.09781): i.i.d. draws, each occurrence of a token tried, q the same every time."""

    reads_draft = True

    def tries(self, tree: TokenTree) -> Sequence[Sequence[int]]:
        """Return the draws with their multiplicity."""
        return tree.draws

    def split(self, families: Families) -> Split:
        """Try the draws in order against one law."""
        return _try_in_order(families, _keep).split

    def residual(self, families: Families) -> Float[Tensor, "M V"]:
        """Return what the refused draws left of the target's law."""
        return _try_in_order(families, _keep).weights_MV


class WithoutReplacement:
    """Distinct children in order of first appearance, each drawn from q without its elder siblings.

    Bottom-up it is Traversal Verification (arXiv 2505.12398), with one child Block Verification (2403.10444); top-down
    it is Sequoia's rule (2402.12374). i.i.d. draws with duplicates merged are such children too.
    """

    reads_draft = True

    def tries(self, tree: TokenTree) -> Sequence[Sequence[int]]:
        """Return the distinct children in order of first appearance."""
        return tree.children

    def split(self, families: Families) -> Split:
        """Try the children in order, each against q without those before it."""
        return _try_in_order(families, _remove).split

    def residual(self, families: Families) -> Float[Tensor, "M V"]:
        """Return what the refused children left of the target's law."""
        return _try_in_order(families, _remove).weights_MV


class _Trial(NamedTuple):
    split: Split
    weights_MV: Tensor


class _AfterRefusal(Protocol):
    """Changes the draft law of families whose child `tokens_A1` was refused, in place."""

    def __call__(self, draft_AV: Tensor, tokens_A1: Tensor) -> None: ...


def _keep(draft_AV: Tensor, tokens_A1: Tensor) -> None:
    """Leave q as it is: the next draw is independent of this one."""


def _remove(draft_AV: Tensor, tokens_A1: Tensor) -> None:
    """Set q to 0 at the token and renormalise. The sum is taken anew: 1 - q(x) would lose a small rest."""
    draft_AV.scatter_(1, tokens_A1, 0.0)
    draft_AV.div_(draft_AV.sum(-1, keepdim=True))


def _try_in_order(families: Families, after_refusal: _AfterRefusal) -> _Trial:
    """Accept x with min(1, a p(x) / q(x)), else go on with what is left; VERIFICATION by rejection, one try after another.

    The weights are w = a p, a law of total a. A refusal makes S = sum (w - q)+, w <- (w - q)+ / (S + 1 - a) and
    a <- S / (S + 1 - a). Scalars are float64 whatever the rows are.
    """
    mass_M = families.mass_M.clone()
    weights_MV = families.target_MV()
    weights_MV.mul_(mass_M[:, None].to(weights_MV.dtype))
    draft_AV = families.draft_AV()
    tried_MC = torch.zeros_like(families.tokens_MC, dtype=torch.float64)
    for rank, count in enumerate(families.num_tried):
        going_on = sum(families.num_tried[rank + 1 : rank + 2])
        tokens_A1 = families.tokens_MC[:count, rank : rank + 1]
        ratio_A1 = weights_MV[:count].gather(1, tokens_A1).double() / draft_AV[:count].gather(1, tokens_A1)
        tried_MC[:count, rank : rank + 1] = ratio_A1.clamp(max=1.0)

        rest_A = weights_MV[:count].sub_(draft_AV[:count]).clamp_(min=0.0).sum(-1).double()
        refused_A = rest_A + 1.0 - mass_M[:count]  # 0 only if a = 1 and p = q: then x was taken for certain
        mass_M[:count] = torch.where(refused_A > 0.0, rest_A / refused_A, 1.0)
        if going_on:
            scale_A = torch.where(refused_A > 0.0, refused_A, 1.0).to(weights_MV.dtype)
            weights_MV[:going_on].div_(scale_A[:going_on, None])
            after_refusal(draft_AV[:going_on], tokens_A1[:going_on])
    return _Trial(Split(tried_MC, mass_M), weights_MV)
