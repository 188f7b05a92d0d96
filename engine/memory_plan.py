"""The memory that an engine needs, computed from configurations and file headers before any weight is loaded.

Knows sizes, not tensors. Weights and pools are exact. The memory of a step is an upper bound of its largest tensors: every node's
logits and distribution, the longest text's scores and masks.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from engine.core.config import EngineConfig
from engine.draft.checkpoints.files import CheckpointFiles, UnusableCheckpoint
from engine.draft.checkpoints.read import read_checkpoint
from engine.draft.models.head import head_shape
from engine.graph_setup import table_capacity, why_not_replayed
from engine.model.causal_lm import loaded_dtype, weights_dtype
from engine.model.linear_backends import NATIVE, fastest_linears
from engine.native.decoder_pass import cache_dtype
from engine.native.linear import weight_bytes
from engine.weights import resolve
from engine.weights.facts import read_facts
from engine.weights.layer_sizes import key_bytes, state_bytes
from engine.weights.stored_config import Configuration, read_config
from engine.weights.weight_headers import num_parameters, parameters_in

GB = 1e9
_NODE_BYTES = 4 * 4  # per node and token id: logits, edited logits, target and draft probability, float32
_SCORE_BYTES = 3 * 4  # per attention score, with intermediate results; layers run one at a time
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes by purpose."""

    weights: int
    draft_weights: int
    cache: int
    draft_cache: int
    step: int
    replays: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
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
    """The bytes of a device that this process may use, and the bytes that are free now."""

    total: int
    free: int


def memory_need(config: EngineConfig, draft_dtype: str, device: torch.device) -> MemoryNeed:
    """Return the memory that an engine needs; `draft_dtype` is its drafter's precision. Raises WeightsError.

    Weights are counted in the format in which they are loaded or kept, whichever is larger.
    """
    target, num_slots = configuration_of(config.model), config.scheduler.num_slots + 1  # and one that no sequence owns
    weights, draft_weights = weights_dtype(config.dtype), weights_dtype(draft_dtype)
    is_native = fastest_linears(device) == NATIVE
    is_target_native = is_native and config.dtype != "fp8" and config.tensor_parallel == 1
    on_host = config.tensor_parallel if device.type == "cpu" else 1  # ranks that share the memory
    kept = cache_dtype(config.dtype) if is_target_native else weights
    draft_kept = torch.float32 if is_native else draft_weights
    return MemoryNeed(
        weights=on_host * _rank_bytes(config, is_target_native),
        draft_weights=_draft_bytes(config, draft_dtype, is_native),
        cache=on_host * num_slots * key_bytes(target.get_text_config(), kept.itemsize) // config.tensor_parallel
        + _states_bytes(config, target, kept),
        draft_cache=num_slots * _draft_bytes_per_token(config, draft_kept, cache_dtype(draft_dtype) if is_native else None),
        step=_step_bytes(config, target),
        replays=_replay_bytes(config, target, device),
    )


def _rank_bytes(config: EngineConfig, is_native: bool) -> int:
    """Return the bytes of a rank's part of the target: the embeddings, and its share of all other weights."""
    whole = _model_bytes(config.model, config.dtype, is_native)
    if config.tensor_parallel == 1:
        return whole
    text = configuration_of(config.model).get_text_config()
    embeddings = int(text.vocab_size * text.hidden_size) * weights_dtype(config.dtype).itemsize
    return embeddings + -(-(whole - embeddings) // config.tensor_parallel)


def _model_bytes(reference: str, precision: str, is_native: bool) -> int:
    """Return the bytes of a model's weights.

    The native library loads weights in the format of the file. It keeps embeddings in float32, and a copy of a tied output head.
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
    """Return the bytes of the drafter's weights. An unreadable file counts 0, since loading it fails later."""
    size = 0 if config.draft_model is None else _model_bytes(config.draft_model, precision, is_native)
    for file in filter(None, (config.head, config.lens)):
        with suppress(OSError, SafetensorError):
            size += parameters_in(Path(file)) * weights_dtype(precision).itemsize
    if config.checkpoint is not None:
        with suppress(UnusableCheckpoint):
            size += CheckpointFiles.open(Path(config.checkpoint)).num_parameters * weights_dtype(precision).itemsize
    return size


def _draft_bytes_per_token(config: EngineConfig, dtype: torch.dtype, native: torch.dtype | None) -> int:
    """Return the bytes that a drafter keeps per token: its own keys and values, and a head's state or features.

    `dtype` is a draft model's, which the native library may not support. A head that torch runs keeps features in `dtype` and the
    rest in float32, an upper bound on a GPU. A head that the native library runs keeps its states in float32, the target's in
    float16 and keys in `native`.
    """
    if config.draft_model is not None:
        return key_bytes(configuration_of(config.draft_model).get_text_config(), dtype.itemsize)
    if config.head is not None:
        with suppress(OSError, SafetensorError, ValueError):
            shape = head_shape(Path(config.head))
            keys = 2 * shape.num_layers * shape.num_kv_heads * shape.head_size
            if native is None:
                return keys * torch.float32.itemsize + shape.width * dtype.itemsize
            kept = len(shape.feature_layers) * shape.target_width * torch.float16.itemsize
            return keys * native.itemsize + shape.width * torch.float32.itemsize + kept
    if config.checkpoint is not None:
        with suppress(UnusableCheckpoint):
            num_pairs, width = read_checkpoint(Path(config.checkpoint), read_facts(resolve(config.model).folder)).num_kept
            return num_pairs * torch.float32.itemsize + width * dtype.itemsize
    return 0


def _step_bytes(config: EngineConfig, target: Configuration) -> int:
    """Return the bytes of the largest step without weights and caches: all tokens are nodes, or one chunk of the longest text.

    A request may set a tree of any size and may request prompt log-probabilities, so only the token budget bounds the nodes.
    """
    text, limits = target.get_text_config(), config.scheduler
    num_nodes = limits.max_step_tokens
    longest = min(limits.max_model_len, limits.num_slots, getattr(text, "max_position_embeddings", None) or limits.max_model_len)
    num_scores, num_heads = limits.max_step_tokens * longest, getattr(text, "num_attention_heads", 0)
    return int(num_nodes * text.vocab_size * _NODE_BYTES + num_scores * (num_heads * _SCORE_BYTES + 1 + 8))


def _states_bytes(config: EngineConfig, target: Configuration, dtype: torch.dtype) -> int:
    """Return the bytes of recurrent states: of every node of a step, and of each sequence the last one and its new one.

    Their pools double, so they may be twice as large, and half of that is copied.
    """
    limits = config.scheduler
    return 3 * (limits.max_step_tokens + 2 * limits.max_running) * state_bytes(target.get_text_config(), dtype.itemsize)


def _replay_bytes(config: EngineConfig, target: Configuration, device: torch.device) -> int:
    """Return the bytes of replayed passes: the input table, and the logits of target and drafter.

    Their intermediate tensors replace a step's tensors and are not counted twice.
    """
    text, limits = target.get_text_config(), config.scheduler
    if why_not_replayed(config, target, device) is not None:
        return 0
    num_models = 1 + any(one is not None for one in (config.draft_model, config.head, config.checkpoint))
    rows = num_models * limits.max_step_tokens * text.vocab_size
    return int((rows + table_capacity(limits)) * torch.float32.itemsize)


def memory_of(device: torch.device) -> Memory:
    """Return the memory of a GPU, or of the machine within its container limit."""
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
    """Return an error text if the engine does not fit into a GPU's free or the machine's total memory, else None.

    On a CPU the total counts: memory is committed only as slots are used, and other processes may free theirs.
    """
    memory = memory_of(device)
    room = memory.free if device.type == "cuda" else memory.total
    if need.total <= room:
        return None
    advice = "smaller num_slots and max_step_tokens make it less"
    return f"{need.total / GB:.2f} GB are needed ({need}), {device} has {room / GB:.2f}; {advice}"


def configuration_of(reference: str) -> Configuration:
    """Return the configuration of a model. Raises WeightsError if it cannot be read, UnsupportedModel if it is refused."""
    return read_config(resolve(reference).folder)
