"""The target's first layers as a drafter: an affine lens maps their hidden state to an estimate of the last layer's.

Early exit without a lens overlaps little with small models' distributions. The lens is a least-squares map from the hidden state
after `num_layers` layers to the last one. The layers write the same keys as the target. So the target's cache serves both, and no
token is fed twice. Shape key: T tokens, D model width.
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.core.step_plan import Feeding
from engine.draft.models.draft_model import ModelDrafter
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel


@dataclass(frozen=True)
class Lens:
    """h_last ~ h W + b for the hidden state h after `num_layers` layers; `recipe` describes how it was fitted."""

    num_layers: int
    weight_DD: Float[Tensor, "D D"]
    bias_D: Float[Tensor, " D"]
    recipe: dict[str, str]

    def save(self, path: Path) -> None:
        """Write a bfloat16 safetensors file with the recipe in its metadata."""
        tensors = {"weight": self.weight_DD.bfloat16().contiguous(), "bias": self.bias_D.bfloat16()}
        save_file(tensors, path, metadata={"num_layers": str(self.num_layers), "recipe": json.dumps(self.recipe)})

    def final_norm(self, target: CausalModel) -> nn.Module:
        """Return the module that replaces the target's last norm; raise ValueError if the lens does not fit the target."""
        inner = target.module.model
        width = inner.embed_tokens.weight.shape[1]
        if self.weight_DD.shape != (width, width) or not 0 < self.num_layers < len(inner.layers):
            raise ValueError(f"the lens ({self.num_layers} layers, width {len(self.bias_D)}) does not fit the target")
        return _LensedNorm(self, inner.norm, inner.embed_tokens.weight)

    @classmethod
    def load(cls, path: Path) -> "Lens":
        """Read a file that `save` wrote; raise ValueError for any other file."""
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if "num_layers" not in metadata or set(file.keys()) != {"weight", "bias"}:
                raise ValueError(f"{path} is not a lens")
            weight_DD, bias_D = file.get_tensor("weight").float(), file.get_tensor("bias").float()
            return cls(int(metadata["num_layers"]), weight_DD, bias_D, json.loads(metadata["recipe"]))


class _LensedNorm(nn.Module):
    """The lens, then the target's final norm."""

    def __init__(self, lens: Lens, norm: nn.Module, like: Tensor) -> None:
        super().__init__()
        width = len(lens.bias_D)
        self.linear = nn.Linear(width, width, device=like.device, dtype=like.dtype)
        with torch.no_grad():
            self.linear.weight.copy_(lens.weight_DD.t())
            self.linear.bias.copy_(lens.bias_D)
        self.norm = norm

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(self.linear(hidden))  # type: ignore[no-any-return]


def truncated_model(target: CausalModel, num_layers: int, final: nn.Module) -> CausalModel:
    """Return a model of the target's first layers that shares its weights and ends with `final` instead of the last norm."""
    outer: Any = copy.copy(target.module)
    outer._modules = dict(outer._modules)
    config = copy.deepcopy(target.module.config)
    config.num_hidden_layers = num_layers
    inner: Any = copy.copy(target.module.model)
    inner._modules = dict(inner._modules)
    inner._modules["layers"] = nn.ModuleList(target.module.model.layers[:num_layers])
    inner._modules["norm"] = final
    inner.config = outer.config = config
    outer._modules["model"] = inner
    model = CausalModel.__new__(CausalModel)
    model.module, model.device, model.native, model.attend, model.memories = outer, target.device, None, target.attend, []
    return model


def early_exit_drafter(target: CausalModel, target_cache: KVCache, lens: Lens) -> ModelDrafter:
    """Return the drafter; raise ValueError if the lens does not fit the target."""
    model = truncated_model(target, lens.num_layers, lens.final_norm(target))
    return ModelDrafter(f"early-exit {lens.num_layers}", model, target_cache, Feeding.TARGET_CACHE)
