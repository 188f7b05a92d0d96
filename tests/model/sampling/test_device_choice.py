"""The kernels that choose tokens on a GPU, by Triton's interpreter: arg maxes, and the noise of the coupled rule."""

from collections.abc import Sequence
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from engine.core.policy import FixedExpansion
from engine.core.rng_keys import Stream, stream_key
from engine.core.tree import parse_expansion
from engine.model.causal_lm import adopt
from engine.native import distributions, noise
from engine.sampling import choice_reference, device_choice
from engine.sampling.noise import gumbels, signed
from engine.testing import tiny_engine, tiny_module
from tests.model.driving import run
from tests.model.mixed import mixed_requests
from tests.model.paged import needs_triton
from tests.model.passes import CPU

if find_spec("triton"):
    from engine.sampling import choice_kernels

VOCAB = 3000  # three blocks, the last one not full
KEYS = [stream_key(seed, 7, Stream.TOKEN) for seed in (0, 1, 2**63 - 1, 5, 6, 7)]
TEMPERATURES = [0.0, 1.0, 0.3, 1.7, 1e-30, 0.0]


def logits_of(num_nodes: int = len(KEYS)) -> Tensor:
    return torch.randn(num_nodes, VOCAB, generator=torch.Generator().manual_seed(3)) * 3


def chosen_of(logits_NV: Tensor, temperatures: Sequence[float] = TEMPERATURES) -> list[int]:
    return [one.token_id for one in device_choice.choices(logits_NV, temperatures, KEYS)]


@needs_triton
@pytest.mark.parametrize("programs", [1, 12, 264])
def test_choices_are_those_of_the_noise(programs, monkeypatch):
    """By one program for a node, or by several whose results are merged."""
    monkeypatch.setattr(device_choice, "_PROGRAMS", programs)
    logits_NV = logits_of()
    found = device_choice.choices(logits_NV, TEMPERATURES, KEYS)
    assert [one.best.token_id for one in found] == logits_NV.argmax(-1).tolist()
    assert [one.best.logit for one in found] == logits_NV.amax(-1).tolist()
    scores_NV = (logits_NV.double() / torch.tensor(TEMPERATURES).clamp_min(1e-30)[:, None]) + gumbels(KEYS, VOCAB)
    expected = torch.where(torch.tensor(TEMPERATURES) > 0, scores_NV.argmax(-1), logits_NV.argmax(-1))
    assert [one.token_id for one in found] == expected.tolist()
    assert [one.token_id for one in found][1:4] != logits_NV.argmax(-1).tolist()[1:4]


@needs_triton
def test_the_first_of_equal_logits_is_chosen():
    logits_NV = torch.zeros(len(KEYS), VOCAB)
    logits_NV[:, [5, 6, 1500, 2999]] = 1.0
    found = device_choice.choices(logits_NV, TEMPERATURES, KEYS)
    assert {one.best.token_id for one in found} == {5}
    assert found[0].token_id == found[5].token_id == 5


@needs_triton
@pytest.mark.parametrize("place", [0, 1024, 2999])
@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
def test_invalid_rows_are_found(fault, place):
    """In any part of the vocabulary, and without an effect on other rows. A row of -inf alone is one too."""
    logits_NV = logits_of()
    logits_NV[1, place], logits_NV[3] = fault, float("-inf")
    valid = [one.best.is_valid for one in device_choice.choices(logits_NV, TEMPERATURES, KEYS)]
    assert valid == [True, False, True, False, True, True]


@needs_triton
def test_masked_tokens_are_never_chosen():
    logits_NV = logits_of()
    logits_NV[:, :2990] = float("-inf")
    assert min(chosen_of(logits_NV)) >= 2990


@needs_triton
@pytest.mark.parametrize("name", ["_GOLDEN", "_MIX_1", "_MIX_2"])
def test_a_wrong_constant_is_noticed(name, monkeypatch):
    """Each changes noise, and no arg max."""
    before = chosen_of(logits_of())
    monkeypatch.setattr(choice_kernels, name, type(getattr(choice_kernels, name))(12345))
    after = chosen_of(logits_of())
    assert after[1:4] != before[1:4]
    assert after[0] == before[0]


@pytest.fixture
def on_a_device(monkeypatch):
    """Take a processor for a GPU whose kernels are their reference."""
    monkeypatch.setattr(distributions, "can_read", lambda _: False)
    monkeypatch.setattr(noise, "can_choose", lambda _: False)
    monkeypatch.setattr(device_choice, "can_choose_on", lambda _: True)
    monkeypatch.setattr(device_choice, "chosen", choice_reference.chosen)


def texts_by(tree: str) -> dict[str, list[int]]:
    engine = tiny_engine(adopt(tiny_module(), CPU), adopt(tiny_module(), CPU), FixedExpansion(parse_expansion(tree)))
    return run(engine, mixed_requests(max_tokens=16)).texts()


def test_device_choices_give_the_hosts_texts(request):
    expected = texts_by("2.2.2")
    request.getfixturevalue("on_a_device")
    assert texts_by("2.2.2") == expected


def test_noise_of_another_position_is_detected(on_a_device, monkeypatch):
    before = texts_by("2.2.2")
    monkeypatch.setattr(device_choice, "signed", lambda key: signed(key) ^ 1)
    assert texts_by("2.2.2") != before
