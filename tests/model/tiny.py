"""The tiny models of engine.testing, made once a run, and transformers' own results for them."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.model.causal_lm import CausalModel
from engine.testing import tiny_model, tiny_module, tiny_pair


@cache
def own_module(family: str, seed: int = 0) -> PreTrainedModel:
    """Return the model as transformers runs it, with eager attention."""
    return tiny_module(family, seed)


@cache
def model(family: str, seed: int = 0) -> CausalModel:
    """Return the same model, driven by us."""
    return tiny_model(family, seed)


@cache
def pair(family: str, noise: float = 0.01) -> tuple[CausalModel, CausalModel]:
    """Return a target that equals `model(family)` and a drafter that often agrees with it."""
    return tiny_pair(family, 0, noise)


@torch.inference_mode()
def own_logits(family: str, texts: Sequence[Sequence[int]]) -> Tensor:
    """Return transformers' logits [text, position, V]; texts are padded on the right, where causality hides it."""
    width = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts])
    return own_module(family)(input_ids=ids, use_cache=False).logits.float()  # type: ignore[no-any-return]


@torch.inference_mode()
def own_greedy_text(family: str, prompt: Sequence[int], num_tokens: int, eos: int | None = None) -> list[int]:
    """Return what `generate` adds to the prompt."""
    ids = torch.tensor([list(prompt)])
    out = own_module(family).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, eos_token_id=eos, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]
