"""The randomised probability integral transform (PIT): its values are uniform if draws have the expected distributions.

    u = F(y-) + U p(y)     U uniform and independent; F runs through the tokens in a fixed order

If y ~ p, then u is uniform for any p, and so independent of everything before it. Tokens of all prompts and positions can be
counted together. Tokens are ordered by falling target probability. A distribution that is too flat or too peaked then
concentrates u at one end. Shape key: N draws, V vocabulary. Sources: Rosenblatt 1952; Brockwell, "Universal residuals",
Statistics and Probability Letters 2007.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from engine.audit.chi_square import ChiSquare, likelihood_ratio_test

NUM_BINS = 20


def pit_values(probs_NV: Float[Tensor, "N V"], token_ids: Sequence[int], uniforms: Sequence[float]) -> list[float]:
    """Return the PIT value u of each draw."""
    ids_N1 = torch.tensor(list(token_ids), device=probs_NV.device)[:, None]
    own_N1 = probs_NV.gather(-1, ids_N1)
    index_V = torch.arange(probs_NV.shape[-1], device=probs_NV.device)
    is_before_NV = (probs_NV > own_N1) | ((probs_NV == own_N1) & (index_V < ids_N1))
    before_N = (probs_NV.double() * is_before_NV).sum(-1)
    inside_N = torch.tensor(list(uniforms), dtype=torch.float64, device=probs_NV.device) * own_N1[:, 0]
    return (before_N + inside_N).tolist()


def bin_counts(values: Sequence[float]) -> list[int]:
    """Return the number of values in each of NUM_BINS equal parts of [0, 1]."""
    counts = [0] * NUM_BINS
    for value in values:
        counts[min(int(value * NUM_BINS), NUM_BINS - 1)] += 1
    return counts


def uniformity_test(bins: Sequence[int]) -> ChiSquare:
    """Test observed counts by bin against equal expected counts."""
    return likelihood_ratio_test(bins, [sum(bins) / len(bins)] * len(bins))
