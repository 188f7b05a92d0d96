"""Adapts a draft model's output to a target with the same tokens but another number of output rows.

Models of one family pad one vocabulary to different sizes. Padding rows represent no token. So the draft logits are cut to the
target's number of rows, or padded with tokens that are never drafted. Any draft distribution is lossless.
Shape key: N rows of logits, V vocabulary of the target.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional

from engine.attention.packing import PackedBatch, pack
from engine.attention.paged.table import PagedBatch
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel
from engine.native.walks import Walks


class RepaddedModel:
    """Runs a model with `vocab_size` output rows."""

    def __init__(self, model: CausalModel, vocab_size: int) -> None:
        self._model = model
        self.vocab_size = vocab_size
        self.memories = model.memories

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._model.device

    @property
    def reads_tables(self) -> bool:
        """Whether the model can run passes over tables."""
        return self._model.reads_tables

    def forward(
        self, batch: PackedBatch, cache: KVCache, logit_rows: Sequence[int], walks: Walks | None = None
    ) -> Float[Tensor, "N V"]:
        """As CausalModel.forward, without walks. Ids for which only the target has rows are replaced by the model's last id."""
        assert walks is None, "the grower of trees chooses a draft model's tokens"
        last_id = self._model.vocab_size - 1
        known = [replace(one, token_ids=[min(token_id, last_id) for token_id in one.token_ids]) for one in batch.segments]
        return self._repadded(self._model.forward(pack(known, batch.device), cache, logit_rows))

    def forward_table(self, batch: PagedBatch, cache: KVCache) -> Float[Tensor, "N V"]:
        """As CausalModel.forward_table, with ids replaced as in `forward`."""
        return self._repadded(self._model.forward_table(batch.with_ids_below(self._model.vocab_size), cache))

    def _repadded(self, logits: Tensor) -> Float[Tensor, "N V"]:
        num_added = self.vocab_size - self._model.vocab_size
        return functional.pad(logits, (0, num_added), value=-torch.inf)  # a negative number cuts columns off
