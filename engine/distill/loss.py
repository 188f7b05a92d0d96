"""The loss of a head: divergence from the target's distribution over the head's vocabulary, refused mass, or a blend of both.

Shape key: N positions, D target width, M head vocabulary.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

_ROWS = 512  # positions at a time on a CPU, so that their distributions stay in its cache
_ROWS_ELSEWHERE = 8192  # on a GPU launches cost more; memory is the limit


def teacher_probs(states_ND: Float[Tensor, "N D"], rows_MD: Float[Tensor, "M D"]) -> Float[Tensor, "N M"]:
    """Return the target's distributions over the head's vocabulary alone, normalised, bfloat16."""
    probs_NM = torch.empty(len(states_ND), len(rows_MD), dtype=torch.bfloat16, device=states_ND.device)
    for part in _parts(states_ND):
        probs_NM[part] = (states_ND[part] @ rows_MD.T).float().softmax(-1)
    return probs_NM


class _DistillationLoss(torch.autograd.Function):
    """Mean loss of predicted states. The forward pass also computes the gradient, so that no distributions are stored.

    In the logits, cross-entropy -sum p log q has the gradient q - p. The refused mass 1 - sum min(p, q) has
    -q (a - sum a q), where a is 1 if q < p, else 0.
    """

    @staticmethod
    def forward(ctx: Any, predicted_ND: Tensor, probs_NM: Tensor, rows_MD: Tensor, refusal_weight: float) -> Tensor:
        grad_ND = torch.empty_like(predicted_ND)
        loss = torch.zeros((), device=predicted_ND.device)
        for part in _parts(predicted_ND):
            logits, p = predicted_ND[part] @ rows_MD.T, probs_NM[part]
            q = logits.softmax(-1, dtype=torch.float32)
            # sum p log q = sum p logits - log sum exp(logits); the latter is logits - log q at any token.
            log_sum = logits[:, :1].float() - q[:, :1].clamp_min(1e-38).log()
            loss -= (1.0 - refusal_weight) * ((p * logits).sum(-1, dtype=torch.float32) - log_sum[:, 0]).sum()
            if refusal_weight:
                is_less = q < p
                accepted = (is_less * q).sum(-1, keepdim=True)
                refusal_grad = q * (accepted - is_less.float())
                loss += refusal_weight * (1.0 - torch.minimum(p.float(), q).sum(-1)).sum()
                grad = q.sub_(p).mul_(1.0 - refusal_weight).add_(refusal_grad, alpha=refusal_weight)
            else:
                grad = q.sub_(p)
            grad_ND[part] = grad.to(rows_MD.dtype) @ rows_MD
        ctx.save_for_backward(grad_ND / len(predicted_ND))
        return loss / len(predicted_ND)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.saved_tensors[0] * grads[0].to(ctx.saved_tensors[0].dtype), None, None, None


def _parts(rows_ND: Tensor) -> list[slice]:
    """Return slices of rows to process together."""
    size = _ROWS if rows_ND.device.type == "cpu" else _ROWS_ELSEWHERE
    return [slice(first, first + size) for first in range(0, len(rows_ND), size)]


def distillation_loss(
    predicted_ND: Float[Tensor, "N D"], probs_NM: Float[Tensor, "N M"], rows_MD: Float[Tensor, "M D"], refusal_weight: float
) -> Float[Tensor, ""]:
    """Return the mean of (1 - w) cross-entropy + w refused mass over the positions; w = `refusal_weight` in [0, 1].

    `rows_MD` are the target's output rows of the head's vocabulary. They are frozen: they get no gradient.
    """
    return _DistillationLoss.apply(predicted_ND, probs_NM, rows_MD, refusal_weight)  # type: ignore[no-any-return, no-untyped-call]
