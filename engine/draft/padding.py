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

from engine.kv_cache import KVCache
from engine.model import CausalModel
from engine.packing import PackedBatch


class RepaddedModel:
    """Runs a model as one of `vocab_size` output rows."""

    def __init__(self, model: CausalModel, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self._model.device

    def forward(self, batch: PackedBatch, cache: KVCache, logit_rows_N: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        """As CausalModel.forward. A text can hold ids that only the target has rows for: the last row is read for them."""
        num_rows = self._model.vocab_size
        ids_T, *places = batch.tokens_3T
        known = replace(batch, tokens_3T=np.stack([np.minimum(ids_T, num_rows - 1), *places]))
        logits = self._model.forward(known, cache, logit_rows_N)
        return functional.pad(logits, (0, self._vocab_size - num_rows), value=-torch.inf)  # fewer than 0 rows are cut off
