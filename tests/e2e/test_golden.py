"""Greedy text on the presets' real weights is `transformers.generate`'s, token for token, in float32 on the CPU.

Gemma's linear layers are torch's, those of the other presets what a server would take: the native library's if it runs here.
Each preset runs alone and in a batch of eight mixed requests (with sampled neighbours, in chunks), over six expansions. The
mutant at the end takes the extra token from the root and must fail. `pytest --golden-tokens 64` compares longer texts.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.core.config import SchedulerConfig
from engine.core.policy import PlainDecoding
from engine.core.step_plan import Feeding
from engine.core.tree import Expansion, parse_expansion
from engine.core.types import ModelInfo, Request, SamplingParams, Speculation
from engine.draft.drafter import Drafter
from engine.draft.models.draft_model import ModelDrafter
from engine.draft.models.early_exit import Lens, early_exit_drafter
from engine.draft.text.text_drafter import TextDrafter
from engine.engine import Engine
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel, load_model
from engine.model.linear_backends import fastest_linears, torch_linears
from engine.model.target import Target
from engine.verify.dispatch import Judge
from engine.verify.verdict import Verdict
from engine.weights import resolve
from server.settings import SHIPPED_DRAFTERS
from tests.e2e.prompts import PROMPTS

pytestmark = [pytest.mark.weights, pytest.mark.slow, pytest.mark.timeout(900)]

EXPANSIONS = [*map(parse_expansion, ["0.1.0", "4.1.0", "2.2.2", "beam.10.6.3", "1.4.1", "7.1.0"])]
CPU = torch.device("cpu")
SLOTS = SchedulerConfig(num_slots=4096, max_model_len=1024, max_step_tokens=48)


@dataclass(frozen=True)
class Golden:
    """A preset's drafters and the output of `generate` for the prompts."""

    model: CausalModel
    target: Target
    drafters: tuple[Drafter, ...]
    prompts: tuple[tuple[int, ...], ...]
    texts: tuple[tuple[int, ...], ...]

    def engine(self, drafter: Drafter) -> Engine:
        info = ModelInfo(
            name="golden",
            vocab_size=self.model.vocab_size,
            max_model_len=SLOTS.max_model_len,
            num_slots=SLOTS.num_slots,
            eos_token_ids=self.model.eos_token_ids,
            dtype="float32",
            device="cpu",
            drafter=drafter.name,
            verifier="traversal",
            policy="plain",
        )
        return Engine(info, SLOTS, self.target, drafter, PlainDecoding())


def _generated(preset: str, prompts: list[tuple[int, ...]], num_tokens: int) -> list[tuple[int, ...]]:
    reference = AutoModelForCausalLM.from_pretrained(resolve(preset).folder, dtype=torch.float32)
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
        texts.append(tuple(out[0, len(prompt) :].tolist()))
    return texts


def _golden(preset: str, num_prompts: int, num_tokens: int) -> Golden:
    tokenizer = AutoTokenizer.from_pretrained(resolve(preset).folder)
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in PROMPTS[:num_prompts]]
    texts = _generated(preset, prompts, num_tokens)
    linears = torch_linears(CPU) if preset == "gemma3-270m" else fastest_linears(CPU)
    model = load_model(resolve(preset).folder, "float32", CPU, linears)
    target = Target(model, SLOTS.num_slots)
    drafters: list[Drafter] = [TextDrafter(model.vocab_size, CPU)]
    if preset == "smollm2-135m":
        drafters.append(early_exit_drafter(model, target.cache, Lens.load(SHIPPED_DRAFTERS / "smollm2-135m-lens.safetensors")))
    if preset == "qwen2.5-coder-1.5b":
        draft = load_model(resolve("qwen2.5-coder-0.5b").folder, "float32", CPU, linears)
        drafters = [ModelDrafter("0.5b", draft, KVCache(SLOTS.num_slots, CPU), Feeding.OWN_CACHE)]
    return Golden(model, target, tuple(drafters), tuple(prompts), tuple(texts))


@pytest.fixture(scope="module", params=["qwen2.5-coder-1.5b", "smollm2-135m", "gemma3-270m"])
def golden(request: pytest.FixtureRequest) -> Golden:
    num_tokens = request.config.getoption("--golden-tokens")
    num_prompts = 8 if request.param == "smollm2-135m" else 3
    return _golden(request.param, num_prompts, num_tokens if num_prompts == 8 else num_tokens // 2)


def _request(name: str, prompt: tuple[int, ...], expansion: Expansion, text: tuple[int, ...]) -> Request:
    return Request(name, prompt, SamplingParams(temperature=0.0, max_tokens=len(text)), Speculation(expansion=expansion))


def _run(engine: Engine, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    texts: dict[str, tuple[int, ...]] = {request.request_id: () for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step().events:
            texts[event.request_id] += event.token_ids
    engine.check_integrity()
    return texts


def test_single_request_with_any_expansion(golden: Golden) -> None:
    for drafter in golden.drafters:
        for index, expansion in enumerate(EXPANSIONS):
            which = index % len(golden.prompts)
            request = _request("alone", golden.prompts[which], expansion, golden.texts[which])
            assert _run(golden.engine(drafter), [request]) == {"alone": golden.texts[which]}, (drafter.name, expansion)


def test_in_a_batch_of_eight_mixed_requests(golden: Golden) -> None:
    """Prompts meet other expansions the second time; where the prompts are few, all of them meet several at once."""
    for drafter in golden.drafters:
        for shift in range(2 if len(golden.prompts) > 3 else 1):
            requests, expected = _mixed_batch(golden, shift)
            texts = _run(golden.engine(drafter), requests)
            assert {name: texts[name] for name in expected} == expected, drafter.name


def _mixed_batch(golden: Golden, shift: int) -> tuple[list[Request], dict[str, tuple[int, ...]]]:
    """Six greedy requests, each with its own expansion, a seeded and an unseeded sampled one."""
    requests, expected = [], {}
    for index in range(6):
        which = (index + shift) % len(golden.prompts)
        name = f"greedy-{index}"
        requests.append(_request(name, golden.prompts[which], EXPANSIONS[index], golden.texts[which]))
        expected[name] = golden.texts[which]
    for name, seed in (("seeded", 7), ("unseeded", None)):
        sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=seed, max_tokens=12)
        requests.append(Request(name, golden.prompts[shift], sampling, Speculation(expansion=EXPANSIONS[2])))
    return requests, expected


def test_seeded_completion_is_equal_with_speculation(golden: Golden) -> None:
    """Plain decoding runs alone. The expansions run in one batch, because their passes are slow."""
    sampling = SamplingParams(temperature=0.8, seed=11, max_tokens=16)
    ways = {str(expansion): Speculation(expansion=expansion) for expansion in EXPANSIONS[:4]}
    for drafter in golden.drafters:
        plain = Request("plain", golden.prompts[0], sampling, Speculation(is_enabled=False))
        drafted = [Request(name, golden.prompts[0], sampling, way) for name, way in ways.items()]
        expected = _run(golden.engine(drafter), [plain])["plain"]
        assert _run(golden.engine(drafter), drafted) == dict.fromkeys(ways, expected), drafter.name


@pytest.mark.parametrize("golden", ["smollm2-135m"], indirect=True)
def test_comparison_detects_extra_token_from_root(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: whatever path is accepted, the extra token is the root's arg max."""

    def from_the_root(self, rows, forest, logits_NV, *given):
        verdicts, likeliest = honest(self, rows, forest, logits_NV, *given), logits_NV.argmax(-1).tolist()
        found = zip(verdicts, rows, forest.offsets, strict=False)
        return [Verdict(v.path, likeliest[offset]) if row.sampling.is_greedy else v for v, row, offset in found]

    honest: Any = Judge.judge
    monkeypatch.setattr(Judge, "judge", from_the_root)
    with pytest.raises(AssertionError):
        test_in_a_batch_of_eight_mixed_requests(golden)
