"""Reads hidden states out of a model's forward passes.

Shape key: T tokens (packed, or row after row), F tapped layers, D model width.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from engine.model.causal_lm import CausalModel
from engine.native.decoder_pass import Output
from engine.weights import UnsupportedModel


def place_after(count: int, depth: int, is_last_normed: bool = True) -> int:
    """Return the library's index (engine.native.decoder_pass.Output) of the states after a model's first `count` layers."""
    return depth if count == depth and is_last_normed else count - 1


class StateTap:
    """Keeps the states of a model's latest pass after some numbers of layers.

    For the full number of layers it reads the last norm's output, or its input if `is_last_normed` is False. It also reads
    passes of the model's own module, if there is one, which comparisons and offline generation run in place of the library.
    """

    def __init__(self, model: CausalModel, layers: Sequence[int], is_last_normed: bool = True) -> None:
        depth = model.depth
        if not layers or not all(0 < count <= depth for count in layers):
            raise ValueError(f"cannot read the state after {list(layers)} of {depth} layers")
        self._states: dict[int, Tensor] = {}
        self._layers = tuple(layers)
        ends = {count: place_after(count, depth, is_last_normed) for count in layers}
        self._end_watches = [runner.watch(ends.values(), lambda pass_: self._take(pass_, ends)) for runner in model.runners]
        modules = _modules_after(model, layers, is_last_normed) if hasattr(model, "module") else {}  # a stored model has none
        self._hooks = [module.register_forward_hook(self._reader(count)) for count, module in modules.items()]

    def latest(self) -> Float[Tensor, "T F D"]:
        """Return the states of the latest pass, in the model's precision."""
        return torch.stack(self.parts(), dim=1)

    def parts(self) -> list[Float[Tensor, "T D"]]:
        """Return the states of the latest pass, by layer."""
        return [self._states[count] for count in self._layers]

    def close(self) -> None:
        """Stop reading."""
        for hook in self._hooks:
            hook.remove()
        for end_watch in self._end_watches:
            end_watch()
        self._states.clear()

    def _take(self, output: Output, ends: Mapping[int, int]) -> None:
        self._states.update({count: output.after[end] for count, end in ends.items()})

    def _reader(self, count: int) -> Any:
        def read(_module: Any, _args: Any, output: Tensor | tuple[Tensor, ...]) -> None:
            self._states[count] = (output if isinstance(output, Tensor) else output[0]).flatten(0, 1)

        return read


def has_layer_states(model: CausalModel) -> bool:
    """Return whether the states between a model's layers can be read: its layers and last norm are found by name."""
    inner = getattr(getattr(model, "module", None), "model", None)
    return model.native is not None or (hasattr(inner, "layers") and hasattr(inner, "norm"))


def require_trainable(model: CausalModel) -> None:
    """Raise UnsupportedModel unless a drafter that reads the states between layers can be trained for a model."""
    if not has_layer_states(model):
        raise UnsupportedModel(f"{type(model.module).__name__}: the states between its layers cannot be read")
    if model.has_states:
        raise UnsupportedModel(f"{type(model.module).__name__} has recurrent layers; no drafter is trained for these")


def _modules_after(model: CausalModel, layers: Sequence[int], is_last_normed: bool) -> dict[int, Any]:
    """Return the module whose output is the state after each number of layers."""
    inner = model.module.model
    is_normed = {count: count == model.depth and is_last_normed for count in layers}
    return {count: inner.norm if is_normed[count] else inner.layers[count - 1] for count in layers}
