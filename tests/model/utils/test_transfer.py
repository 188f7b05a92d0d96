"""Numbers arrive unchanged, in one transfer, with the requested dtype."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.utils import host_transfer as transfer
from engine.utils.host_transfer import arrays_of, column, floats, integers, to_host
from tests.model.passes import CPU

numbers = st.lists(st.floats(allow_nan=False, width=32), max_size=5)


@given(st.lists(st.tuples(numbers, st.booleans()), min_size=1, max_size=4))
def test_numbers_of_several_tensors_come_back_apart(sent):
    tensors = [torch.tensor(values, dtype=torch.float64 if is_double else torch.float32) for values, is_double in sent]
    assert to_host(tensors) == [values for values, _ in sent]


def test_arrays_of_several_shapes_come_back_apart():
    """Integers and flags too, as float64."""
    sent = [
        torch.arange(6).view(1, 2, 3),
        torch.empty(0, 4),
        torch.tensor([True, False]),
        torch.tensor([[1 / 3]], dtype=torch.float64),
    ]
    found = arrays_of(sent)
    assert [one.shape for one in found] == [tuple(one.shape) for one in sent]
    assert [one.tolist() for one in found] == [one.double().tolist() for one in sent]


def test_a_cut_one_number_late_is_noticed(monkeypatch):
    monkeypatch.setattr(transfer, "len", lambda tensor: tensor.shape[0] + 1, raising=False)
    with pytest.raises(AssertionError):
        test_numbers_of_several_tensors_come_back_apart()


def test_float64_keeps_its_bits_beside_float32():
    third = torch.tensor([1 / 3], dtype=torch.float64)
    assert to_host([torch.ones(1), third]) == [[1.0], [1 / 3]]
    assert to_host([torch.ones(1), third.float()])[1] != [1 / 3]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), numbers)
def test_device_tensor_equals_the_torch_conversion(whole, values):
    assert torch.equal(integers(whole, CPU), torch.tensor(whole, dtype=torch.int64))
    assert torch.equal(floats(values, CPU), torch.tensor(values, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_column_has_dtype_of_the_scaled_rows(dtype):
    made = column([0.7, 1.3], torch.empty(2, 3, dtype=dtype))
    assert torch.equal(made, torch.tensor([[0.7], [1.3]], dtype=dtype))
    assert made.dtype == dtype
