"""Evaluates a head on held-out texts: its distribution against the target's, at each depth of a chain.

Shape key: N positions, V vocabulary, M head vocabulary, D target width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from engine.distill.chains import chain_states
from engine.distill.corpus import Text
from engine.distill.trainer import batched, sampled_starts
from engine.draft.models.head import DraftHead

_TEXTS = 4  # of a pass: their distributions over the whole vocabulary are in memory


@dataclass(frozen=True, slots=True)
class DepthReport:
    """Means over positions: `overlap` of sum min(p, q) at temperature 1, `overlap_07` at 0.7, `agreement` of equal arg max."""

    depth: int
    num_positions: int
    overlap: float
    overlap_07: float
    agreement: float


def evaluate(
    head: DraftHead,
    embeddings_VD: Float[Tensor, "V D"],
    output_VD: Float[Tensor, "V D"],
    texts: Sequence[Text],
    num_steps: int = 6,
    share: float = 0.25,
) -> list[DepthReport]:
    """Compare head and target along chains of `num_steps` tokens that begin at a share of the texts' positions.

    In a batch of texts this is a share of the longest text's positions, and the same number in the others.
    The result is empty if no text is as long as a chain.
    """
    sums = torch.zeros(num_steps, 4, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    vocab_M = head.vocab_M.long()
    rows_MD, output_DV = output_VD[vocab_M].float(), output_VD.float().T
    with torch.inference_mode():
        for first in range(0, len(texts), _TEXTS):
            batch = batched(texts[first : first + _TEXTS], output_VD.device)
            starts_BC, is_start_BC = sampled_starts(batch.counts_BT, share, num_steps, generator)
            if not bool(is_start_BC.any()):
                continue
            states = batch.states_BTFD.float()
            row_B1 = torch.arange(len(states), device=states.device)[:, None]
            steps = chain_states(head, states, embeddings_VD[batch.ids_BT].float(), starts_BC, num_steps)
            for step, state in enumerate(steps):
                chosen = state[row_B1, starts_BC] if step == 0 else state
                p_logits = states[row_B1, starts_BC + step, -1][is_start_BC] @ output_DV
                q_logits = head.output_states(chosen[is_start_BC]) @ rows_MD.T
                sums[step] += torch.tensor(_compared(p_logits, q_logits, vocab_M), dtype=torch.float64)
    return [_report(step, sums[step]) for step in range(num_steps) if sums[step, 0]]


def _compared(p_logits_NV: Tensor, q_logits_NM: Tensor, vocab_M: Tensor) -> tuple[float, float, float, float]:
    overlaps = [
        float(torch.minimum((p_logits_NV / t).softmax(-1)[:, vocab_M], (q_logits_NM / t).softmax(-1)).sum()) for t in (1.0, 0.7)
    ]
    agreement = float((p_logits_NV.argmax(-1) == vocab_M[q_logits_NM.argmax(-1)]).sum())
    return len(p_logits_NV), overlaps[0], overlaps[1], agreement


def _report(step: int, sums: Tensor) -> DepthReport:
    count, overlap, overlap_07, agreement = sums.tolist()
    return DepthReport(step + 1, int(count), overlap / count, overlap_07 / count, agreement / count)
