"""The fused launches and the choice of tokens on the device they are for: compiled, captured, replayed."""

import pytest
import torch

from engine.engine import Engine
from engine.model.causal_lm import adopt
from engine.sampling import choice_reference, device_choice
from engine.sampling.noise import signed
from engine.testing import tiny_engine, tiny_module
from tests.gpu.device import CUDA, NEEDS_KERNELS
from tests.gpu.test_paged import LIMITS, replayed
from tests.model.driving import run
from tests.model.mixed import mixed_requests
from tests.model.sampling.test_device_choice import KEYS, TEMPERATURES, logits_of

pytestmark = NEEDS_KERNELS
FUSED = ("llama", "mistral", "qwen2", "qwen3")


def engine_of(family: str, is_fused: bool) -> Engine:
    target, draft = (adopt(tiny_module(family), CUDA) for _ in range(2))
    assert target.fused is not None
    if not is_fused:
        target.fused = draft.fused = None
    return replayed(tiny_engine(target, draft, config=LIMITS), "on")


@pytest.mark.parametrize("family", FUSED)
def test_fused_texts_are_those_of_the_module(family):
    texts = [run(engine_of(family, is_fused), mixed_requests(max_tokens=16)).texts() for is_fused in (True, False)]
    assert texts[0] == texts[1]


def test_choices_are_the_cpus():
    logits_NV = logits_of()
    assert device_choice.can_choose(logits_NV.to(CUDA))
    inverse_N = torch.tensor([1.0 / one if one else 0.0 for one in TEMPERATURES], dtype=torch.float64)
    keys_N = torch.tensor([signed(key) for key in KEYS])
    found_N3 = device_choice.chosen(logits_NV.to(CUDA), inverse_N.to(CUDA), keys_N.to(CUDA))
    assert torch.equal(found_N3.cpu(), choice_reference.chosen(logits_NV, inverse_N, keys_N))
