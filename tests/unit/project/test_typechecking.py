"""The checks under which the suite runs the engine see a wrong shape: in one argument, between two, in a result, in a field."""

import random
from collections.abc import Callable

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float
from torch import Tensor

from engine.attention.packing import Group
from engine.kv_cache.kv_cache import KVCache
from engine.sampling.distributions import warped_probs
from tests.typechecking import CHECKED_CALLS, check_anew, checked


def biased(logits_NV: Float[Tensor, "N V"], bias_V: Float[Tensor, " V"], width: int) -> Float[Tensor, "N V"]:
    return (logits_NV + bias_V.mean())[:, :width]


def group_of(num_keys: int) -> Group:
    tokens, keys = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64)
    return Group(tokens, keys, torch.ones(1, 2, num_keys, dtype=torch.bool), tokens, keys)


def test_matching_call_passes():
    assert checked(biased)(torch.zeros(2, 3), torch.zeros(3), 3).shape == (2, 3)
    assert checked(biased)(torch.zeros(4, 5), torch.zeros(5), 5).shape == (4, 5), "each call has axes of its own"
    assert group_of(num_keys=3)


@pytest.mark.parametrize(
    "call",
    [
        lambda: checked(biased)(torch.zeros(3), torch.zeros(3), 3),
        lambda: checked(biased)(torch.zeros(2, 3), torch.zeros(4), 3),
        lambda: checked(biased)(torch.zeros(2, 3), torch.zeros(3), 2),
        lambda: checked(biased)(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3), 3),
        lambda: checked(biased)(torch.zeros(2, 3), torch.zeros(3), "3"),  # type: ignore[arg-type]
        lambda: group_of(num_keys=4),
        lambda: warped_probs(torch.zeros(3), []),
        lambda: KVCache(8, torch.device("cpu")).write(0, torch.arange(2), torch.zeros(2, 1, 4), torch.zeros(3, 1, 4)),
    ],
    ids=["axes", "two arguments", "result", "dtype", "type", "field", "function of the engine", "method of the engine"],
)
def test_mismatched_call_is_refused(call: Callable[[], object]):
    with pytest.raises(BeartypeCallHintViolation):
        call()


def test_first_calls_of_each_test_are_checked():
    call = checked(biased)
    for _ in range(CHECKED_CALLS):
        call(torch.zeros(2, 3), torch.zeros(3), 3)
    call(torch.zeros(2, 3), torch.zeros(4), 3)
    check_anew()
    with pytest.raises(BeartypeCallHintViolation):
        call(torch.zeros(2, 3), torch.zeros(4), 3)


def test_items_are_drawn_from_no_shared_generator():
    def first(numbers: list[int], row_V: Float[Tensor, " V"]) -> int:
        return numbers[0]

    state = random.getstate()
    assert checked(first)([1, 2, 3], torch.zeros(2)) == 1
    assert random.getstate() == state
