"""Which of an engine's passes are padded and replayed: the target's, and those of what drafts beside it. Knows no requests."""

from collections.abc import Sequence
from typing import Protocol

import torch
from transformers import PretrainedConfig

from engine.attention.paged.attention import heads_of, unsupported_reason
from engine.attention.paged.buffer import TableBuffer
from engine.attention.paged.graph_recorder import CudaGraphs, GraphRefused, Unrecorded
from engine.attention.paged.graphs import GraphResources
from engine.attention.paged.padding_shapes import PaddingShapes
from engine.core.config import EngineConfig, SchedulerConfig
from engine.draft.drafter import Drafter
from engine.draft.models.draft_model import ModelDrafter
from engine.draft.models.head_drafter import HeadDrafter
from engine.model.causal_lm import CausalModel, weights_dtype
from engine.model.target import Target


class Prepared(Protocol):
    """Passes that can be recorded before they come."""

    def prepare(self) -> None:
        """Record what has not been."""
        ...


def table_capacity(limits: SchedulerConfig) -> int:
    """Return the numbers of the largest table of most steps: every sequence's slots, and what every token sees of its tail.

    What is larger runs as it comes.
    """
    return limits.max_running * limits.max_model_len + limits.max_step_tokens * limits.max_step_tokens


def why_as_they_come(config: EngineConfig, target: PretrainedConfig, device: torch.device) -> str | None:
    """Return why passes of a configuration's target would not be padded and replayed, before it is loaded; None if they would."""
    heads = heads_of(target)
    return _CANARY if config.kv_canary else unsupported_reason(device, heads.size, heads.num_shared, weights_dtype(config.dtype))


_CANARY = "kv_canary looks at what is read"


def static_steps(config: EngineConfig, model: CausalModel) -> GraphResources | None:
    """Return what a model's passes are recorded with; None where they run as they come.

    Raises GraphRefused if graphs are demanded where there can be none.
    """
    if model.attend is None or config.kv_canary:
        reason = _CANARY if config.kv_canary else f"on {model.device} attention gathers keys"
        if config.cuda_graphs == "on":
            raise GraphRefused(reason)
        return None
    recorder = Unrecorded() if config.cuda_graphs == "off" else CudaGraphs(is_required=config.cuda_graphs == "on")
    limits = config.scheduler
    return GraphResources(TableBuffer(table_capacity(limits), model.device), PaddingShapes(limits.max_step_tokens), recorder)


def record(steps: GraphResources, limits: SchedulerConfig, target: Target, drafter: Drafter | None) -> Sequence[Prepared]:
    """Let the target's passes be replayed, and the drafter's where it can; return them, to be prepared."""
    prepared: list[Prepared] = [target.record(steps)]
    attend = target.model.attend
    if isinstance(drafter, ModelDrafter) and drafter.reads_tables:
        prepared.append(drafter.record(steps))
    elif isinstance(drafter, HeadDrafter) and attend is not None:
        end = limits.max_model_len + limits.max_step_tokens  # of positions, those of drafted nodes among them
        prepared.append(drafter.record(steps, attend, end))
    return prepared
