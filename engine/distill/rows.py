"""The target's own parts that a head borrows: embeddings, output rows, and which tokens are frequent.

Shape key: M head vocabulary, V vocabulary, D target width, N positions.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from engine.distill.corpus import Text
from engine.model import CausalModel

_SAMPLE = 20_000  # positions whose laws are summed


def frequent_tokens(model: CausalModel, texts: list[Text], count: int) -> tuple[Int[Tensor, " M"], float]:
    """Return the `count` tokens that carry most of the target's probability in the texts, ascending, and how much they carry."""
    mass_V = torch.zeros(model.vocab_size, device=model.device)
    num_rows = 0
    for text in texts:
        states = text.states_TFD[text.num_prompt - 1 :, -1].to(model.device, model.module.dtype)
        with torch.inference_mode():
            mass_V += model.module.lm_head(states).float().softmax(-1).sum(0)
        num_rows += len(states)
        if num_rows >= _SAMPLE:
            break
    ids_M = mass_V.topk(min(count, model.vocab_size)).indices.sort().values
    return ids_M, float(mass_V[ids_M].sum() / num_rows)
