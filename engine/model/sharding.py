"""The layers of a model that several processes, the ranks, share out.

    queries, keys, values, gate, up    by outputs: a rank has its heads and its part of the inner width
    output, down                       by inputs: each rank has a summand, and one all-reduce adds them
    head                               by tokens: an all-gather joins the logits

Each rank has the embeddings and norms as a whole. transformers' plan of the model shards the weights while they are loaded. Its
wrappers of each layer's call are removed: here a layer's weight is a plain tensor, which any kind of linear layer can take.
Shape key: R ranks, D width, O outputs of a rank, M tokens, V vocabulary.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn

from engine.attention.paged.attention import heads_of
from engine.core.config import EngineConfig
from engine.model.linear_backends import linear_of, weight_of
from engine.native.decoder import UnknownDecoder, refuse_by_structure
from engine.weights import UnsupportedModel
from engine.weights.pretrained import empty_module, load_module


class SummedLinear(nn.Module):
    """A linear layer over this rank's part of the inputs, summed over the ranks."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias, linear.bias = linear.bias, None  # type: ignore[assignment]  # added once, not by each rank
        self.linear = linear

    def forward(self, x: Float[Tensor, "*_ I"]) -> Float[Tensor, "*_ D"]:
        """Return the whole layer's output."""
        out: Tensor = self.linear(x)
        dist.all_reduce(out)
        return out if self.bias is None else out + self.bias


class ShardedHead(nn.Module):
    """The output head, of which each rank has consecutive rows; the last rank's are padded to the number of the others."""

    def __init__(self, own_OD: Float[Tensor, "O D"], num_rows: int) -> None:
        super().__init__()
        own = own_rows(num_rows)
        self._first, self._num_own, self._num_rows = own.start, len(own), num_rows
        self.linear: nn.Module = linear_of(nn.functional.pad(own_OD, (0, 0, 0, len(own) - len(own_OD))))

    def forward(self, x: Float[Tensor, "*_ D"]) -> Float[Tensor, "*_ V"]:
        """Return all tokens' logits."""
        own: Tensor = self.linear(x).contiguous()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        return torch.cat(parts, dim=-1)[..., : self._num_rows]

    def rows(self, ids_M: Int[Tensor, " M"]) -> Float[Tensor, "M D"]:
        """Return the weights of some tokens. Every rank must call it."""
        places_M = ids_M - self._first
        is_own_M = (places_M >= 0) & (places_M < self._num_own)
        rows_MD = weight_of(self.linear)[places_M.clamp(0, self._num_own - 1)].masked_fill(~is_own_M[:, None], 0.0)
        dist.all_reduce(rows_MD)
        return rows_MD


def own_rows(num_rows: int) -> range:
    """Return this rank's rows of a head. They may exceed the number of all."""
    num_own = -(-num_rows // dist.get_world_size())
    return range(dist.get_rank() * num_own, (dist.get_rank() + 1) * num_own)


def why_not_sharded(config: EngineConfig, device: torch.device) -> str | None:
    """Return why the settings exclude several ranks; None if they do not."""
    if config.dtype not in ("float32", "bfloat16"):
        return f"torch runs the ranks, in float32 or bfloat16, not {config.dtype}"
    if config.lora:
        return "LoRA adapters are not sharded"
    if config.deterministic:
        return "deterministic: passes of several ranks round by their width"
    if config.drafter == "early-exit":
        return "drafter early-exit runs layers of the target apart from its passes"
    if device.type == "cpu":
        return "torch shards on this machine's accelerator, not on the CPU" if torch.accelerator.is_available() else None
    if device != torch.device(device.type):
        return f"rank N uses the N-th GPU, so that the device must be {device.type}"
    if torch.cuda.device_count() < config.tensor_parallel:
        return f"there are {torch.cuda.device_count()} GPUs"
    return None


def require_shardable(folder: Path, num_ranks: int) -> None:
    """Raise UnsupportedModel, before any weight is loaded, unless ranks can share out the model of a folder."""
    module = empty_module(folder)
    try:
        refuse_by_structure(module)
    except UnknownDecoder as error:
        raise UnsupportedModel(f"tensor_parallel: {error}") from error
    text = module.config.get_text_config()
    for name, count in (("key-value heads", heads_of(text).num), ("inner width", int(text.intermediate_size))):
        if count % num_ranks:
            raise UnsupportedModel(f"tensor_parallel: {num_ranks} ranks cannot share {name} of {count}")


def load_shard(folder: Path, dtype: torch.dtype, num_ranks: int) -> nn.Module:
    """Return this rank's part of a folder's model. Every rank must call it, in one process group."""
    from torch.distributed.tensor import DTensor  # here, because the import takes long
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=num_ranks)
    module = load_module(folder, dtype=dtype, attn_implementation="eager", distributed_config=config)
    module.config.distributed_config = None
    for part in module.modules():
        vars(part).pop("forward", None)  # transformers' wrapper
    embeddings, head = module.get_input_embeddings(), module.get_output_embeddings()
    is_tied = head.weight is embeddings.weight
    num_rows = len(head.weight)
    if isinstance(embeddings.weight, DTensor):
        embeddings.weight = _parameter(embeddings.weight.full_tensor())
    own = own_rows(num_rows)
    own_OD = embeddings.weight[own.start : own.stop] if is_tied else head.weight.to_local()
    module.set_output_embeddings(ShardedHead(own_OD, num_rows))
    for parent in list(module.modules()):
        for name, part in list(parent.named_children()):
            if type(part) is nn.Linear and isinstance(part.weight, DTensor):
                setattr(parent, name, _own_part(part))
    return module  # type: ignore[no-any-return]


def _own_part(linear: Any) -> nn.Module:
    """Return a layer over plain tensors that computes this rank's part, or the sum of all ranks' parts."""
    is_by_inputs = linear.weight.placements[0].dim == 1
    linear.weight = _parameter(linear.weight.to_local())
    if linear.bias is not None:
        linear.bias = _parameter(linear.bias.to_local())
    linear.out_features, linear.in_features = linear.weight.shape
    return SummedLinear(linear) if is_by_inputs else linear


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
