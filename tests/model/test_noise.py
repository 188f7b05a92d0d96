"""Tensor randomness is the integer kind's, number for number, and its Gumbel noise draws from a law."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import noise
from engine.keys import Stream, stream_key, uniform
from engine.noise import gumbels, uniforms
from tests.chi_square import FAILS_ABOVE, PASSES_BELOW, z_of_counts
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


def test_scalar_draws_kill_a_shift_that_copies_the_sign(monkeypatch):
    monkeypatch.setattr(noise, "_shifted", lambda bits, count: bits >> count)
    key = stream_key(1, 2, Stream.TOKEN)
    assert uniforms([key], 40).tolist() != [[uniform(key, index) for index in range(40)]]


def test_golden_values():
    keys = [stream_key(1, 2, Stream.TOKEN), stream_key(2**63 - 1, 8000, Stream.EXTRA)]
    assert uniforms(keys, 2).tolist() == [[0.7401760231351763, 0.06269574375830789], [0.6145586180820041, 0.42168849338013403]]


@given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), max_size=8), st.integers(1, 30))
def test_noise_asked_for_again_is_the_same(batches, vocab_size):
    """Rows are kept for a while, and a row twice in a batch is made once: nobody may see that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "_MAX_KEPT", 60)
        for keys in batches:
            fresh = -torch.log(-torch.log(uniforms(keys, vocab_size)))
            assert torch.equal(gumbels(keys, vocab_size), fresh)
            gumbels(keys, vocab_size).zero_()


def test_noise_kills_rows_kept_without_their_width(monkeypatch):
    monkeypatch.setattr(noise._RecentRows, "of", lambda self, keys, vocab_size, device: [uniforms([0], 3)[0]] * len(keys))
    with pytest.raises(AssertionError):
        test_noise_asked_for_again_is_the_same()


LAW = {0: 0.5, 1: 0.3, 2: 0.15, 3: 0.05}


def arg_max_z(noise_of) -> float:
    logits = torch.tensor(list(LAW.values()), dtype=torch.float64).log()
    choices = (logits + noise_of([stream_key(seed, 9, Stream.TOKEN) for seed in range(20000)], len(LAW))).argmax(-1)
    return z_of_counts(Counter(choices.tolist()), LAW)


def test_arg_max_of_log_law_plus_noise_is_a_draw_from_the_law():
    assert arg_max_z(gumbels) < PASSES_BELOW


@pytest.mark.parametrize(
    "mutant", [uniforms, lambda keys, count: -gumbels(keys, count), lambda keys, count: 0.8 * gumbels(keys, count)]
)
def test_gumbel_law_kills(mutant):
    assert arg_max_z(mutant) > FAILS_ABOVE
