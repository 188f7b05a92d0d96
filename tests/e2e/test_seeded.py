"""A request with a seed gets the same text with speculation on or off: real weights, two drafters, float32 on the CPU.

`pytest tests/e2e/test_seeded.py --seeded-prompts 200` compares every prompt of seeded_prompts.py; the default is a few of
each kind. The mutant at the end keys noise by the step and must fail.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from engine.build import build_engine
from engine.core.config import EngineConfig, SchedulerConfig
from engine.core.rng_keys import Stream, stream_key
from engine.core.tree import Expansion
from engine.core.types import Request, SamplingParams, Speculation
from engine.engine import Engine
from engine.sampling.noise import gumbels
from engine.verify import coupled
from engine.weights import resolve
from server.settings import SHIPPED_DRAFTERS
from tests.e2e.seeded_prompts import SEEDED_PROMPTS
from tests.model.distributions import probs_of

PRESET = "smollm2-135m"
NUM_TOKENS = 32
EXPANSIONS = [Expansion(3, 1, 0), Expansion(1, 2, 2, "delayed_distinct"), Expansion(0, 3, 4, "noise_aware", 6)]
SAMPLINGS = [SamplingParams(temperature=1.0), SamplingParams(temperature=0.6, top_p=0.9)]
BATCH = SchedulerConfig(max_running=48, max_waiting=10_000, max_step_tokens=512, num_slots=8192, max_model_len=256)

pytestmark = [pytest.mark.weights, pytest.mark.slow, pytest.mark.timeout(7200)]

_logger = logging.getLogger(__name__)

Texts = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """A prompt and how it is sampled; the seed is its own."""

    prompt: tuple[int, ...]
    sampling: SamplingParams

    def request(self, name: str, speculation: Speculation) -> Request:
        return Request(name, self.prompt, self.sampling, speculation)


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> list[Case]:
    tokenizer = AutoTokenizer.from_pretrained(resolve(PRESET).folder)
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in SEEDED_PROMPTS[: request.config.getoption("--seeded-prompts")]]
    return [
        Case(prompt, SamplingParams(one.temperature, one.top_p, seed=1000 * which + number, max_tokens=NUM_TOKENS))
        for which, one in enumerate(SAMPLINGS)
        for number, prompt in enumerate(prompts)
    ]


def _engine(drafter: str) -> Engine:
    lens = str(SHIPPED_DRAFTERS / "smollm2-135m-lens.safetensors") if drafter == "early-exit" else None
    return build_engine(EngineConfig(model=PRESET, drafter=drafter, lens=lens, policy="fixed", scheduler=BATCH))


@pytest.fixture(scope="module")
def plain(cases: list[Case]) -> Texts:
    """Return the tokens of plain decoding, from an engine without a drafter."""
    requests = [case.request(str(number), Speculation(is_enabled=False)) for number, case in enumerate(cases)]
    return _run(_engine("none"), requests).texts


@dataclass(frozen=True)
class Run:
    """The completions of requests, and how much of each had been drafted."""

    texts: Texts
    num_accepted: int


def _run(engine: Engine, requests: list[Request]) -> Run:
    texts: Texts = {request.request_id: () for request in requests}
    for request in requests:
        engine.add(request)
    num_accepted = 0
    while engine.has_work:
        output = engine.step()
        num_accepted += output.stats.num_accepted_tokens
        for event in output.events:
            texts[event.request_id] += event.token_ids
    engine.check_integrity()
    return Run(texts, num_accepted)


def _speculative(cases: list[Case], drafter: str) -> Run:
    """Run every case with every expansion, all in one batch whose rows speculate unlike each other."""
    requests = [
        case.request(f"{number} {expansion}", Speculation(expansion=expansion))
        for number, case in enumerate(cases)
        for expansion in EXPANSIONS
    ]
    return _run(_engine(drafter), requests)


def _differences(cases: list[Case], plain: Texts, texts: Texts) -> Iterator[str]:
    for name, text in texts.items():
        number = name.split()[0]
        if text != plain[number]:
            yield f"request {name}: {_gap(cases[int(number)], plain[number], text)}"


@cache
def _reference() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(resolve(PRESET).folder, dtype=torch.float32)


@torch.inference_mode()
def _gap(case: Case, expected: tuple[int, ...], found: tuple[int, ...]) -> str:
    """Report where the sequences differ and the score gap there. A gap near 1e-6 is a tie."""
    at = next((i for i, (one, other) in enumerate(zip(expected, found)) if one != other), min(len(expected), len(found)))
    text = [*case.prompt, *expected[:at]]
    probs_V = probs_of(_reference()(torch.tensor([text])).logits[:, -1].float(), [case.sampling])[0].double()
    scores_V = probs_V.log() + gumbels([stream_key(case.sampling.seed or 0, len(text), Stream.TOKEN)], len(probs_V))[0]
    best, runner_up = scores_V.topk(2).values.tolist()
    return f"parts at token {at}, {expected[at:][:1]} for {found[at:][:1]}; perturbed-score gap {best - runner_up:.2e}"


@pytest.mark.parametrize("drafter", ["early-exit", "ngram"])
def test_seeded_completion_is_equal_without_speculation(drafter: str, cases: list[Case], plain: Texts) -> None:
    run = _speculative(cases, drafter)
    num_tokens = sum(map(len, run.texts.values()))
    _logger.info("%s: %d texts, %d tokens, %d of them drafted", drafter, len(run.texts), num_tokens, run.num_accepted)
    assert len(run.texts) == len(cases) * len(EXPANSIONS)
    assert run.num_accepted > 0.02 * num_tokens, "what drafts nothing proves nothing"
    assert list(_differences(cases, plain, run.texts)) == []


def test_prompts_give_different_completions(cases: list[Case], plain: Texts) -> None:
    """Equal texts would prove little; a handful may coincide."""
    assert len(set(plain.values())) > 0.95 * len(cases)


def test_comparison_detects_noise_keyed_by_step(cases: list[Case], plain: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: every token of a step is chosen with the noise of the step's first."""
    monkeypatch.setattr(coupled, "_noise_key", lambda key, depth: stream_key(key.seed, key.root_position + 1, Stream.TOKEN))
    some = cases[:4]
    assert next(_differences(some, plain, _speculative(some, "ngram").texts), None)
