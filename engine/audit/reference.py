"""The reference: transformers' own forward over whole sequences, and its own processors for the distributions.

It shares no cache, packing, tree or attention with the engine, so a mistake in one of these cannot be in both. Distributions are
float64. Presence and frequency penalties, which transformers lacks, are implemented here again from OpenAI's formulas.
Shape key: N positions, V vocabulary.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.attention.packing import pack
from engine.attention.segments import chain_segment
from engine.core.types import SamplingParams
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel, is_run_natively, load_model
from engine.model.linear_backends import NATIVE
from engine.native.linear import QUANTISED
from engine.utils.progress_bar import quiet_libraries
from engine.weights.pretrained import load_module

_MAX_PASS_TOKENS = 2048


class Reference:
    """A model run by transformers."""

    def __init__(self, module: PreTrainedModel) -> None:
        self._module: Any = module.eval()

    @classmethod
    def load(cls, folder: Path, dtype: str, device: str) -> Self:
        """Load the target with eager attention; in float32 if the engine runs it natively, which rounds weights."""
        quiet_libraries()
        module = load_module(folder, dtype=getattr(torch, dtype), attn_implementation="eager")
        module.to(torch.device(device))
        return cls(module.float() if is_run_natively(module, torch.device(device)) else module)

    @property
    def dtype(self) -> str:
        """Torch's name of the weights' dtype."""
        return str(self._module.dtype).removeprefix("torch.")

    @torch.inference_mode()
    def logits(self, texts: Sequence[Sequence[int]], num_last: int) -> list[Float[Tensor, "N V"]]:
        """Return each sequence's raw logits, float64, after its last `num_last` tokens."""
        found: dict[int, Tensor] = {}
        by_length = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        while by_length:
            batch = self._batch(by_length, texts)
            by_length = by_length[len(batch) :]
            ids = torch.tensor([list(texts[index]) for index in batch], device=self._module.device)
            logits = self._module(input_ids=ids, use_cache=False, logits_to_keep=num_last).logits
            found.update(zip(batch, logits.double(), strict=True))
        return [found[index] for index in range(len(texts))]

    @staticmethod
    def _batch(indices: Sequence[int], texts: Sequence[Sequence[int]]) -> list[int]:
        """Return the leading indices of sequences of one length, up to the size of a pass: there is no padding."""
        length = len(texts[indices[0]])
        return [index for index in indices[: max(1, _MAX_PASS_TOKENS // length)] if len(texts[index]) == length]


class SameBitsReference(Reference):
    """A quantised target (engine.native), whose logits are bitwise equal to the engine's.

    The native kernels define its logits, so these run over one whole sequence at a time: no pass has a cache, a tree or a batch.
    """

    def __init__(self, model: CausalModel, dtype: str) -> None:
        super().__init__(model.module)
        self._model, self._dtype = model, dtype

    @property
    def dtype(self) -> str:
        """The name of the precision."""
        return self._dtype

    @torch.inference_mode()
    def logits(self, texts: Sequence[Sequence[int]], num_last: int) -> list[Float[Tensor, "N V"]]:
        """Return each sequence's raw logits, float64, after its last `num_last` tokens."""
        return [self._logits(text, num_last) for text in texts]

    def _logits(self, text: Sequence[int], num_last: int) -> Float[Tensor, "N V"]:
        device = self._model.device
        batch = pack([chain_segment(text, 0, range(len(text)))], device)
        rows = torch.arange(len(text) - num_last, len(text), device=device)
        return self._model.forward(batch, KVCache(len(text), device), rows).double()


def load_reference(folder: Path, dtype: str, device: str) -> Reference:
    """Return the reference of a target served in `dtype` from a folder of weights."""
    if dtype in QUANTISED:
        return SameBitsReference(load_model(folder, dtype, torch.device(device), NATIVE), dtype)
    return Reference.load(folder, dtype, device)


def penalised(
    logits_NV: Float[Tensor, "N V"], prompt_ids: Sequence[int], text_ids: Sequence[int], sampling: SamplingParams
) -> Float[Tensor, "N V"]:
    """Return the logits after the penalties; row n follows `text_ids[:n]`."""
    rows = [
        penalised_row(row_V, prompt_ids, text_ids[:count], sampling) if sampling.has_penalties else row_V
        for count, row_V in enumerate(logits_NV)
    ]
    return torch.stack(rows)


def penalised_row(row_V: Tensor, prompt_ids: Sequence[int], generated: Sequence[int], sampling: SamplingParams) -> Tensor:
    """Return the logits after one text; `generated` are the tokens that presence and frequency count."""
    row_V = row_V.clone()
    if sampling.repetition_penalty != 1.0:
        text = torch.tensor([[*prompt_ids, *generated]], device=row_V.device)
        row_V = RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty))(text, row_V[None])[0]
    for token_id, count in Counter(generated).items():
        row_V[token_id] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return row_V


def warped(logits_NV: Float[Tensor, "N V"], sampling: SamplingParams) -> Float[Tensor, "N V"]:
    """Return the distributions of penalised logits after transformers' own warpers; temperature must not be 0.

    Tokens as likely as the last that is kept are kept too, so that the result does not depend on how a sort orders ties.
    """
    ids = torch.zeros((len(logits_NV), 1), dtype=torch.int64, device=logits_NV.device)  # ignored by the warpers
    scores_NV = TemperatureLogitsWarper(float(sampling.temperature))(ids, logits_NV)
    kept_NV = scores_NV
    for warper in _truncations(sampling):
        kept_NV = warper(ids, kept_NV)
    least_N1 = kept_NV.masked_fill(kept_NV == float("-inf"), float("inf")).amin(-1, keepdim=True)
    return torch.softmax(scores_NV.masked_fill(scores_NV < least_N1, float("-inf")), -1)


def _truncations(sampling: SamplingParams) -> list[Any]:
    warpers: list[Any] = []
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers
