"""Any transformers causal language model, run over packed segments and a slot cache.

Gives a loaded model our attention and linears, and checks first that a tree-masked, chunked pass gives the model's own logits: a
model that we cannot drive exactly (recurrent state, its own masks, learned positions) is refused by name.
Shape key: T packed tokens, N rows of logits, V vocabulary.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.attention import NAME, AttentionContext, UnsupportedAttention
from engine.kv_cache import KVCache
from engine.linears import prepare_linears
from engine.packing import PackedBatch, pack
from engine.segments import chain_segment, tree_segment
from engine.tree import TokenTree

_logger = logging.getLogger(__name__)
_CHECK_LENGTH = 9


class UnsupportedModel(ValueError):
    """The model cannot be run exactly by tree-masked passes."""


class CausalModel:
    """A causal language model and where it runs. Stateless between forwards: caches are arguments."""

    def __init__(self, module: PreTrainedModel, device: torch.device) -> None:
        self.module: Any = module.to(device).eval()
        self.device = device
        self.module.requires_grad_(False)

    @property
    def vocab_size(self) -> int:
        """Rows of the output head."""
        return int(self.module.config.get_text_config().vocab_size)

    @property
    def max_positions(self) -> int:
        """Longest context the model's positions are made for."""
        return int(self.module.config.get_text_config().max_position_embeddings)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, by the model's generation settings, else its configuration."""
        ids = self.module.generation_config.eos_token_id
        if ids is None:
            ids = self.module.config.get_text_config().eos_token_id
        if ids is None:
            return ()
        return tuple(ids) if isinstance(ids, list) else (int(ids),)

    def forward(self, batch: PackedBatch, cache: KVCache, logit_rows_N: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        """Run one pass over the packed tokens; write their keys; return float32 logits of the chosen packed tokens."""
        with torch.inference_mode():
            out = self.module(
                input_ids=batch.input_ids_1T,
                position_ids=batch.position_ids_1T,
                use_cache=False,
                logits_to_keep=logit_rows_N,
                attention_context=AttentionContext(batch, cache),
            )
            return out.logits[0].float()  # type: ignore[no-any-return]


def load_model(folder: Path, dtype: str, device: torch.device, linears: str) -> CausalModel:
    """Load, check and prepare a model. `dtype` is a torch name; `linears` as engine.linears names them."""
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager")
    return adopt(module, device, linears)


def adopt(module: PreTrainedModel, device: torch.device, linears: str = "plain") -> CausalModel:
    """Take a loaded transformers model over: set our attention, check it against the model's own, prepare the linears."""
    model = CausalModel(module, device)
    expected_NV = _own_logits(model)
    module.set_attn_implementation(NAME)
    _check_against(model, expected_NV)
    prepare_linears(model.module, linears)
    return model


def _check_ids(model: CausalModel) -> Tensor:
    return (torch.arange(_CHECK_LENGTH, device=model.device) * 97 + 11) % model.vocab_size


@torch.inference_mode()
def _own_logits(model: CausalModel) -> Tensor:
    """Return the logits of a fixed short text by the model's own causal pass."""
    model.module.set_attn_implementation("eager")
    return model.module(input_ids=_check_ids(model)[None], use_cache=False).logits[0].float()  # type: ignore[no-any-return]


def _check_against(model: CausalModel, expected_NV: Tensor) -> None:
    """Feed the same text as a chunk, then a tree whose one branch is the text's end and whose other is noise; compare."""
    ids = _check_ids(model).tolist()
    cache = KVCache(4 * _CHECK_LENGTH, model.device)
    half = _CHECK_LENGTH // 2
    tail = ids[half:]
    chain = chain_segment(ids[:half], 0, list(range(half)))
    nodes = [(-1, tail[0]), (0, tail[1]), (0, tail[2]), *((v, t) for v, t in zip([1, 3, 4, 5], tail[2:]))]
    draws = tuple(tuple(c for c, (parent, _) in enumerate(nodes) if parent == v) for v in range(len(nodes)))
    tree = TokenTree(tuple(p for p, _ in nodes), tuple(t for _, t in nodes), draws)
    segment = tree_segment([tail[0]], tree, half, list(range(half + len(nodes))))
    deepest = tree.path(len(nodes) - 1)
    rows = torch.tensor(deepest, device=model.device)
    try:
        model.forward(pack([chain], model.device), cache, torch.tensor([half - 1], device=model.device))
        logits_NV = model.forward(pack([segment], model.device), cache, rows)
    except (UnsupportedAttention, TypeError) as error:
        raise UnsupportedModel(f"{type(model.module).__name__} cannot be driven: {error}") from error
    wanted_NV = expected_NV[half : half + len(deepest)]
    error_size = float((logits_NV - wanted_NV).abs().max() / wanted_NV.abs().max())
    _logger.info("model check: relative error of a tree-masked pass %.1e", error_size)
    tolerance = 1e-3 if model.module.dtype == torch.float32 else 5e-2
    if not error_size < tolerance:
        name = type(model.module).__name__
        raise UnsupportedModel(f"{name}: a tree-masked pass differs from the model's own by {error_size:.1e}")
