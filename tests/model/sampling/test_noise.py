"""Tensor randomness equals the integer kind, number for number, and its Gumbel noise draws from a distribution."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.core.rng_keys import Stream, stream_key, uniform
from engine.native import noise as native
from engine.sampling import noise
from engine.sampling.noise import gumbels, uniforms
from tests.chi_square import FAILS_ABOVE, PASSES_BELOW, z_of_counts
from tests.needs import needs_library
from tests.splitmix import key_of_first_bits

key_lists = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4)


@given(key_lists, st.integers(1, 40))
def test_uniforms_are_the_scalar_draws(keys, count):
    assert uniforms(keys, count).tolist() == [[uniform(key, index) for index in range(count)] for key in keys]


@given(key_lists, st.integers(1, 20), st.integers(0, 20))
def test_a_row_depends_on_its_key_alone(keys, count, more):
    together = uniforms(keys, count + more)[:, :count]
    assert all(torch.equal(uniforms([key], count)[0], row) for key, row in zip(keys, together, strict=True))


@pytest.mark.parametrize("bits", [0, 1, (1 << 64) - 1, 1 << 63, (1 << 63) - 1])
def test_gumbel_noise_is_finite_at_the_ends(bits):
    """The largest uniform once rounded to 1.0 and made a token of probability 0 the arg max."""
    key = key_of_first_bits(bits)
    assert uniforms([key], 1).item() == uniform(key, 0)
    assert torch.isfinite(gumbels([key], 1)).all()


def test_scalar_draws_detect_sign_copying_shift(monkeypatch):
    monkeypatch.setattr(noise, "_shifted", lambda bits, count: bits >> count)
    key = stream_key(1, 2, Stream.TOKEN)
    assert uniforms([key], 40).tolist() != [[uniform(key, index) for index in range(40)]]


def test_golden_values():
    keys = [stream_key(1, 2, Stream.TOKEN), stream_key(2**63 - 1, 8000, Stream.EXTRA)]
    assert uniforms(keys, 2).tolist() == [[0.7401760231351763, 0.06269574375830789], [0.6145586180820041, 0.42168849338013403]]


def _library_s_noise_is_torch_s(of_library):
    keys = [stream_key(seed, 3, Stream.TOKEN) for seed in range(4)]
    own = -torch.log(-torch.log(uniforms(keys, 9973)))
    ids = torch.tensor([0, 5, 7, 8, 9, 4000, 9972, 1, 1])
    return (
        torch.allclose(of_library(keys, 9973), own, rtol=0.0, atol=1e-14)
        and torch.equal(of_library(keys, 9973, ids), of_library(keys, 9973)[:, ids])
        and torch.equal(of_library(keys[:1], 5), of_library(keys, 9973)[:1, :5])
    )


@needs_library
def test_the_library_makes_the_same_noise():
    assert _library_s_noise_is_torch_s(native.gumbels)
    ends = [key_of_first_bits(bits) for bits in (0, 1, (1 << 64) - 1, 1 << 63)]
    assert torch.allclose(native.gumbels(ends, 1), -torch.log(-torch.log(uniforms(ends, 1))), rtol=1e-14)


@needs_library
@pytest.mark.parametrize(
    "mutant",
    [
        lambda keys, count, ids=None: native.gumbels(keys, count, ids).float().double(),
        lambda keys, count, ids=None: native.gumbels([key + 1 for key in keys], count, ids),
        lambda keys, count, ids=None: native.gumbels(keys, count, None if ids is None else ids.sort().values),
    ],
)
def test_comparison_detects_mutants(mutant):
    assert not _library_s_noise_is_torch_s(mutant)


@needs_library
def test_the_library_chooses_the_best_perturbed_token():
    """Flat and peaked distributions: most tokens are skipped without a logarithm, but none that could be best."""
    keys = [stream_key(seed, 3, Stream.TOKEN) for seed in range(400)]
    sharpness_N1 = torch.linspace(0.0, 6.0, 401)[:, None]
    probs_NV = torch.softmax(torch.randn(401, 977, generator=torch.Generator().manual_seed(0)) * sharpness_N1, -1)
    probs_NV[:, 100:300] = 0.0
    rows = list(range(400, 0, -1))
    best = (probs_NV[rows].log() - torch.log(-torch.log(uniforms(keys, 977)))).max(-1)
    found = native.choices(probs_NV, rows, keys)
    assert [token_id for _, token_id in found] == best.indices.tolist()
    assert torch.allclose(torch.tensor([score for score, _ in found], dtype=torch.float64), best.values, atol=1e-5)


@needs_library
def test_invalid_distribution_has_no_finite_score():
    probs_NV = torch.full((3, 11), 1 / 11)
    probs_NV[0, 3], probs_NV[1] = math.nan, 0.0
    probs_NV[2, 10] = math.inf
    scores = [score for score, _ in native.choices(probs_NV, range(3), [5, 6, 7])]
    assert [math.isfinite(score) for score in scores] == [False] * 3


@given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), max_size=8), st.integers(1, 30))
def test_repeated_noise_request_returns_equal_noise(batches, vocab_size):
    """Rows are cached for a while, and a row that occurs twice in a batch is made once. Results do not change."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "can_choose", lambda device: False)
        patch.setattr(noise, "_MAX_KEPT", 60)
        for keys in batches:
            fresh = -torch.log(-torch.log(uniforms(keys, vocab_size)))
            assert torch.equal(gumbels(keys, vocab_size), fresh)
            gumbels(keys, vocab_size).zero_()


def test_noise_detects_rows_cached_without_width(monkeypatch):
    monkeypatch.setattr(native, "can_choose", lambda device: False)
    monkeypatch.setattr(noise._NoiseCache, "of", lambda self, keys, vocab_size, device: [uniforms([0], 3)[0]] * len(keys))
    with pytest.raises(AssertionError):
        test_repeated_noise_request_returns_equal_noise()


PROBS = {0: 0.5, 1: 0.3, 2: 0.15, 3: 0.05}


def arg_max_z(noise_of) -> float:
    logits = torch.tensor(list(PROBS.values()), dtype=torch.float64).log()
    choices = (logits + noise_of([stream_key(seed, 9, Stream.TOKEN) for seed in range(20000)], len(PROBS))).argmax(-1)
    return z_of_counts(Counter(choices.tolist()), PROBS)


def test_noisy_log_argmax_draws_from_the_distribution():
    assert arg_max_z(gumbels) < PASSES_BELOW


@pytest.mark.parametrize(
    "mutant", [uniforms, lambda keys, count: -gumbels(keys, count), lambda keys, count: 0.8 * gumbels(keys, count)]
)
def test_gumbel_distribution_detects_mutants(mutant):
    assert arg_max_z(mutant) > FAILS_ABOVE


def ranked(logits_PM, temperatures, sharpness, keys, ids_M, most=9, vocab_size=400):
    """The library's ranking by torch: columns, best first, their noise, and the distribution."""
    probs_PM = torch.softmax(logits_PM / torch.tensor(temperatures)[:, None], -1)
    scores_PM, noise_PM = (
        probs_PM.double().log() * torch.tensor(sharpness)[:, None],
        torch.zeros(logits_PM.shape, dtype=torch.float64),
    )
    if keys is not None:
        noise_PM = -torch.log(-torch.log(uniforms(keys, vocab_size)))[:, ids_M]
    best = (scores_PM + noise_PM).topk(most, -1).indices
    return probs_PM, best, noise_PM.gather(-1, best)


@needs_library
@pytest.mark.parametrize("is_noisy", [False, True])
def test_the_library_ranks_the_best_tokens(is_noisy):
    generator = torch.Generator().manual_seed(0)
    logits_PM = torch.randn(6, 123, generator=generator) * 4.0
    logits_PM[0, 7], logits_PM[1] = -math.inf, -math.inf
    logits_PM[1, [100, 3]] = torch.tensor([1.0, 0.5])
    temperatures, sharpness = [1.0, 0.3, 0.7, 1.0, 2.0, 1.0], [1.0, 3.0, 2.5, 1.0, 0.4, 8.0]
    ids_M = torch.randperm(400, generator=generator)[:123]
    keys = [stream_key(seed, 3, Stream.TOKEN) for seed in range(6)] if is_noisy else None
    probs_PM, best, noise = ranked(logits_PM, temperatures, sharpness, keys, ids_M)
    found = native.rankings(logits_PM, temperatures, sharpness, 9, keys, ids_M)
    assert [len(one.token_ids) for one in found] == [9, 2, 9, 9, 9, 9]
    for row, one in enumerate(found):
        columns = best[row, : len(one.token_ids)]
        assert one.token_ids == tuple(ids_M[columns].tolist())
        assert one.noise == pytest.approx(noise[row, : len(one.token_ids)].tolist())
        assert one.odds == pytest.approx(probs_PM[row, columns].tolist(), rel=1e-5)
        assert one.collision == pytest.approx(float(probs_PM[row].square().sum()), rel=1e-5)


@needs_library
@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
@pytest.mark.parametrize("sharpness", [0.25, 1.0, 2.5, 8.0])
def test_no_draw_that_noise_lifts_is_missed(spread, sharpness):
    """Draws whose noise cannot lift them among the best are skipped. Flat distributions still examine nearly all."""
    logits_PM = torch.randn(8, 3000, generator=torch.Generator().manual_seed(3)) * spread
    keys = [stream_key(seed, 7, Stream.TOKEN) for seed in range(8)]
    for most in (1, 8, 64):
        _, best, _ = ranked(logits_PM, [1.0] * 8, [sharpness] * 8, keys, torch.arange(3000), most, 3000)
        found = native.rankings(logits_PM, [1.0] * 8, [sharpness] * 8, most, keys, None)
        assert [one.token_ids for one in found] == [tuple(row) for row in best.tolist()]


@needs_library
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_invalid_logits_have_no_best_tokens(broken):
    logits_PM = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    logits_PM[0, 33], logits_PM[1] = broken, -math.inf
    for keys in (None, [5, 6, 7]):
        found = native.rankings(logits_PM, [1.0] * 3, [2.0] * 3, 4, keys, None)
        assert [len(one.token_ids) for one in found] == [0, 0, 4]
        assert [math.isnan(one.collision) for one in found] == [True, True, False]


@needs_library
def test_of_equals_the_first_ranks_first():
    found = native.rankings(torch.zeros(1, 40), [1.0], [2.0], 11, None, None)
    assert found[0].token_ids == tuple(range(11))


@needs_library
@pytest.mark.parametrize("keys", [None, [3]])
def test_ties_rank_by_token_in_any_column(keys):
    """With cached text alone all scores are ties. Columns after the others may be any tokens."""
    ids_M = torch.tensor([7, 40, 3, 12, 0, 99, 1])
    found = native.rankings(torch.zeros(1, 7), [1.0], [2.0], 4, None, ids_M)
    assert found[0].token_ids == (0, 1, 3, 7)
    assert sum(found[0].odds) == pytest.approx(4 / 7)
    if keys is not None:
        by_noise = native.rankings(torch.zeros(1, 7), [1.0], [2.0], 4, keys, ids_M)[0]
        reversed_ = native.rankings(torch.zeros(1, 7), [1.0], [2.0], 4, keys, ids_M.flip(0).contiguous())[0]
        assert by_noise.token_ids == reversed_.token_ids
