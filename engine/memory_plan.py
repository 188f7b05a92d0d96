"""What an engine of a configuration holds in memory, by configurations and heads of files, before any weight is loaded.

Knows sizes, not tensors. Weights and pools are exact; what a step needs beside them is a bound of its largest tensors: logits and
laws of every node, scores and masks of the longest text.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, PretrainedConfig

from engine.core.config import EngineConfig
from engine.draft.models.head import head_shape
from engine.graph_setup import table_capacity, why_not_replayed
from engine.model.causal_lm import loaded_dtype, weights_dtype
from engine.model.linears import NATIVE, fastest_linears
from engine.native.linear import weight_bytes
from engine.native.passes import cache_dtype
from engine.weights import WeightsError, resolve
from engine.weights.stored import num_parameters, parameters_in

GB = 1e9
_LAW_BYTES = 4 * 4  # a node's logits, edited logits, law and draft law, float32
_SCORE_BYTES = 3 * 4  # a score and what is made of it, in one layer at a time
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes by what they are for."""

    weights: int
    draft_weights: int
    cache: int
    draft_cache: int
    step: int
    replays: int = 0

    @property
    def total(self) -> int:
        """All together."""
        return self.weights + self.draft_weights + self.cache + self.draft_cache + self.step + self.replays

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "drafter's weights": self.draft_weights,
            "cache": self.cache,
            "drafter's cache": self.draft_cache,
            "a step": self.step,
            "replayed passes": self.replays,
        }
        return ", ".join(f"{name} {count / GB:.2f} GB" for name, count in parts.items() if count)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a device has for us, and those that are free now."""

    total: int
    free: int


def memory_need(config: EngineConfig, draft_dtype: str, device: torch.device) -> MemoryNeed:
    """Return what an engine needs; `draft_dtype` is its drafter's precision. Raises WeightsError.

    Weights are counted as they are loaded or as they are kept, whichever is more.
    """
    target, num_slots = configuration_of(config.model), config.scheduler.num_slots + 1  # and nobody's
    weights, draft_weights = weights_dtype(config.dtype), weights_dtype(draft_dtype)
    is_native = fastest_linears(device) == NATIVE
    kept, draft_kept = (cache_dtype(config.dtype), torch.float32) if is_native else (weights, draft_weights)
    return MemoryNeed(
        weights=_model_bytes(config.model, config.dtype, is_native),
        draft_weights=_draft_bytes(config, draft_dtype, is_native),
        cache=num_slots * cache_bytes_per_token(target, kept),
        draft_cache=num_slots * _draft_bytes_per_token(config, draft_kept, cache_dtype(draft_dtype) if is_native else None),
        step=_step_bytes(config, target),
        replays=_replay_bytes(config, target, device),
    )


def _model_bytes(reference: str, precision: str, is_native: bool) -> int:
    """Return what a model's weights take.

    Our library takes them from the format of the file. It keeps embeddings in float32, and beside them the output head that is
    tied to them.
    """
    folder = resolve(reference).folder
    count = num_parameters(folder)
    if not is_native:
        return count * weights_dtype(precision).itemsize
    loaded = count * loaded_dtype(folder, precision, NATIVE).itemsize
    text = configuration_of(reference).get_text_config()
    embeddings = int(text.vocab_size * text.hidden_size)
    packed = count if text.tie_word_embeddings else count - embeddings
    kept = int(packed * weight_bytes(precision)) + embeddings * torch.float32.itemsize
    return max(loaded, kept)


def _draft_bytes(config: EngineConfig, precision: str, is_native: bool) -> int:
    """Return what the drafter's weights take; a file that cannot be read has none, and is refused by its reader."""
    size = 0 if config.draft_model is None else _model_bytes(config.draft_model, precision, is_native)
    for file in filter(None, (config.head, config.lens)):
        with suppress(OSError, SafetensorError):
            size += parameters_in(Path(file)) * weights_dtype(precision).itemsize
    return size


def _draft_bytes_per_token(config: EngineConfig, dtype: torch.dtype, native: torch.dtype | None) -> int:
    """Return what a drafter keeps of a token: keys and values of its own, and a head a state or feature to read.

    `dtype` is a draft model's, which our library may not know. A head that torch runs keeps features in it and all else in
    float32 (on a GPU that is more than it needs); one that our library runs keeps its states in float32, the target's in float16
    and keys in `native`.
    """
    if config.draft_model is not None:
        return cache_bytes_per_token(configuration_of(config.draft_model), dtype)
    if config.head is not None:
        with suppress(OSError, SafetensorError, ValueError):
            shape = head_shape(Path(config.head))
            keys = 2 * shape.num_layers * shape.num_kv_heads * shape.head_size
            if native is None:
                return keys * torch.float32.itemsize + shape.width * dtype.itemsize
            kept = len(shape.feature_layers) * shape.target_width * torch.float16.itemsize
            return keys * native.itemsize + shape.width * torch.float32.itemsize + kept
    return 0


def _step_bytes(config: EngineConfig, target: PretrainedConfig) -> int:
    """Return what the largest step holds beside weights and caches: all its tokens nodes, or one chunk at a text's end.

    A request may ask for a tree of any size, and for the laws of its prompt: nothing else bounds the nodes of a step.
    """
    text, limits = target.get_text_config(), config.scheduler
    num_nodes = limits.max_step_tokens
    longest = min(limits.max_model_len, limits.num_slots, getattr(text, "max_position_embeddings", None) or limits.max_model_len)
    num_scores = limits.max_step_tokens * longest
    return int(num_nodes * text.vocab_size * _LAW_BYTES + num_scores * (text.num_attention_heads * _SCORE_BYTES + 1 + 8))


def _replay_bytes(config: EngineConfig, target: PretrainedConfig, device: torch.device) -> int:
    """Return what passes that are replayed keep: the table that they read, and the target's logits and the drafter's.

    What is between is of the size of a step's own, which has it no longer.
    """
    text, limits = target.get_text_config(), config.scheduler
    if why_not_replayed(config, target, device) is not None:
        return 0
    num_models = 1 + (config.draft_model is not None or config.head is not None)
    rows = num_models * limits.max_step_tokens * text.vocab_size
    return int((rows + table_capacity(limits)) * torch.float32.itemsize)


def memory_of(device: torch.device) -> Memory:
    """Return the memory of a device: a graphics card's, or the machine's within the limit of a container."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Memory(int(total), int(free))
    total = free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").is_file() else []
    for line in lines:
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else "max"
    if limit.isdecimal():
        total = min(total, int(limit))
    return Memory(total, min(free, total))


def shortage(need: MemoryNeed, device: torch.device) -> str | None:
    """Return why an engine cannot be: it needs more than is free on a card, or than a machine has; None if it can.

    A machine's memory is taken as slots are used, and what others hold of it now they may give back.
    """
    memory = memory_of(device)
    room = memory.free if device.type == "cuda" else memory.total
    if need.total <= room:
        return None
    asked = "smaller num_slots and max_step_tokens make it less"
    return f"{need.total / GB:.2f} GB are needed ({need}), {device} has {room / GB:.2f}; {asked}"


def configuration_of(reference: str) -> PretrainedConfig:
    """Return the configuration of a model; raise WeightsError if it cannot be read."""
    folder = resolve(reference).folder
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise WeightsError(f"the configuration of {folder} cannot be read: {' '.join(str(error).split())}") from error


def cache_bytes_per_token(model: PretrainedConfig, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in every layer, by the model's configuration."""
    text = model.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * width * dtype.itemsize)
