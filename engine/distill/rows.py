"""The target's output rows as a head uses them, and its most frequent tokens.

Shape key: M head vocabulary, V vocabulary, D target width, N positions.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.distill.corpus import Text
from engine.model.causal_lm import CausalModel
from engine.model.check import check_text, own_logits
from engine.model.hidden_states import StateTap, require_trainable
from engine.model.linear_backends import weight_of
from engine.weights import UnsupportedModel

_SAMPLE = 100_000  # positions whose distributions are summed
_TOLERANCE = 5e-2  # of bfloat16 logits, relative to the largest logit


def require_plain_output(model: CausalModel) -> None:
    """Raise UnsupportedModel unless the target's logits are its output rows times its last state, as a head assumes."""
    require_trainable(model)
    tap = StateTap(model, [model.depth])
    try:
        expected_NV = own_logits(model, check_text(model))
        rows_VD = weight_of(model.module.get_output_embeddings()).float()
        logits_NV = tap.latest()[-len(expected_NV) :, 0].float() @ rows_VD.T
    finally:
        tap.close()
        model.restore_attention()
    if not float((logits_NV - expected_NV).abs().max() / expected_NV.abs().max()) < _TOLERANCE:
        raise UnsupportedModel(f"{type(model.module).__name__} scales, caps or shifts its logits; a head cannot be made for it")


def frequent_tokens(
    model: CausalModel, texts: Sequence[Text], count: int, known_M: Int[Tensor, " M"] | None = None
) -> Int[Tensor, " C"]:
    """Return `count` tokens, ascending: the known tokens and the most frequent other tokens.

    A token's frequency is its count in all answers, plus its total probability in the first answers.
    """
    mass_V = _mass(model, texts)
    for text in texts:
        mass_V += torch.bincount(text.ids_T[text.num_prompt :].to(model.device), minlength=model.vocab_size)
    if known_M is not None:
        mass_V[known_M.long()] = torch.inf
    return mass_V.topk(min(count, model.vocab_size)).indices.sort().values


def coverage(model: CausalModel, texts: Sequence[Text], ids_M: Int[Tensor, " M"]) -> float:
    """Return the share of the target's probability in the texts that these tokens have."""
    mass_V = _mass(model, texts)
    return float(mass_V[ids_M].sum() / mass_V.sum())


def _mass(model: CausalModel, texts: Sequence[Text]) -> Float[Tensor, " V"]:
    """Return the sum of the target's distributions over the answers' positions of the first texts."""
    mass_V = torch.zeros(model.vocab_size, device=model.device)
    num_rows = 0
    for text in texts:
        states = text.states_TFD[text.num_prompt - 1 :, -1].to(model.device, model.module.dtype)
        with torch.inference_mode():
            mass_V += model.module.lm_head(states).float().softmax(-1).sum(0)
        num_rows += len(states)
        if num_rows >= _SAMPLE:
            break
    return mass_V
