"""Activations whose numbers do not depend on where in an array they lie.

torch computes the last numbers of an array, or of a thread's part of it, by another formula than those in its middle, so that a
row's SiLU depends on the rows beside it. Of the operations below each number has one value.
"""

import math

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation

_INNER, _CUBIC = math.sqrt(2.0 / math.pi), 0.044715


class SteadySiLU(nn.Module):
    """x / (1 + e^-x)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return it number by number."""
        return x / torch.neg(x).exp_().add_(1.0)


class SteadyGELUTanh(nn.Module):
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))."""

    def forward(self, x: Tensor) -> Tensor:
        """Return it number by number."""
        inner = (x * x).mul_(_CUBIC).add_(1.0).mul_(x).mul_(_INNER)
        return inner.tanh_().add_(1.0).mul_(x).mul_(0.5)


_STEADY: dict[type[nn.Module], type[nn.Module]] = {nn.SiLU: SteadySiLU, SiLUActivation: SteadySiLU, GELUTanh: SteadyGELUTanh}
_MODULES = {nn.SiLU.__module__, SiLUActivation.__module__}  # where activations are defined


def steady_activations(model: nn.Module) -> None:
    """Replace a model's activations in place; raise ValueError for one of which no steady form is known."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in _STEADY:
                setattr(parent, name, _STEADY[type(child)]())
            elif type(child).__module__ in _MODULES and type(child) is not nn.ReLU:
                raise ValueError(f"{type(child).__name__} has no form whose numbers do not depend on their place")
