"""The plan for a fixed set of children and one draw outside it.

Convention: the last draw of a node is the sample. The draws before it are the set H, fixed before the sample was drawn.

Shape key: M families, A <= M of them with tries, C tries, V vocabulary. Formulas write p for the target distribution, q~ for
the draft distribution without H, a for the prefix mass.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from engine.core.tree import TokenTree
from engine.verify.node_plans import AcceptanceSplit, NodeFamilies, clear_tries_, split_by_shares


class SetPlusSample:
    """Accept the sample Y with min(1, a p(Y) / q~(Y)), else draw a token of (a p - q~)+ or refuse; descend if it is in H.

    Top-down it is the greedy multi-draft rule (arXiv 2502.18779; with one fixed token SpecHub, 2411.05289). Bottom-up it is a
    reconstruction of UniVer (2605.04543) from the theorem of docs/verification.md, made without that paper's pseudo-code. It may
    accept other tokens, but it is lossless. The draft distribution is the drafter's full distribution; q~ is its part outside H.
    """

    reads_draft = True

    def tries(self, tree: TokenTree) -> Sequence[Sequence[int]]:
        """Return the children, the sample last."""
        return tree.children

    def split(self, families: NodeFamilies) -> AcceptanceSplit:
        """Give the sample its acceptance probability, and each child in H its share of the rest."""
        trying, count = families.trying(), families.num_trying
        spread = _spread(trying)
        in_set_AC = trying.is_try_MC.scatter(1, _last(trying), False)
        set_AC = spread.rate_A[:, None] * trying.mass_M[:, None] * trying.target_at_tries_MC()
        shares_MC = torch.zeros_like(families.tokens_MC, dtype=torch.float64)
        shares_MC[:count] = torch.where(in_set_AC, set_AC, 0.0).scatter(1, _last(trying), spread.taken_A[:, None])
        none_M = 1.0 - families.mass_M
        none_M[:count] *= spread.rate_A
        return split_by_shares(shares_MC, none_M)

    def residual(self, families: NodeFamilies) -> Float[Tensor, "M V"]:
        """Return (a p - q~)+ outside the tree."""
        weights_MV = families.target_MV()
        weights_MV[: families.num_trying] = _spread(families.trying()).rest_AV
        return clear_tries_(weights_MV, families)


class _Spread(NamedTuple):
    """`taken_A`: acceptance probability of the sample; `rate_A` = (1 - taken) / R scales `rest_AV` = (a p - q~)+ and 1 - a."""

    taken_A: Float[Tensor, " A"]
    rate_A: Float[Tensor, " A"]
    rest_AV: Float[Tensor, "A V"]


def _spread(trying: NodeFamilies) -> _Spread:
    """Return the probabilities of the sample and of the rest, with R = sum (a p - q~)+ + 1 - a."""
    sample_A1 = trying.tokens_MC.gather(1, _last(trying))
    weights_AV = trying.target_MV()
    weights_AV.mul_(trying.mass_M[:, None].to(weights_AV.dtype))
    draft_AV = _off_set(trying, sample_A1)
    ratio_A1 = weights_AV.gather(1, sample_A1).double() / draft_AV.gather(1, sample_A1)
    taken_A = ratio_A1.clamp(max=1.0)[:, 0]
    rest_AV = weights_AV.sub_(draft_AV).clamp_(min=0.0)
    spread_A = rest_AV.sum(-1).double() + 1.0 - trying.mass_M
    return _Spread(taken_A, torch.where(spread_A > 0.0, (1.0 - taken_A) / spread_A, 0.0), rest_AV)


def _off_set(trying: NodeFamilies, sample_A1: Tensor) -> Tensor:
    """Return q~: the draft distribution, 0 on H and renormalised."""
    draft_AV = trying.draft_AV()
    sampled_A1 = draft_AV.gather(1, sample_A1)
    clear_tries_(draft_AV, trying).scatter_(1, sample_A1, sampled_A1)
    return draft_AV.div_(draft_AV.sum(-1, keepdim=True))


def _last(trying: NodeFamilies) -> Tensor:
    """Return the index of the sample among the tries, [A, 1]."""
    return trying.is_try_MC.sum(-1, keepdim=True) - 1
