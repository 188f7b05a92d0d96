"""The audit's tests keep their error level, have the power they claim, and transform any draws into uniform numbers."""

import math

import pytest
import torch

from engine.audit.chi_square import ChiSquare, combined_test, likelihood_ratio_test, pooled_cells, survival
from engine.audit.examine import _summary
from engine.audit.outcomes import Tally, greedy_gaps, support_of, tally_gaps, tie_tolerance
from engine.audit.pit import NUM_BINS, bin_counts, pit_values, uniformity_test
from engine.audit.reference import Reference, penalised, warped
from engine.core.rng_keys import uniform
from engine.core.types import SamplingParams
from engine.sampling.distributions import warped_probs
from engine.sampling.noise import uniforms
from tests.model.tiny import own_logits, own_module

PROBS = torch.softmax(torch.linspace(3.0, -6.0, 40, dtype=torch.float64), 0)


def drawn(probs_V, number, key):
    """Return draws from a distribution by its inverse distribution function."""
    points = uniforms([key], number)[0] * probs_V.sum()
    return torch.searchsorted(probs_V.cumsum(-1), points, right=True).clamp(max=len(probs_V) - 1).tolist()


def sample_of(probs_V, number, key):
    counts = torch.bincount(torch.tensor(drawn(probs_V, number, key)), minlength=len(PROBS))
    return likelihood_ratio_test(counts.tolist(), (PROBS * number).tolist())


@pytest.mark.parametrize(
    ("statistic", "freedom", "p"), [(3.841459, 1, 0.05), (18.307038, 10, 0.05), (43.820196, 19, 0.001), (0.0, 3, 1.0)]
)
def test_p_values_are_those_of_the_tables(statistic, freedom, p):
    assert survival(statistic, freedom) == pytest.approx(p, rel=1e-5)


def test_false_alarms_are_as_rare_as_promised():
    p_values = [sample_of(PROBS, 400, key).p_value for key in range(3000)]
    for level in (0.1, 0.01):
        expected = 3000 * level
        assert abs(sum(p < level for p in p_values) - expected) < 4 * math.sqrt(expected)


def test_stated_detection_power_is_reached():
    """A shift by the detectable distance is found about nine times in ten; half the distance much less often."""
    level, number = 1e-3, 400
    distance = sample_of(PROBS, number, 0).detectable(level)

    def found(share):
        moved = PROBS * torch.where(torch.arange(40) < 4, 1.0 - share / PROBS[:4].sum(), 1.0 + share / PROBS[4:].sum())
        return sum(sample_of(moved, number, 10_000 + key).p_value < level for key in range(200)) / 200

    assert found(distance) > 0.85
    assert found(distance / 3) < 0.4


def test_small_cells_are_pooled_without_loss():
    cells = pooled_cells([1, 2, 50, 3, 44], [2.0, 3.0, 50.0, 4.0, 41.0])
    assert cells == [(50, 50.0), (50, 50.0)] or sum(o for o, _ in cells) == 100
    assert all(expected >= 10 for _, expected in cells)
    assert likelihood_ratio_test([7], [7.0]) == ChiSquare(0.0, 0, 7)
    assert likelihood_ratio_test([], []).p_value == 1.0
    assert ChiSquare(0.0, 0, 7).detectable(0.01) == 1.0


def test_tests_add_up():
    one, two = ChiSquare(3.0, 2, 10), ChiSquare(5.0, 4, 20)
    assert combined_test([one, two]) == ChiSquare(8.0, 6, 30)


def transforms(order):
    """Return the transform of draws from many distributions, each with its tokens in another order."""
    probs_NV = torch.stack([PROBS[torch.randperm(40, generator=torch.Generator().manual_seed(i))] for i in range(4000)])
    ids = [drawn(probs_V, 1, key)[0] for key, probs_V in enumerate(probs_NV)]
    return pit_values(order(probs_NV), ids, [uniform(5, i) for i in range(4000)])


def test_draws_of_any_distributions_become_uniform():
    assert uniformity_test(bin_counts(transforms(lambda probs: probs))).p_value > 1e-3


@pytest.mark.parametrize("power", [0.8, 1.25])
def test_flat_or_peaked_distribution_is_detected(power):
    def other(probs_NV):
        return probs_NV**power / (probs_NV**power).sum(-1, keepdim=True)

    assert uniformity_test(bin_counts(transforms(other))).p_value < 1e-6


def test_transform_is_inside_the_tokens_part():
    probs = torch.tensor([[0.2, 0.5, 0.3]] * 3, dtype=torch.float64)
    assert pit_values(probs, [1, 2, 0], [0.5, 0.5, 0.5]) == pytest.approx([0.25, 0.65, 0.9])
    assert pit_values(torch.full((2, 2), 0.5), [0, 1], [0.5, 0.5]) == pytest.approx([0.25, 0.75])  # ties by token id
    assert len(bin_counts([0.0, 1.0])) == NUM_BINS


def test_near_ties_are_separate_from_mistakes():
    logits = torch.tensor([[1.0, 3.0, 2.9995], [5.0, 1.0, 2.0]])
    gaps = greedy_gaps(logits, [2, 1])
    assert tally_gaps(gaps, tie_tolerance("float32")) == Tally(0, 1, 1, 4.0)
    assert tally_gaps(gaps, 5.0).num_mismatch == 0
    assert tally_gaps([float("nan"), 0.0], 1.0).counts() == {"match": 1, "near_tie": 0, "mismatch": 1}


@pytest.mark.parametrize(
    ("sampling", "edge", "outside"),
    [
        (SamplingParams(top_k=2), 2, 3),  # token 2 nearly ties with token 1
        (SamplingParams(top_p=0.80005), 3, 4),  # the nucleus ends within rounding of its bound
        (SamplingParams(min_p=0.20001), 3, 4),
    ],
)
def test_distribution_edge_is_as_wide_as_rounding(sampling, edge, outside):
    probs = torch.tensor([[0.5, 0.15, 0.1499999, 0.1, 0.09, 0.0100001]], dtype=torch.float64)
    support = support_of(lambda params: warped(probs.log(), params), probs.log(), sampling, 1e-3)
    assert support.tally([0]) == Tally(1)
    assert support.tally([edge]).num_mismatch == 0
    assert support.tally([outside]) == Tally(0, 0, 1)
    noise = torch.zeros(1, 6, dtype=torch.float64)
    noise[0, edge] = 100.0
    assert support.coupled_gaps(noise, [0]) == [0.0], "a token at the edge need not be chosen"
    assert support.coupled_gaps(noise, [edge])[0] < 0.0, "but may be"


@pytest.mark.parametrize(("temperature", "tolerance"), [(0.001, 0.5), (1e-10, 1e-3)])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.95}])
def test_near_tie_of_sharp_distribution_is_possible(temperature, tolerance, truncation):
    """The bug: float32 probabilities underflow to 0 where a logit is slightly below the top. A sound engine was called lossy."""
    logits_NV = torch.tensor([[20.0, 20.0 - tolerance / 2, 20.0 - 2 * tolerance, 0.0]])
    sampling = SamplingParams(temperature, **truncation)
    support = support_of(lambda params: warped_probs(logits_NV, [params]), logits_NV, sampling, tolerance)
    assert support.tally([0]) == Tally(1)
    assert support.tally([1]) == Tally(0, 1)
    assert support.tally([2]) == Tally(0, 0, 1)
    assert not support.is_testable
    noise_NV = torch.zeros(1, 4, dtype=torch.float64)
    assert support.coupled_gaps(noise_NV, [1])[0] <= tolerance / temperature < support.coupled_gaps(noise_NV, [2])[0]


def test_degenerate_draws_do_not_shrink_the_error():
    informative, fixed = ChiSquare(3.0, 2, 100), ChiSquare(0.0, 0, 100)
    together_, worst = _summary("first token", [informative, *[fixed] * 9])
    assert (together_.test, together_.num_laws) == (informative, 1)
    assert combined_test([informative, *[fixed] * 9]).detectable(1e-4) < together_.test.detectable(1e-4)
    assert worst.test == informative


def test_last_nucleus_token_is_certain():
    """The bug: it was taken for one at the edge, so that an engine that never chose it went unnoticed."""
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64)
    support = support_of(lambda params: warped(probs.log(), params), probs.log(), SamplingParams(top_p=0.9), 1e-3)
    assert support.is_sure_NV.tolist() == support.is_perhaps_NV.tolist() == [[True, True, True, False]]


def test_reference_is_transformers_forward_per_sequence():
    texts = [(5, 9, 33, 4), (7, 8, 3), (3, 4, 5, 6), (11, 12, 13)]
    found = Reference(own_module("llama")).logits(texts, 2)
    expected = own_logits("llama", texts)
    for index, text in enumerate(texts):
        assert torch.allclose(found[index].float(), expected[index, len(text) - 2 : len(text)], atol=1e-4)


def test_penalties_count_tokens_before_each_row():
    logits = torch.tensor([[2.0, -2.0, 1.0, 1.0]] * 3, dtype=torch.float64)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    rows = penalised(logits, [0, 1], [2, 2], params)
    expected = [[1.0, -4.0, 1.0, 1.0], [1.0, -4.0, 0.5 - 0.75, 1.0], [1.0, -4.0, 0.5 - 1.0, 1.0]]
    assert torch.allclose(rows, torch.tensor(expected, dtype=torch.float64))
