"""Tiny models run by our library, and texts fed to them token by token: what everything else has to have the bits of."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.attention.packing import pack
from engine.attention.segments import chain_segment
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel, adopt, weights_dtype
from engine.model.linear_backends import NATIVE
from engine.testing import tiny_module
from tests.model.passes import CPU, SceneRow, node_logits

KNOWN = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
PRECISIONS = ("float32", "bfloat16", "int8", "compact")


@cache
def native(family: str, precision: str = "float32") -> CausalModel:
    """Return a tiny model, loaded in a precision."""
    return adopt(with_weights(tiny_module(family), weights_dtype(precision)), CPU, NATIVE, precision)


def with_weights(module: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return the module with its weights in a number format; rotary frequencies stay float32, as when a model is loaded."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module


def alone(model: CausalModel, text: Sequence[int]) -> Tensor:
    """Return the logits [T, V] after each token of the text, fed one by one."""
    pools, first = KVCache(len(text), CPU), torch.tensor([0])
    batches = [pack([chain_segment([token_id], place, range(len(text)))], CPU) for place, token_id in enumerate(text)]
    return torch.cat([model.forward(batch, pools, first) for batch in batches])


def is_same(model: CausalModel, rows: Sequence[SceneRow], **mutants: object) -> bool:
    """Return whether every node's logits are those of its path fed alone, to the bit."""
    return all(
        torch.equal(logits_NV[list(row.tree.path(leaf))], alone(model, row.path_texts()[leaf])[len(row.text) - 1 :])
        for logits_NV, row in zip(node_logits(model, rows, **mutants), rows, strict=True)  # type: ignore[arg-type]
        for leaf in range(row.tree.num_nodes)
        if leaf not in row.tree.parents
    )
