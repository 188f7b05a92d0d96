"""One step on a CUDA device: noise bit for bit, greedy and seeded sequences, and distributions on the device."""

import pytest
import torch

from engine.core.policy import FixedExpansion
from engine.core.rng_keys import Stream, stream_key
from engine.core.tree import Expansion
from engine.core.types import SamplingParams
from engine.distill.generation.generate import generate
from engine.distill.generation.jobs import GenerationJob
from engine.draft.text.text_cache import TextCache
from engine.draft.text.text_drafter import TextDrafter
from engine.model.causal_lm import adopt
from engine.sampling.noise import gumbels, uniforms
from engine.testing import FAMILIES, tiny_engine, tiny_module
from tests.model.distributions import probs_of
from tests.model.driving import greedy, run, sampled
from tests.model.tiny import own_greedy_text

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")
LONG = [3 + (11 * i) % 7 for i in range(19)]
KEYS = [stream_key(seed, 7, Stream.TOKEN) for seed in (0, 1, 2**63 - 1)]


@pytest.fixture(autouse=True)
def exact_products():
    """Keep float32 products in float32, as on the CPU."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def test_noise_is_the_cpus():
    assert torch.equal(uniforms(KEYS, 1000, CUDA).cpu(), uniforms(KEYS, 1000))
    assert torch.allclose(gumbels(KEYS, 1000, CUDA).cpu(), gumbels(KEYS, 1000), rtol=1e-12)


def test_distributions_are_the_cpus():
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(0)) * 3
    params = [SamplingParams(temperature=0.7), SamplingParams(top_k=40), SamplingParams(top_p=0.9), SamplingParams(min_p=0.02)]
    assert torch.allclose(probs_of(logits.to(CUDA), params).cpu(), probs_of(logits, params), atol=1e-6)


def engine_on(device: torch.device, family: str, drafter: str):
    target = adopt(tiny_module(family), device)
    draft = TextDrafter(61, device, TextCache(min_tokens=1)) if drafter == "ngram" else adopt(tiny_module(family), device)
    return tiny_engine(target, draft, FixedExpansion(Expansion(2, 2, 2)))


@pytest.mark.parametrize("max_tokens", [1, 12])
@pytest.mark.parametrize("family", FAMILIES)
def test_graph_generated_sequences_equal_the_cpus(family, max_tokens):
    """In batches of which the last is not full, greedy and drawn."""
    orders = {name: GenerationJob(LONG[: 3 + 2 * name], float(name % 2), 100 + name, max_tokens) for name in range(5)}
    on_gpu, on_cpu = (
        {text.name: text for text in generate(adopt(tiny_module(family), device), orders, 3, (1, 3))}
        for device in (CUDA, torch.device("cpu"))
    )
    assert {name: text.ids for name, text in on_gpu.items()} == {name: text.ids for name, text in on_cpu.items()}
    for name, text in on_cpu.items():
        assert torch.allclose(on_gpu[name].states_TFD.cpu().float(), text.states_TFD.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("drafter", ["model", "ngram"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_equal_the_cpus(family, drafter):
    requests = [
        greedy("greedy", LONG),
        sampled("seeded", LONG[:7], seed=3, top_p=0.9),
        sampled("traversal", LONG[:4], seed=4, verifier="traversal"),
    ]
    texts = run(engine_on(CUDA, family, drafter), requests).texts()
    assert texts["greedy"] == own_greedy_text(family, LONG, 12)
    assert texts == run(engine_on(torch.device("cpu"), family, drafter), requests).texts()
