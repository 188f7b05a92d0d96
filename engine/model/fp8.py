"""Linear layers with weights of eight bits (float8 e4m3) and a scale for each output, and inputs rounded row by row.

Shape key: O outputs, I inputs, T rows.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

FORMAT = torch.float8_e4m3fn
_MOST = torch.finfo(FORMAT).max


_LEAST_CAPABILITY = (8, 9)


def fp8_reason(device: torch.device) -> str | None:
    """Return why a device cannot multiply eight-bit floats, None if it can."""
    if device.type != "cuda":
        return f"{device} is no CUDA device"
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has a compute capability below {'.'.join(map(str, _LEAST_CAPABILITY))}"
    return None


class Rounded(NamedTuple):
    """Numbers of eight bits and the scale of each row: a number is its eight bits times the scale."""

    numbers_RI: Tensor
    scales_R: Tensor


def rounded(x_RI: Float[Tensor, "R I"]) -> Rounded:
    """Return rows rounded to eight bits, each scaled so that its largest number is the format's."""
    wide = x_RI.float()
    scales_R = wide.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny * _MOST) / _MOST
    return Rounded((wide / scales_R[:, None]).clamp(-_MOST, _MOST).to(FORMAT), scales_R)


class Fp8Linear(nn.Module):
    """A linear layer with a weight of eight bits. On a GPU torch multiplies eight bits, elsewhere the rounded numbers."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight_OI, self.scales_O = rounded(linear.weight.detach())
        self.bias = linear.bias

    def dense_weight(self) -> Float[Tensor, "O I"]:
        """Return the rounded weight in float32."""
        return self.weight_OI.float() * self.scales_O[:, None]

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b."""
        inputs = rounded(x.flatten(0, -2))
        if x.is_cuda:
            out_TO = torch._scaled_mm(
                inputs.numbers_RI,
                self.weight_OI.T,
                scale_a=inputs.scales_R[:, None],
                scale_b=self.scales_O[None, :],
                out_dtype=torch.bfloat16,
            ).to(x.dtype)
        else:
            out_TO = ((inputs.numbers_RI.float() * inputs.scales_R[:, None]) @ self.dense_weight().T).to(x.dtype)
        out = out_TO.view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias
