"""LoRA adapters in PEFT's format, written by hand, and the merged models that define their texts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.testing import tiny_module
from engine.weights.lora import Adapter, LowRank

TARGETS = ("q_proj", "v_proj", "down_proj")


def layers_of(module: PreTrainedModel, targets: Sequence[str] = TARGETS) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in module.named_modules() if name.rpartition(".")[2] in targets}


def write_adapter(
    folder: Path, family: str = "llama", seed: int = 1, rank: int = 3, tensors: dict[str, Tensor] | None = None, **config: Any
) -> Path:
    """Write an adapter of the tiny model; return the folder. `tensors` are added, `config` replaces keys."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name, layer in layers_of(tiny_module(family)).items():
        found[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, layer.in_features, generator=generator) * 0.3
        found[f"base_model.model.{name}.lora_B.weight"] = torch.randn(layer.out_features, rank, generator=generator) * 0.3
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**found, **(tensors or {})}, folder / "adapter_model.safetensors")
    whole = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "target_modules": [*TARGETS], "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(whole))
    return folder


def random_adapter(name: str, family: str = "llama", seed: int = 1, size: float = 0.5) -> Adapter:
    generator = torch.Generator().manual_seed(seed)

    def low_rank(layer: nn.Linear) -> LowRank:
        sizes = (2, layer.in_features), (layer.out_features, 2)
        return LowRank(*(torch.randn(*one, generator=generator) * size for one in sizes))

    return Adapter(name, {name: low_rank(layer) for name, layer in layers_of(tiny_module(family)).items()})


def merged(adapter: Adapter | None, family: str = "llama") -> PreTrainedModel:
    """Return the tiny model with an adapter merged into its weights in float32."""
    module = tiny_module(family)
    for name, low in adapter.layers.items() if adapter else ():
        module.get_submodule(name).weight.data += low.delta_OI
    return module
