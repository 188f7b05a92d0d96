"""Logits to processed distributions: a request's edits, temperature, top-k, top-p, min-p and typical-p, row by row.

The order is transformers' (edits, temperature, top-k, top-p, min-p, typical-p), so that distributions equal `generate`'s. Tokens
of equal probability are kept or dropped together, so that a distribution never depends on the order in which a sort leaves ties.
Shape key: N rows, R selected rows, V vocabulary, C candidates.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.core.sampling_limits import MIN_TEMPERATURE
from engine.core.step_plan import SamplingContext
from engine.core.types import SamplingParams
from engine.native import distributions as native
from engine.native.distributions import KeptTokens
from engine.sampling.logits_processors import edited_logits
from engine.utils.host_transfer import column, integers

_FIRST_CANDIDATES = (64, 1024)  # the nucleus is searched among so many likeliest tokens before all are sorted


def processed_probs(logits_NV: Float[Tensor, "N V"], contexts: Sequence[SamplingContext]) -> Float[Tensor, "N V"]:
    """Return each row's distribution under its sampling parameters, float32 rows that sum to 1. Temperature must not be 0."""
    return warped_probs(edited_logits(logits_NV, contexts), [context.sampling for context in contexts])


def warped_probs(
    logits_NV: Float[Tensor, "N V"], sampling: Sequence[SamplingParams], rows: Sequence[int] | None = None
) -> Float[Tensor, "R V"]:
    """Return the distributions of edited logits, of all rows or some, after temperature and truncation."""
    temperatures = [max(params.temperature, MIN_TEMPERATURE) for params in sampling]
    if native.can_read(logits_NV):
        chosen = range(len(logits_NV)) if rows is None else rows
        probs_RV = native.probs(logits_NV, chosen, temperatures, [truncation(params) for params in sampling])
    else:
        probs_RV = _tempered(logits_NV, temperatures, rows)
        _replace(probs_RV, sampling, _truncates, _truncated)
    _replace(probs_RV, sampling, is_typical, _typical)
    return probs_RV


def _replace(
    probs_RV: Tensor,
    sampling: Sequence[SamplingParams],
    applies: Callable[[SamplingParams], bool],
    truncated: Callable[[Tensor, Sequence[SamplingParams]], Tensor],
) -> None:
    """Truncate the rows to which a truncation applies, in place."""
    if affected := [row for row, params in enumerate(sampling) if applies(params)]:
        index = integers(affected, probs_RV.device)
        probs_RV[index] = truncated(probs_RV[index], [sampling[row] for row in affected])


def _tempered(logits_NV: Tensor, temperatures: Sequence[float], rows: Sequence[int] | None) -> Float[Tensor, "R V"]:
    """Return softmax(logits / temperature) of all rows or some."""
    logits_RV = logits_NV if rows is None else logits_NV[integers(rows, logits_NV.device)]
    if any(temperature != 1.0 for temperature in temperatures):
        logits_RV = logits_RV / column(temperatures, logits_RV)
    return torch.softmax(logits_RV, dim=-1)


def ranking_params(sampling: SamplingParams) -> SamplingParams:
    """Return the parameters of the distribution that ranks draft tokens: at temperature 0 those of temperature 1."""
    return _UNSHARPENED if sampling.is_greedy else sampling


_UNSHARPENED = SamplingParams()


def ranking_temperature(sampling: SamplingParams) -> float:
    """Return the temperature of that distribution, at least MIN_TEMPERATURE."""
    return max(ranking_params(sampling).temperature, MIN_TEMPERATURE)


def walk_temperature(params: SamplingParams) -> float:
    """Return the temperature by which the native library follows a tree, 0 for a greedy row."""
    return 0.0 if params.is_greedy else max(params.temperature, MIN_TEMPERATURE)


def truncation(params: SamplingParams) -> KeptTokens:
    """Return top-k, top-p and min-p for the native library."""
    return KeptTokens(params.top_k, params.top_p, params.min_p)


def truncates(params: SamplingParams) -> bool:
    """Return whether the parameters truncate the distribution beyond temperature."""
    return _truncates(params) or is_typical(params)


def _truncates(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def is_typical(params: SamplingParams) -> bool:
    """Return whether the parameters truncate by typical-p."""
    return params.typical_p < 1.0


class Truncations(NamedTuple):
    """Top-k (the vocabulary's size for all), top-p and min-p of rows, on their device."""

    top_k_N1: Int[Tensor, "N 1"]
    top_p_N1: Float[Tensor, "N 1"]
    min_p_N1: Float[Tensor, "N 1"]


def _truncated(probs_NV: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    """Keep the tokens that top-k, top-p and min-p allow and renormalise."""
    vocab_size = probs_NV.shape[-1]
    top_ks = [min(params.top_k or vocab_size, vocab_size) for params in sampling]
    limits = Truncations(
        integers(top_ks, probs_NV.device)[:, None],
        column([params.top_p for params in sampling], probs_NV),
        column([params.min_p for params in sampling], probs_NV),
    )
    most_k = max((top_k for top_k in top_ks if top_k < vocab_size), default=0)
    for num_candidates in (*(first for first in _FIRST_CANDIDATES if most_k <= first < vocab_size), vocab_size):
        edges = _edges(probs_NV, limits, num_candidates)
        if num_candidates == vocab_size or not bool(edges.may_be_lower_N.any()):
            break
    return _kept_above(probs_NV, edges.least_N1)


def truncated_among(probs_NV: Float[Tensor, "N V"], limits: Truncations, num_candidates: int) -> Float[Tensor, "N V"]:
    """Return truncated rows without a wait for the device. What a row keeps is among so many of its likeliest tokens."""
    return _kept_above(probs_NV, _edges(probs_NV, limits, min(num_candidates, probs_NV.shape[-1])).least_N1)


def _kept_above(probs_NV: Tensor, least_N1: Tensor) -> Tensor:
    kept_NV = torch.where(probs_NV >= least_N1, probs_NV, 0.0)
    return kept_NV / kept_NV.sum(-1, keepdim=True)


class _Edges(NamedTuple):
    """The least probability each row keeps, and whether it may be lower among candidates that were not examined."""

    least_N1: Tensor
    may_be_lower_N: Tensor


def _edges(probs_NV: Tensor, limits: Truncations, num_candidates: int) -> _Edges:
    """Find each row's edge among its likeliest candidates.

    A row whose top-k is the whole vocabulary is normalised by its whole mass, so its edge is right with any number of candidates.
    """
    values_NC = probs_NV.topk(num_candidates, dim=-1).values
    is_allowed_NC = values_NC >= values_NC.gather(-1, limits.top_k_N1.clamp(max=num_candidates) - 1)
    allowed_NC = torch.where(is_allowed_NC, values_NC, 0.0)
    is_uncut_N1 = limits.top_k_N1 == probs_NV.shape[-1]
    before_NC = allowed_NC.cumsum(-1)  # its last column is the mass: a sum could round otherwise with other numbers of candidates
    mass_N1 = torch.where(is_uncut_N1, probs_NV.sum(-1, keepdim=True), before_NC[:, -1:])
    before_NC = (before_NC - allowed_NC) / mass_N1
    is_nucleus_NC = (before_NC < limits.top_p_N1) | (limits.top_p_N1 >= 1.0)
    is_kept_NC = is_allowed_NC & is_nucleus_NC & (values_NC >= limits.min_p_N1 * values_NC[:, :1])
    least_N1 = values_NC.gather(-1, is_kept_NC.sum(-1, keepdim=True).clamp(min=1) - 1)
    return _Edges(least_N1, torch.where(is_uncut_N1[:, 0], is_kept_NC[:, -1], is_allowed_NC[:, -1]))


def _typical(probs_NV: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    """Keep the tokens whose surprisal is nearest to the entropy until they have the mass (arXiv 2202.00666), and renormalise."""
    masses_N1 = column([params.typical_p for params in sampling], probs_NV)
    logs_NV = probs_NV.log()
    entropy_N1 = -(probs_NV * logs_NV).nansum(-1, keepdim=True)
    distance_NV = (logs_NV + entropy_N1).abs()  # infinite for an impossible token
    sorted_NV, order_NV = distance_NV.sort(-1)
    num_short_N1 = (probs_NV.gather(-1, order_NV).cumsum(-1) < masses_N1).sum(-1, keepdim=True)
    most_N1 = sorted_NV.gather(-1, num_short_N1.clamp(max=probs_NV.shape[-1] - 1))
    kept_NV = torch.where(distance_NV <= most_N1, probs_NV, 0.0)
    return kept_NV / kept_NV.sum(-1, keepdim=True)
