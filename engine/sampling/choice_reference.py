"""What the kernels of choice_kernels choose, by torch operations on any device. Nothing is read by the host.

Shape key: N nodes, V vocabulary.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from engine.sampling.noise import uniforms_of


def chosen(logits_NV: Float[Tensor, "N V"], inverse_N: Tensor, keys_N: Tensor) -> Float[Tensor, "N 3"]:
    """Return largest logits, their tokens and the chosen tokens, float64, as device_choice.chosen does."""
    wide_NV = logits_NV.double()
    noise_NV = -torch.log(-torch.log(uniforms_of(keys_N, logits_NV.shape[-1])))
    top_N, top_ids_N = wide_NV.amax(-1), wide_NV.argmax(-1)
    drawn_N = (wide_NV * inverse_N[:, None] + noise_NV).argmax(-1)
    return torch.stack([top_N, top_ids_N.double(), torch.where(inverse_N > 0, drawn_N, top_ids_N).double()], dim=-1)
