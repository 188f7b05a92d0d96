"""Whether texts are the same with and without graphs and speculation; needs msgspec and llguidance, as the engine does.

Texts are compared token by token. Passes of different widths round differently, in float32 a little and in bfloat16 more, so each
greedy text is fed to the plain model too, by transformers' own pass: each token must be its likeliest, or within a stated gap of
it (a near tie).
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.gpu.figures import Figures
from benchmarks.gpu.models import ModelShape, model_of
from engine.attention.paged.buffer import TableBuffer
from engine.attention.paged.graph_recorder import CudaGraphs, Unrecorded
from engine.attention.paged.graphs import GraphResources
from engine.attention.paged.padding_shapes import PaddingShapes
from engine.core.config import SchedulerConfig
from engine.core.policy import ExpansionPolicy, FixedExpansion, PlainDecoding
from engine.core.tree import Expansion
from engine.core.types import Request, SamplingParams
from engine.engine import Engine
from engine.graph_setup import record, table_capacity
from engine.model.causal_lm import CausalModel
from engine.testing import tiny_engine

_LIMITS = SchedulerConfig(max_running=8, max_step_tokens=64, num_slots=4096, max_model_len=256)
_SHARPNESS, _NOISE = 6.0, 0.02  # of distributions; of the drafter's weights
NEAR_TIE = {torch.float32: 1e-4, torch.bfloat16: 0.02}  # of the largest logit


@dataclass(frozen=True)
class Case:
    """One way to write the texts."""

    name: str
    has_graphs: bool | None  # None: passes run as they come
    policy: ExpansionPolicy


CASES = (
    Case("plain", None, PlainDecoding()),
    Case("plain, padded", False, PlainDecoding()),
    Case("plain, graphs", True, PlainDecoding()),
    Case("trees", None, FixedExpansion(Expansion(2, 2, 2))),
    Case("trees, padded", False, FixedExpansion(Expansion(2, 2, 2))),
    Case("trees, graphs", True, FixedExpansion(Expansion(2, 2, 2))),
)


def check(figures: Figures, shape: ModelShape, dtype: torch.dtype, device: torch.device, num_tokens: int) -> bool:
    """Write the same texts in every way; return whether none has a token that plain decoding would not have."""
    shape = replace(shape, dtype=dtype)
    target = model_of(shape, device, sharpness=_SHARPNESS)
    draft = _noisy(target)
    texts = {case.name: _texts(target, draft, case, num_tokens) for case in CASES if _can_run(case, device)}
    gaps = {name: [*_gaps(target, found)] for name, found in texts.items()}
    is_right = True
    for name, found in texts.items():
        num_different = sum(found.ids[one] != texts["plain"].ids[one] for one in found.ids)
        num_near = sum(0.0 < gap <= NEAR_TIE[dtype] for gap in gaps[name])
        num_wrong = sum(not gap <= NEAR_TIE[dtype] for gap in gaps[name])
        is_right &= not num_wrong
        facts = {"different": num_different, "near_ties": num_near, "wrong": num_wrong, "greedy_tokens": len(gaps[name])}
        accepted = {"texts": len(found.ids), "accepted": found.num_accepted}
        figures.add("texts", model=shape.name, dtype=str(dtype), way=name, **facts, **accepted)
    return is_right


def _can_run(case: Case, device: torch.device) -> bool:
    return device.type == "cuda" or not case.has_graphs


@torch.no_grad()
def _noisy(target: CausalModel) -> CausalModel:
    """Return a drafter that often agrees with a target."""
    draft = copy.copy(target)
    draft.module, draft.memories = copy.deepcopy(target.module), []
    generator = torch.Generator(target.device).manual_seed(1)
    for parameter in draft.module.parameters():
        noise = torch.randn(parameter.shape, generator=generator, device=target.device)
        parameter.add_((noise * _NOISE * float(parameter.float().std())).to(parameter.dtype))
    return draft


@dataclass(frozen=True)
class Texts:
    """Texts by request, and how many drafted tokens were accepted."""

    prompts: dict[str, Sequence[int]]
    ids: dict[str, list[int]]
    num_accepted: int


def _requests(vocab_size: int, num_tokens: int) -> list[Request]:
    """Return greedy and seeded requests with prompts of several lengths, one of them longer than a step."""
    requests = []
    for index, length in enumerate((3, 9, 30, 100)):
        prompt = tuple((7 * index + 13 * place) % vocab_size for place in range(length))
        for name, temperature in (("greedy", 0.0), ("seeded", 0.8)):
            sampling = SamplingParams(temperature=temperature, seed=index, max_tokens=num_tokens, ignore_eos=True)
            requests.append(Request(f"{name}-{index}", prompt, sampling))
    return requests


def _texts(target: CausalModel, draft: CausalModel, case: Case, num_tokens: int) -> Texts:
    engine = tiny_engine(target, draft, case.policy, config=_LIMITS)
    if case.has_graphs is not None:
        _replayed(engine, case.has_graphs)
    requests = _requests(target.vocab_size, num_tokens)
    for request in requests:
        engine.add(request)
    ids: dict[str, list[int]] = {request.request_id: [] for request in requests}
    num_accepted = 0
    while engine.has_work:
        output = engine.step()
        num_accepted += output.stats.num_accepted_tokens
        for event in output.events:
            ids[event.request_id].extend(event.token_ids)
    return Texts({request.request_id: request.prompt_ids for request in requests}, ids, num_accepted)


def _replayed(engine: Engine, has_graphs: bool) -> None:
    device = engine.target.model.device
    recorder = CudaGraphs(is_required=True) if has_graphs else Unrecorded()
    steps = GraphResources(TableBuffer(table_capacity(_LIMITS), device), PaddingShapes(_LIMITS.max_step_tokens), recorder)
    for passes in record(steps, _LIMITS, engine.target, engine.drafter):
        passes.prepare()


def _gaps(target: CausalModel, texts: Texts) -> Iterator[float]:
    """Yield how far each greedy token is below the likeliest by the plain model, as a share of the largest logit."""
    for name, ids in texts.ids.items():
        if name.startswith("greedy"):
            prompt = texts.prompts[name]
            logits_TV = _own_logits(target, [*prompt, *ids])[len(prompt) - 1 : -1]
            chosen = logits_TV.gather(-1, torch.tensor(ids, device=target.device)[:, None])[:, 0]
            top = logits_TV.amax(-1)
            yield from ((top - chosen) / logits_TV.abs().amax(-1)).tolist()


@torch.inference_mode()
def _own_logits(target: CausalModel, ids: Sequence[int]) -> torch.Tensor:
    """Return the logits of a text by transformers' own causal pass."""
    target.module.set_attn_implementation("eager")
    try:
        return target.module(input_ids=torch.tensor([ids], device=target.device), use_cache=False).logits[0].float()  # type: ignore[no-any-return]
    finally:
        target.restore_attention()
