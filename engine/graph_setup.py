"""Decides which passes of target and drafter are padded and replayed as CUDA graphs. Knows no requests."""

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.attention.paged.attention import heads_of, unsupported_reason
from engine.attention.paged.buffer import TableBuffer
from engine.attention.paged.graph_recorder import CudaGraphs, GraphRefused, Unrecorded
from engine.attention.paged.graphs import GraphResources
from engine.attention.paged.padding_shapes import PaddingShapes
from engine.core.config import EngineConfig, SchedulerConfig
from engine.draft.checkpoints.chained import Eagle3Drafter
from engine.draft.checkpoints.one_pass import DFlashDrafter, MedusaDrafter
from engine.draft.drafter import Drafter
from engine.draft.models.draft_model import ModelDrafter
from engine.draft.models.head_drafter import HeadDrafter
from engine.model.causal_lm import CausalModel, weights_dtype
from engine.model.target import Target
from engine.weights.layer_sizes import has_states
from engine.weights.stored_config import Configuration


class Prepared(Protocol):
    """Passes that can be recorded ahead of time."""

    def prepare(self) -> None:
        """Record the passes that are not recorded yet."""
        ...


def table_capacity(limits: SchedulerConfig) -> int:
    """Return the capacity of the input table: every sequence's slots, and a mask of the step's tokens.

    A larger step is not replayed.
    """
    return limits.max_running * limits.max_model_len + limits.max_step_tokens * limits.max_step_tokens


def why_not_replayed(config: EngineConfig, target: Configuration, device: torch.device) -> str | None:
    """Return why passes of a target that is not loaded yet would not be replayed; None if they would."""
    if has_states(target.get_text_config()):
        return "recurrent layers follow the paths of each batch"
    heads = heads_of(target)
    reason = unsupported_reason(device, heads.size, heads.num_shared, weights_dtype(config.dtype))
    return _required_directly(config) or reason


def _required_directly(config: EngineConfig) -> str | None:
    if config.kv_canary:
        return "kv_canary checks what is read"
    if config.tensor_parallel > 1:
        return "the ranks follow each pass"
    return "LoRA adapters differ from pass to pass" if config.lora else None


def static_steps(config: EngineConfig, model: CausalModel) -> GraphResources | None:
    """Return the buffers, padding shapes and recorder for a model's passes; None if they are not replayed.

    Raises GraphRefused if graphs are required but not possible.
    """
    reason = _required_directly(config)
    if model.attend is None or reason is not None:
        reason = reason or f"on {model.device} attention gathers keys"
        if config.cuda_graphs == "on":
            raise GraphRefused(reason)
        return None
    recorder = Unrecorded() if config.cuda_graphs == "off" else CudaGraphs(is_required=config.cuda_graphs == "on")
    limits = config.scheduler
    shapes = PaddingShapes(limits.max_step_tokens, is_by_row=model.has_same_bits)
    return GraphResources(TableBuffer(table_capacity(limits), model.device), shapes, recorder)


def record(steps: GraphResources, limits: SchedulerConfig, target: Target, drafter: Drafter | None) -> Sequence[Prepared]:
    """Set up replay of the target's passes, and of the drafter's if it supports it. Return them for preparation."""
    prepared: list[Prepared] = [target.record(steps)]
    attend = target.model.attend
    if isinstance(drafter, ModelDrafter) and drafter.reads_tables:
        prepared.append(drafter.record(steps))
    elif isinstance(drafter, HeadDrafter | Eagle3Drafter) and attend is not None and drafter.kernel_reason is None:
        end = limits.max_model_len + limits.max_step_tokens  # of positions, including positions of drafted nodes
        prepared.append(drafter.record(steps, attend, end))
    elif isinstance(drafter, DFlashDrafter | MedusaDrafter):
        drafter.recorder = steps.recorder
    return prepared
