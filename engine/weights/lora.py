"""Reads LoRA adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors.

What is not honoured exactly is refused by name, before any weight of the base is loaded. The tensors name the adapted layers.
Shape key: R rank, I inputs, O outputs.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from engine.utils.one_line import one_line
from engine.weights.errors import UnusableReference
from engine.weights.pretrained import empty_module

MAX_RANK = 512
_CONFIG, _WEIGHTS, _PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_PREFIX = "base_model.model."
# Keys that are read, and keys that do not change a trained adapter's outputs. Another key must be null, false or empty.
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "bias"}
_READ |= {"init_lora_weights"}
_NEUTRAL = {"auto_mapping", "base_model_name_or_path", "revision", "task_type", "peft_version", "inference_mode"}
_NEUTRAL |= {"lora_dropout", "layers_to_transform", "layers_pattern", "exclude_modules", "megatron_config", "megatron_core"}
_NEUTRAL |= {"qalora_group_size", "loftq_config", "corda_config", "eva_config", "lora_ga_config", "runtime_config"}
_NEUTRAL |= {"ensure_weight_tying"}
_KEEPS_BASE = {"gaussian", "eva", "orthogonal"}  # kinds of initial weights that leave the base as it was
_KINDS = {  # of tensors that are refused, by a part of their name
    "lora_magnitude_vector": "DoRA",
    "lora_B.bias": "lora_bias",
    "lora_embedding_": "adapted embeddings",
    "token_adapter": "trainable_token_indices",
    "lora_": "an unknown tensor",
}
_MODULES = "modules_to_save or saved embeddings"  # a whole weight under the layer's own name


class UnusableAdapter(UnusableReference):
    """A LoRA adapter cannot be read, or cannot be honoured exactly. The message is one line."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The term `x A^T B^T` that an adapter adds to a layer's output, in float32. `b_OR` includes the adapter's scale."""

    a_RI: Float[Tensor, "R I"]
    b_OR: Float[Tensor, "O R"]

    @property
    def delta_OI(self) -> Float[Tensor, "O I"]:
        """What merging adds to the layer's weight."""
        return self.b_OR @ self.a_RI


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: its terms by the names of the base's layers."""

    name: str
    layers: Mapping[str, LowRank]

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for low in self.layers.values() for tensor in (low.a_RI, low.b_OR))


def read_adapter(name: str, folder: Path) -> Adapter:
    """Return the adapter of a PEFT folder; raise UnusableAdapter."""
    try:
        config = _checked_config(_json(folder / _CONFIG))
        if not (folder / _WEIGHTS).is_file():
            is_pickled = (folder / _PICKLE).is_file()
            raise ValueError(f"{_PICKLE} is a pickle, which is never read" if is_pickled else f"there is no {_WEIGHTS}")
        layers = _layers(load_file(folder / _WEIGHTS), config)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, re.error) as error:
        raise UnusableAdapter(f"lora {name} in {folder}: {one_line(error)}") from error
    return Adapter(name, layers)


def require_fitting(adapters: Sequence[Adapter], folder: Path) -> None:
    """Raise UnusableAdapter unless the model in `folder` has the adapters' layers, with their shapes. Reads no weights."""
    module = empty_module(folder)
    modules, output = dict(module.named_modules()), module.get_output_embeddings()
    for adapter in adapters:
        for name, low in adapter.layers.items():
            if (why := _why_unfit(name, low, modules.get(name), output)) is not None:
                raise UnusableAdapter(f"lora {adapter.name}: {why}")


def _why_unfit(name: str, low: LowRank, layer: nn.Module | None, output: nn.Module) -> str | None:
    """Return why a layer cannot have a term, or None."""
    if layer is None:
        return f"the model has no layer {name}"
    if layer is output:
        return f"an adapted output layer ({name}) is not supported"
    if type(layer) is not nn.Linear or ".experts." in name:
        return f"{name} is no linear layer that reads every token"
    shape, own = (low.b_OR.shape[0], low.a_RI.shape[1]), (layer.out_features, layer.in_features)
    return None if shape == own else f"{name} has shape {shape}, the model's {own}: the adapter has another base"


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"there is no {path.name}")
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return content


def _checked_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration; raise ValueError for a feature that is not honoured."""
    if config.get("peft_type") != "LORA":
        raise ValueError(f"peft_type is {config.get('peft_type')!r}, not LORA")
    if (bias := config.get("bias", "none")) != "none":
        raise ValueError(f"bias {bias!r} is not supported")
    init = config.get("init_lora_weights", True)
    if not isinstance(init, bool) and init not in _KEEPS_BASE:
        raise ValueError(f"init_lora_weights {init!r} is not supported: it changes the base model")
    for key in config.keys() - _READ - _NEUTRAL:
        if config[key] not in (None, False, "", [], {}):
            raise ValueError(f"{key} is not supported")
    return config


def _layers(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, LowRank]:
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        found = re.fullmatch(rf"{re.escape(_PREFIX)}(.+)\.lora_([AB])\.weight", key)
        if found is None:
            kind = next((kind for part, kind in _KINDS.items() if part in key), _MODULES)
            raise ValueError(f"{kind} is not supported ({key})")
        pairs.setdefault(found[1], {})[found[2]] = tensor
    if not pairs:
        raise ValueError(f"{_WEIGHTS} has no adapted layer")
    for target in _missing_targets(config.get("target_modules"), pairs):
        raise ValueError(f"target module {target} has no tensors")
    return {name: _low_rank(name, pair, config) for name, pair in pairs.items()}


def _missing_targets(targets: object, names: Mapping[str, Any]) -> Iterator[str]:
    """Yield the listed modules without tensors. A regular expression and `all-linear` list none."""
    for target in targets if isinstance(targets, list) else ():
        if not any(name == target or name.endswith(f".{target}") for name in names):
            yield target


def _low_rank(name: str, pair: Mapping[str, Tensor], config: Mapping[str, Any]) -> LowRank:
    if pair.keys() != {"A", "B"}:
        raise ValueError(f"{name} has only one of lora_A and lora_B")
    a_RI, b_OR = pair["A"].float(), pair["B"].float()
    rank = int(_of_pattern(config.get("rank_pattern"), name, config["r"]))
    alpha = float(_of_pattern(config.get("alpha_pattern"), name, config["lora_alpha"]))
    if not 0 < rank <= MAX_RANK:
        raise ValueError(f"{name} has rank {rank}; the limit is {MAX_RANK}")
    if a_RI.dim() != 2 or b_OR.dim() != 2 or a_RI.shape[0] != rank or b_OR.shape[1] != rank:
        raise ValueError(f"{name} has tensors of shapes {[*a_RI.shape]} and {[*b_OR.shape]}, which do not have rank {rank}")
    if not (a_RI.isfinite().all() and b_OR.isfinite().all() and math.isfinite(alpha)):
        raise ValueError(f"{name} has values that are not finite")
    return LowRank(a_RI, b_OR * (alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)))


def _of_pattern(pattern: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    """Return the value of the first key that matches the end of a layer's name from a dot on, as PEFT does."""
    return next((value for key, value in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", name)), default)
