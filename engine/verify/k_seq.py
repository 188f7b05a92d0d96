"""K-SEQ, the decision of SpecTr: it tries draws in order against the target distribution divided by one number.

Draws are i.i.d., with their multiplicity. Source: arXiv 2310.15141. Shape key: A families, C tries, V vocabulary. Formulas
write p for the target distribution, q for the draft distribution, k for the number of draws.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from engine.verify.directions import first_accept_probs
from engine.verify.node_plans import NodeFamilies
from engine.verify.one_token import Decided, take_or_spread

_BISECTIONS = 40  # narrow [1, k] to (k - 1) / 2^40; a wider rest would cost acceptance, not exactness


class KSeq:
    """Accept the first draw x with u < p(x) / (r q(x)); else draw from p - gamma min(p / r, q), which may select another draw.

    Let beta(r) = sum min(p / r, q) and gamma = (1 - (1 - beta)^k) / beta. The accepted part is gamma min(p / r, q), which is
    lossless if gamma <= r. The best r has equality. Rows and scalars are float64.
    """

    def decide(self, trying: NodeFamilies) -> Decided:
        """Return a P(y|X) and 1 - a: the mass only scales the decision."""
        target_AV, draft_AV = trying.target_MV().double(), trying.draft_AV().double()
        num_draws_A = trying.is_try_MC.sum(-1).double()
        divisor_A = torch.ones_like(num_draws_A)  # r = 1 for one draw: the naive rule
        if count := trying.num_choosing:
            divisor_A[:count] = self._divisor(target_AV[:count], draft_AV[:count], num_draws_A[:count])
        ratio_AC = target_AV.gather(1, trying.tokens_MC) / draft_AV.gather(1, trying.tokens_MC)
        accept_AC = torch.where(trying.is_try_MC, (ratio_AC / divisor_A[:, None]).clamp(max=1.0), 0.0)

        overlap_AV = torch.minimum(target_AV / divisor_A[:, None], draft_AV)
        beta_A = overlap_AV.sum(-1).clamp(max=1.0)
        gamma_A = torch.where(beta_A > 0.0, _any_accepted(beta_A, num_draws_A) / beta_A, num_draws_A)
        rest_AV = target_AV.sub_(overlap_AV.mul_(gamma_A[:, None])).clamp_(min=0.0)
        probs_AV = take_or_spread(trying, first_accept_probs(accept_AC), Decided(rest_AV, torch.zeros_like(beta_A))).tokens_AV
        return Decided((trying.mass_M[:, None] * probs_AV).to(trying.target_probs_NV.dtype), 1.0 - trying.mass_M)

    def _divisor(self, target_AV: Tensor, draft_AV: Tensor, num_draws_A: Tensor) -> Float[Tensor, " A"]:
        """Return r by bisection on [1, k]: the upper end, where gamma <= r holds. A smaller r is lossy."""
        bounds = _Bounds(torch.ones_like(num_draws_A), num_draws_A)
        scratch_AV = torch.empty_like(draft_AV)
        for _ in range(_BISECTIONS):
            middle_A = (bounds.low_A + bounds.high_A) / 2
            torch.mul(draft_AV, middle_A[:, None], out=scratch_AV)
            scaled_A = torch.minimum(target_AV, scratch_AV, out=scratch_AV).sum(-1)  # r beta(r)
            is_enough_A = _any_accepted((scaled_A / middle_A).clamp(max=1.0), num_draws_A) <= scaled_A
            bounds = _Bounds(torch.where(is_enough_A, bounds.low_A, middle_A), torch.where(is_enough_A, middle_A, bounds.high_A))
        return bounds.high_A


class _Bounds(NamedTuple):
    low_A: Tensor
    high_A: Tensor


def _any_accepted(beta_A: Tensor, num_draws_A: Tensor) -> Tensor:
    """Return 1 - (1 - beta)^k, accurate for small beta."""
    return -torch.expm1(num_draws_A * torch.log1p(-beta_A))
