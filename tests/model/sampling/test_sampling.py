"""Processed distributions equal those of transformers' logits warpers."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from engine.core.types import SamplingParams
from engine.native import distributions as native
from engine.sampling import distributions as sampling
from tests.model.distributions import probs_of
from tests.strategies import sampling_params


def warped(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Return transformers' scores, float64, -inf where a token is cut off."""
    warpers = [TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(MinPLogitsWarper(params.min_p))
    scores = logits_V[None].double()
    for warper in warpers:
        scores = warper(torch.zeros((1, 0), dtype=torch.int64), scores)
    return scores[0]


def expected_probs(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Return transformers' distribution with all ties of its least kept token. A sort's order decides which ties it keeps."""
    is_kept_V = warped(logits_V, params) > float("-inf")
    is_kept_V |= logits_V >= logits_V[is_kept_V].min()
    return torch.softmax((logits_V.double() / params.temperature).masked_fill(~is_kept_V, float("-inf")), -1)


def is_on_an_edge(logits_V: Tensor, params: SamplingParams) -> bool:
    """Whether rounding in float32 may decide what top-p or min-p keeps."""
    nearby = [
        replace(params, top_p=min(1.0, params.top_p * (1 + shift)), min_p=params.min_p * (1 - shift)) for shift in (-1e-4, 1e-4)
    ]
    probs = [expected_probs(logits_V, one) > 0.0 for one in nearby]
    return not torch.equal(*probs)


def check(probs_of, logits_NV: Tensor, params: list[SamplingParams]) -> None:
    probs_NV = probs_of(logits_NV, params)
    assert probs_NV.dtype == torch.float32
    for probs_V, logits_V, one in zip(probs_NV, logits_NV, params, strict=True):
        if not is_on_an_edge(logits_V, one):
            assert torch.allclose(probs_V.double(), expected_probs(logits_V, one), atol=2e-6)
        assert torch.allclose(probs_V.double().sum(), torch.tensor(1.0, dtype=torch.float64), atol=1e-5)


def probs_by_torch(logits_NV: Tensor, params: list[SamplingParams]) -> Tensor:
    """Return the distributions that torch computes on a device without the native library."""
    with patch.object(native, "can_read", lambda _: False):
        return probs_of(logits_NV, params)


both_ways = pytest.mark.parametrize("computed", [probs_of, probs_by_torch], ids=["library", "torch"])


def random_logits(seed: int, num_rows: int, vocab_size: int, scale: float, has_ties: bool) -> Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
    return (logits * 2).round() / 2 if has_ties else logits


@both_ways
@given(
    st.lists(sampling_params(), min_size=1, max_size=5),
    st.integers(0, 2**31),
    st.sampled_from([2, 7, 61, 1003]),
    st.sampled_from([0.1, 1.0, 4.0]),
    st.booleans(),
    st.sampled_from([(2,), (8, 40), (40,), (64, 1024)]),
)
def test_distributions_are_transformers_distributions(computed, params, seed, vocab_size, scale, has_ties, first_candidates):
    """Rows with unlike parameters together; vocabularies below and above the number of candidates looked at first."""
    with patch.object(sampling, "_FIRST_CANDIDATES", first_candidates):
        check(computed, random_logits(seed, len(params), vocab_size, scale, has_ties), params)


@both_ways
@given(
    st.lists(sampling_params(), min_size=2, max_size=5),
    st.integers(0, 2**31),
    st.booleans(),
    st.sampled_from([(2,), (2, 8), (64, 1024)]),
)
def test_distribution_is_independent_of_batch_mates(computed, params, seed, has_ties, first_candidates):
    """The bug: which tokens tied at the edge were kept depended on the number of candidates of a batch mate."""
    logits_NV = random_logits(seed, len(params), 61, 1.0, has_ties)
    with patch.object(sampling, "_FIRST_CANDIDATES", first_candidates):
        together = computed(logits_NV, params)
        alone = [computed(logits_NV[row : row + 1], [one])[0] for row, one in enumerate(params)]
    assert all(torch.equal(one > 0, other > 0) for one, other in zip(together, alone, strict=True))
    assert torch.allclose(together, torch.stack(alone), atol=1e-7)


def typical_probs(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Return transformers' distribution with typical-p after the other truncations."""
    probs_V = expected_probs(logits_V, params)
    scores = TypicalLogitsWarper(params.typical_p)(torch.zeros((1, 0), dtype=torch.int64), probs_V.log()[None])
    return torch.softmax(scores[0], -1)


def typical_hangs_on_rounding(logits_V: Tensor, params: SamplingParams) -> bool:
    """Whether float32 may see another mass reached, or another order of two tokens about as odd."""
    nearby = [replace(params, typical_p=params.typical_p * (1 + shift)) for shift in (-1e-4, 1e-4)]
    if not torch.equal(*[typical_probs(logits_V, one) > 0.0 for one in nearby]):
        return True
    probs_V = expected_probs(logits_V, params)
    oddity_V = (probs_V.log() + torch.special.entr(probs_V).sum()).abs()
    is_kept_V = typical_probs(logits_V, params) > 0.0
    return bool((oddity_V[~is_kept_V] < oddity_V[is_kept_V].max() + 1e-4).any())


def check_typical(probs_of, logits_NV: Tensor, params: list[SamplingParams]) -> int:
    """Compare rows; return how many could be compared."""
    num_compared = 0
    for probs_V, logits_V, one in zip(probs_of(logits_NV, params), logits_NV, params, strict=True):
        if not is_on_an_edge(logits_V, one) and not typical_hangs_on_rounding(logits_V, one):
            num_compared += 1
            assert torch.allclose(probs_V.double(), typical_probs(logits_V, one), atol=4e-6)
    return num_compared


@given(
    st.lists(st.tuples(sampling_params(), st.floats(0.05, 0.999)), min_size=1, max_size=5),
    st.integers(0, 2**31),
    st.sampled_from([2, 7, 61]),
    st.sampled_from([0.1, 1.0, 4.0]),
)
def test_typical_distributions_are_transformers_distributions(drawn, seed, vocab_size, scale):
    params = [replace(one, typical_p=mass) for one, mass in drawn]
    check_typical(probs_of, random_logits(seed, len(params), vocab_size, scale, False), params)


def typical_before_the_others(logits_NV, params):
    plain = [replace(one, top_p=1.0, top_k=0, min_p=0.0) for one in params]
    typical_NV = probs_of(logits_NV, plain).log()
    return probs_of(typical_NV, [replace(one, typical_p=1.0, temperature=1.0) for one in params])


def the_likeliest_first(logits_NV, params):
    return probs_of(logits_NV, [replace(one, typical_p=1.0, top_p=one.typical_p * one.top_p) for one in params])


def one_token_too_few(logits_NV, params):
    probs_NV = probs_of(logits_NV, params)
    return _renormalised(probs_NV, probs_NV > torch.where(probs_NV > 0, probs_NV, 2.0).amin(-1, keepdim=True))


@pytest.mark.parametrize("mutant", [typical_before_the_others, the_likeliest_first, one_token_too_few])
def test_typical_distributions_detect_mutants(mutant):
    logits_NV = random_logits(5, 12, 61, 2.0, False)
    params = [SamplingParams(temperature=0.6 + 0.1 * row, typical_p=0.3 + 0.05 * row, top_k=9) for row in range(12)]
    assert check_typical(probs_of, logits_NV, params) > 6
    with pytest.raises(AssertionError):
        check_typical(mutant, logits_NV, params)


@both_ways
def test_masked_tokens_stay_masked(computed):
    logits = torch.tensor([[1.0, float("-inf"), 0.0, -1.0]])
    for params in (SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.99), SamplingParams(min_p=0.01)):
        assert computed(logits, [params])[0, 1] == 0.0


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-45])
def test_tiny_temperatures_give_a_point_mass(temperature):
    """The bug: logits over such a temperature overflow float32. The distribution became NaN and failed the whole step."""
    probs = probs_of(torch.tensor([[300.0, 299.0, -500.0]]), [SamplingParams(temperature=temperature)])
    assert probs.tolist() == [[1.0, 0.0, 0.0]]


@both_ways
@pytest.mark.parametrize("params", [SamplingParams(top_k=1), SamplingParams(top_p=1e-9), SamplingParams(min_p=1.0)])
def test_the_likeliest_token_is_always_kept(computed, params):
    assert computed(torch.tensor([[0.0, 2.0, 1.0]]), [params]).tolist() == [[0.0, 1.0, 0.0]]


def _renormalised(probs_NV: Tensor, is_kept_NV: Tensor) -> Tensor:
    kept = torch.where(is_kept_NV, probs_NV, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_one_too_few(logits_NV, params):
    probs_NV = probs_of(logits_NV, params)
    least_N1 = torch.where(probs_NV > 0, probs_NV, 2.0).amin(-1, keepdim=True)
    is_cut_N1 = torch.tensor([[one.top_p < 1.0] for one in params]) & (least_N1 < 1.0)
    return _renormalised(probs_NV, (probs_NV > least_N1) | ~is_cut_N1)


def top_p_one_too_many(logits_NV, params):
    probs_NV = probs_of(logits_NV, params)
    whole_NV = probs_of(logits_NV, [replace(one, top_p=1.0) for one in params])
    next_N1 = torch.where(probs_NV == 0, whole_NV, 0.0).amax(-1, keepdim=True)
    return _renormalised(whole_NV, whole_NV >= next_N1.clamp(min=1e-30))


def truncated_before_the_temperature(logits_NV, params):
    support_NV = probs_of(logits_NV, [replace(one, temperature=1.0) for one in params]) > 0
    plain = [SamplingParams(temperature=one.temperature) for one in params]
    return _renormalised(probs_of(logits_NV, plain), support_NV)


def top_p_before_top_k(logits_NV, params):
    plain = [SamplingParams(temperature=one.temperature) for one in params]
    support_NV = probs_of(logits_NV, [replace(one, top_k=0) for one in params]) > 0
    support_NV &= probs_of(logits_NV, [replace(one, top_p=1.0) for one in params]) > 0
    return _renormalised(probs_of(logits_NV, plain), support_NV)


def rows_mixed_up(logits_NV, params):
    return probs_of(logits_NV, params[::-1])


def candidates_are_enough(logits_NV, params):
    edges_of = sampling._edges

    def never_lower(*arguments):
        edges = edges_of(*arguments)
        return edges._replace(may_be_lower_N=torch.zeros_like(edges.may_be_lower_N))

    with patch.object(sampling, "_edges", never_lower), patch.object(sampling, "_FIRST_CANDIDATES", (4,)):
        return probs_by_torch(logits_NV, params)


def ties_broken(logits_NV, params):
    """Exactly k tokens are kept, whichever a sort puts first."""
    probs_NV = probs_of(logits_NV, params)
    for row, one in enumerate(params):
        if one.top_k:
            dropped = torch.argsort(probs_NV[row], descending=True)[one.top_k :]
            probs_NV[row, dropped] = 0.0
    return _renormalised(probs_NV, probs_NV > 0)


def check_all(probs_of) -> None:
    """Check rows that mix everything, with ties and without, and rows without top-k."""
    params = [
        SamplingParams(temperature=0.5, top_p=0.8),
        SamplingParams(temperature=1.5, top_k=5, top_p=0.7),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=2.0, top_k=3),
    ]
    for has_ties in (True, False):
        check(probs_of, random_logits(1, len(params), 61, 1.0, has_ties), params)
        check(probs_of, random_logits(2, 2, 61, 1.0, has_ties), params[::2])


@pytest.mark.parametrize(
    "mutant",
    [
        top_p_one_too_few,
        top_p_one_too_many,
        truncated_before_the_temperature,
        top_p_before_top_k,
        rows_mixed_up,
        candidates_are_enough,
        ties_broken,
    ],
)
def test_distributions_detect_mutants(mutant):
    check_all(probs_of)
    check_all(probs_by_torch)
    with pytest.raises(AssertionError):
        check_all(mutant)
