"""A draft model beside a target of the same tokens whose output has more or fewer rows.

Models of one family pad one vocabulary to different sizes. Such rows stand for no token, so the draft logits are cut to the
target's number of rows, or padded with rows that are never drafted; a draft law stays a law, and any draft law is lossless.
Shape key: N rows of logits, V vocabulary of the target.
"""

from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from engine.attention.packing import PackedBatch
from engine.attention.paged.table import PagedBatch
from engine.kv_cache.pool import KVCache
from engine.model.causal_lm import CausalModel


class RepaddedModel:
    """Runs a model as one of `vocab_size` output rows."""

    def __init__(self, model: CausalModel, vocab_size: int) -> None:
        self._model = model
        self.vocab_size = vocab_size
        self.memories = model.memories

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self._model.device

    @property
    def reads_tables(self) -> bool:
        """Whether it can run passes over tables."""
        return self._model.reads_tables

    def forward(self, batch: PackedBatch, cache: KVCache, logit_rows_N: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        """As CausalModel.forward. A text can hold ids that only the target has rows for: the last row is read for them."""
        num_rows = self._model.vocab_size
        ids_T, *places = batch.tokens_3T
        known = replace(batch, tokens_3T=np.stack([np.minimum(ids_T, num_rows - 1), *places]))
        return self._repadded(self._model.forward(known, cache, logit_rows_N))

    def forward_table(self, batch: PagedBatch, cache: KVCache) -> Float[Tensor, "N V"]:
        """As CausalModel.forward_table, with ids read as in `forward`."""
        return self._repadded(self._model.forward_table(batch.with_ids_below(self._model.vocab_size), cache))

    def _repadded(self, logits: Tensor) -> Float[Tensor, "N V"]:
        num_more = self.vocab_size - self._model.vocab_size
        return functional.pad(logits, (0, num_more), value=-torch.inf)  # fewer than 0 columns are cut off
