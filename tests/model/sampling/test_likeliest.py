"""The likeliest tokens and the distributions of rows of logits: the library's beside numpy's and torch's."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.core.types import SamplingParams
from engine.native import distributions as native
from engine.sampling.argmax import RowArgMax, are_valid, argmax_rows
from engine.sampling.distributions import warped_probs
from tests.needs import needs_library

ODD = (float("-inf"), float("inf"), float("nan"), 0.0, -0.0)


@st.composite
def rows_of_logits(draw: st.DrawFn) -> torch.Tensor:
    """Return rows of few different numbers, so that the largest is often there twice, some of them none."""
    num_rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 70))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    rows = torch.randint(-4, 5, (num_rows, width), generator=generator).float() / draw(st.sampled_from([1.0, 3.0]))
    for value, row, place in draw(
        st.lists(st.tuples(st.sampled_from(ODD), st.integers(0, num_rows - 1), st.integers(0, width - 1)), max_size=4)
    ):
        rows[row, place] = value
    return rows


def by_numpy(rows: torch.Tensor) -> list[tuple[bool, int]]:
    """Return whether each row is sound and, if it is, its arg max."""
    tops = rows.numpy().max(-1)
    return [(math.isfinite(top), int(row.argmax()) if math.isfinite(top) else -1) for top, row in zip(tops, rows.numpy())]


def pairs(found: list[RowArgMax]) -> list[tuple[bool, int]]:
    return [(one.is_valid, one.token_id if one.is_valid else -1) for one in found]


@given(rows_of_logits())
def test_first_maximum_and_nan_are_found(rows):
    assert pairs(argmax_rows(rows)) == by_numpy(rows)


def last_of_equals(rows):
    reversed_ = native.likeliest(rows.flip(-1))
    return [(value, rows.shape[1] - 1 - token_id) for value, token_id in reversed_]


def blind_to_nan(rows):
    return native.likeliest(rows.nan_to_num(nan=-1e9, posinf=math.inf, neginf=-math.inf))


@needs_library
@pytest.mark.parametrize("mutant", [last_of_equals, blind_to_nan])
def test_comparison_detects_mutants(mutant, monkeypatch):
    cases = [torch.tensor([[1.0, 2.0, 2.0]]), torch.tensor([[1.0, math.nan, 0.0]])]
    assert all(pairs(argmax_rows(rows)) == by_numpy(rows) for rows in cases)
    assert not all(pairs([RowArgMax(*one) for one in mutant(rows)]) == by_numpy(rows) for rows in cases)


@needs_library
@given(st.integers(1, 70), st.floats(0.05, 4.0), st.integers(0, 2**20))
def test_the_library_s_distributions_are_softmax(width, temperature, seed):
    logits_NV = torch.randn(3, width, generator=torch.Generator().manual_seed(seed)) * 10.0
    logits_NV[0, : width // 2] = -math.inf
    expected_NV = (logits_NV.double() / temperature).softmax(-1)
    rows = [2, 0, 0, 1]
    probs_RV = native.probs(logits_NV, rows, [temperature] * 4)
    np.testing.assert_allclose(probs_RV.double(), expected_NV[rows], rtol=2e-4, atol=1e-7)
    np.testing.assert_allclose(probs_RV.double().sum(-1), 1.0, atol=1e-5)
    assert (probs_RV[1][: width // 2] == 0.0).all()


@needs_library
def test_row_distribution_has_equal_bits_beside_others():
    logits_NV = torch.randn(9, 5003, generator=torch.Generator().manual_seed(1)) * 5.0
    together_RV = native.probs(logits_NV, range(9), [0.7] * 9)
    assert all(torch.equal(native.probs(logits_NV[row : row + 1], [0], [0.7])[0], together_RV[row]) for row in range(9))


@needs_library
def test_invalid_row_is_reported_by_its_numbers():
    logits_NV = torch.tensor([[math.nan, 1.0, 2.0], [-math.inf] * 3])
    assert native.probs(logits_NV, [0, 1], [1.0, 1.0]).isnan().all()


@needs_library
def test_full_vocabulary_distribution_is_as_accurate():
    """Sums run over 3,072 vectors."""
    logits_NV = torch.randn(3, 49152, generator=torch.Generator().manual_seed(2)) * torch.tensor([[0.0], [3.0], [9.0]])
    probs_RV = native.probs(logits_NV, range(3), [1.0, 0.7, 1.3]).double()
    expected_NV = (logits_NV.double() / torch.tensor([[1.0], [0.7], [1.3]])).softmax(-1)
    assert (probs_RV - expected_NV).abs().sum(-1).max() < 1e-5
    np.testing.assert_allclose(probs_RV.sum(-1), 1.0, atol=1e-5)


@pytest.fixture
def _by_torch(monkeypatch):
    monkeypatch.setattr(native, "can_read", lambda logits_NV: False)


@pytest.mark.usefixtures("_by_torch")
@given(rows_of_logits())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_torch_finds_the_same(rows):
    assert pairs(argmax_rows(rows)) == by_numpy(rows)
    assert are_valid(rows) == [is_valid for is_valid, _ in by_numpy(rows)]


SAMPLINGS = [SamplingParams(temperature=0.7), SamplingParams(temperature=1.0, top_k=3), SamplingParams(temperature=2.0)]


def is_of_rows(probs_of) -> bool:
    logits_NV = torch.randn(5, 23, generator=torch.Generator().manual_seed(3)) * 4.0
    return torch.allclose(probs_of(logits_NV, SAMPLINGS, [4, 0, 2]), warped_probs(logits_NV[[4, 0, 2]], SAMPLINGS), atol=1e-6)


def test_distributions_of_some_rows_are_theirs():
    assert is_of_rows(warped_probs)
    assert not is_of_rows(lambda logits_NV, sampling, rows: warped_probs(logits_NV, sampling, range(len(rows))))


@pytest.mark.usefixtures("_by_torch")
def test_by_torch_too():
    test_distributions_of_some_rows_are_theirs()
