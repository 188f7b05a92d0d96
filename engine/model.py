"""Any transformers causal language model, run over packed segments and a slot cache.

Gives a loaded model our attention and linears; a model that we cannot drive exactly (recurrent state, masks of its own, rotary
embeddings that depend on the batch) is refused by name. Shape key: T packed tokens, N rows of logits, V vocabulary.
"""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine import exact_attention
from engine.activations import steady_activations
from engine.attention import NAME, AttentionContext
from engine.int8 import can_multiply_int8, quantise_linears
from engine.kv_cache import KVCache
from engine.linears import prepare_linears
from engine.model_check import UnsupportedModel, check_text, own_logits, refuse_by_configuration, require_equal, require_same_bits
from engine.packing import PackedBatch
from engine.progress_bar import quiet_libraries
from engine.weights.facts import end_tokens

INT8 = "int8"
_EXACT_ATTENTION_TOLERANCE = 1e-2  # queries, keys and values are rounded to 12 binary places
_NO_LIMIT = 1 << 20


class CausalModel:
    """A causal language model and where it runs. Stateless between forwards: caches are arguments."""

    def __init__(self, module: PreTrainedModel, device: torch.device) -> None:
        self.module: Any = module.to(device).eval()
        self.device = device
        self.module.requires_grad_(False)
        self._attention = NAME

    @property
    def vocab_size(self) -> int:
        """Rows of the output head."""
        return int(self.module.config.get_text_config().vocab_size)

    @property
    def max_positions(self) -> int:
        """Longest context that can be run; a model that does not say is taken to have no limit of its own."""
        own_limit = int(getattr(self.module.config.get_text_config(), "max_position_embeddings", None) or _NO_LIMIT)
        return min(own_limit, exact_attention.LONGEST_TEXT) if self._attention == exact_attention.NAME else own_limit

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, by the model's generation settings, else its configuration."""
        return end_tokens(self.module.generation_config.eos_token_id, self.module.config.get_text_config().eos_token_id)

    def restore_attention(self) -> None:
        """Let the model attend to an engine's slots again, after it was lent to something that set another attention."""
        self.module.set_attn_implementation(self._attention)

    def attend_exactly(self) -> None:
        """Attend from now on so that a row has the same bits whatever it is computed with."""
        self._attention = exact_attention.NAME
        self.restore_attention()

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


def weights_dtype(dtype: str) -> torch.dtype:
    """Return the number format in which weights are loaded, and activations computed, for a precision by its name."""
    return torch.float32 if dtype == INT8 else getattr(torch, dtype)


def load_model(folder: Path, dtype: str, device: torch.device, linears: str) -> CausalModel:
    """Load, check and prepare a model. `dtype` is a torch name or int8; `linears` as engine.linears names float ones."""
    quiet_libraries()
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=weights_dtype(dtype), attn_implementation="eager")
    return adopt(module, device, INT8 if dtype == INT8 else linears)


def adopt(module: PreTrainedModel, device: torch.device, linears: str = "plain") -> CausalModel:
    """Take a loaded transformers model over: our attention and linears, compared as they will serve with the model's own pass.

    With linears "int8" attention is exact, and the linears are quantised after the comparison: from then on the model is another,
    one whose rows have the same bits in any batch.
    Raises UnsupportedModel.
    """
    refuse_by_configuration(module.config)
    model = CausalModel(module, device)
    ids = check_text(model)
    expected_NV = own_logits(model, ids)
    if linears == INT8:
        if not can_multiply_int8(device):
            raise UnsupportedModel(f"int8 needs a processor with VNNI, which {device} has not")
        try:
            model.attend_exactly()
            steady_activations(model.module)
            require_equal(model, ids, expected_NV, _EXACT_ATTENTION_TOLERANCE)
            model.module.set_attn_implementation("eager")
            quantise_linears(model.module, model.vocab_size)
        except ValueError as error:
            raise UnsupportedModel(str(error)) from error
        model.restore_attention()
        require_same_bits(model, ids)
    else:
        model.restore_attention()
        prepare_linears(model.module, linears)
        require_equal(model, ids, expected_NV)
    return model
