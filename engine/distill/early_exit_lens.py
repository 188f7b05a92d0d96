"""Fits an early-exit lens: a ridge regression from a middle layer's state to the last layer's, on texts of the target.

Shape key: T tokens of a text, D model width, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from engine.attention.packing import pack
from engine.attention.segments import chain_segment
from engine.distill.generation.generate import generate
from engine.distill.generation.jobs import GenerationJob
from engine.draft.models.early_exit import Lens, truncated_model
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel
from engine.model.hidden_states import StateTap
from engine.utils.progress_bar import progress_bar

_BATCH = 64  # texts generated at a time
_RIDGE = 1e-3  # of the mean square of a state's entries


@dataclass(frozen=True, slots=True)
class LensReport:
    """The drafter's agreement with the target on held-out text: mean of sum min(p, q), and share of equal arg max."""

    num_tokens: int
    overlap: float
    agreement: float


def generated_texts(model: CausalModel, prompts: Sequence[Sequence[int]], max_tokens: int, seed: int) -> list[list[int]]:
    """Return each prompt with the target's own answer; odd prompts at temperature 1, even prompts at 0.7."""
    jobs = {
        index: GenerationJob(prompt, 1.0 if index % 2 else 0.7, seed + index, max_tokens) for index, prompt in enumerate(prompts)
    }
    texts = {
        text.name: text.ids
        for text in progress_bar(generate(model, jobs, _BATCH), what="writing texts", total=len(jobs), unit="text")
    }
    return [texts[index] for index in range(len(jobs))]


def _states(model: CausalModel, text: Sequence[int], layers: Sequence[int]) -> tuple[Float[Tensor, "T D"], ...]:
    """Return the hidden states after each of `layers` layers."""
    tap = StateTap(model, layers, is_last_normed=False)
    try:
        batch = pack([chain_segment(list(text), 0, list(range(len(text))))], model.device)
        model.forward(batch, KVCache(len(text), model.device), torch.zeros(1, dtype=torch.int64, device=model.device))
        return tap.latest().unbind(1)
    finally:
        tap.close()


def fit_lens(model: CausalModel, texts: Sequence[Sequence[int]], num_layers: int, recipe: dict[str, str]) -> Lens:
    """Return the least-squares affine map from the state after `num_layers` layers to the last layer's state."""
    depth = len(model.module.model.layers)
    gram = cross = None
    for early_TD, last_TD in _progress(model, texts, [num_layers, depth]):
        x = torch.cat([early_TD.double(), early_TD.new_ones(len(early_TD), 1).double()], dim=1)
        gram = x.T @ x if gram is None else gram + x.T @ x
        cross = x.T @ last_TD.double() if cross is None else cross + x.T @ last_TD.double()
    if gram is None or cross is None:
        raise ValueError("there is no text to fit a lens on")
    ridge = _RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    solution = torch.linalg.solve(gram + ridge, cross).float()
    return Lens(num_layers, solution[:-1], solution[-1], recipe)


def _progress(model: CausalModel, texts: Sequence[Sequence[int]], layers: Sequence[int]) -> Iterator[tuple[Tensor, ...]]:
    for text in progress_bar(texts, what="fitting", total=len(texts), unit="text"):
        yield _states(model, text, layers)


def evaluate_lens(model: CausalModel, lens: Lens, texts: Sequence[Sequence[int]]) -> LensReport:
    """Compare the drafter of a lens with the target on texts that it was not fitted on."""
    draft = truncated_model(model, lens.num_layers, lens.final_norm(model))
    num_tokens, overlap, agreement = 0, 0.0, 0.0
    for text in texts:
        batch = pack([chain_segment(list(text), 0, list(range(len(text))))], model.device)
        rows = torch.arange(len(text), device=model.device)
        p_TV = model.forward(batch, KVCache(len(text), model.device), rows).softmax(-1)
        q_TV = draft.forward(batch, KVCache(len(text), model.device), rows).softmax(-1)
        num_tokens += len(text)
        overlap += float(torch.minimum(p_TV, q_TV).sum())
        agreement += float((p_TV.argmax(-1) == q_TV.argmax(-1)).sum())
    return LensReport(num_tokens, overlap / num_tokens, agreement / num_tokens)
