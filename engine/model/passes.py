"""How a model's passes over one cache are run: as they come, or padded to a shape and replayed.

Shape key: T tokens, N rows of logits, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.attention.packing import PackedBatch
from engine.attention.paged.graphs import GraphedFunction, GraphResources, PassMemory
from engine.attention.paged.table import PagedBatch, TableColumns
from engine.kv_cache.pool import KVCache
from engine.utils.host_transfer import integers

Listener = Callable[[Int[Tensor, " T"]], None]  # told of the slots that a pass has written


class PassModel(Protocol):
    """A model whose passes can be run either way."""

    memories: list[PassMemory]

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        ...

    @property
    def vocab_size(self) -> int:
        """TableColumns of its logits."""
        ...

    @property
    def reads_tables(self) -> bool:
        """Whether it can run passes over tables."""
        ...

    def forward(self, batch: PackedBatch, cache: KVCache, logit_rows_N: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        """Run a pass over packed tokens."""
        ...

    def forward_table(self, batch: PagedBatch, cache: KVCache) -> Float[Tensor, "N V"]:
        """Run a pass over a table, whose one column of places asked about says of which tokens there are to be logits."""
        ...


class Passes(Protocol):
    """Runs one model over one cache."""

    @property
    def way(self) -> str:
        """How, for whoever keeps times: equal ways, like times."""
        ...

    def run(self, batch: PackedBatch, rows: Sequence[int]) -> Float[Tensor, "N V"]:
        """Return float32 logits of the packed tokens in `rows`."""
        ...


class DirectPasses:
    """Each pass as it comes; `listener` is told of it when it has run."""

    def __init__(self, model: PassModel, cache: KVCache, listener: Listener | None = None) -> None:
        self._model, self._cache, self._listener = model, cache, listener

    @property
    def way(self) -> str:
        """As they come."""
        return "torch's"

    def run(self, batch: PackedBatch, rows: Sequence[int]) -> Float[Tensor, "N V"]:
        """Return float32 logits of the packed tokens in `rows`."""
        logits_NV = self._model.forward(batch, self._cache, integers(rows, self._model.device))
        if self._listener is not None:
            self._listener(batch.write_slots_T)
        return logits_NV


class RecordedPasses:
    """Passes padded to the next shape and replayed; larger ones as they come. What the listener does is recorded with them."""

    def __init__(self, model: PassModel, cache: KVCache, steps: GraphResources, listener: Listener | None = None) -> None:
        self._direct = DirectPasses(model, cache, listener)
        self._recorder = steps.recorder

        def run(batch: PagedBatch) -> Float[Tensor, "N V"]:
            logits_NV = model.forward_table(batch, cache)
            if listener is not None:
                listener(batch.write_slots_T)
            return logits_NV

        columns = TableColumns(tokens=(0, 0, cache.dummy_slot), outputs=(0,))
        self._recordings = GraphedFunction(steps, columns, run, model.vocab_size, model.memories)

    @property
    def way(self) -> str:
        """Padded, and by what they are replayed."""
        return f"torch's, padded, {self._recorder.name}"

    def run(self, batch: PackedBatch, rows: Sequence[int]) -> Float[Tensor, "N V"]:
        """Return float32 logits of the packed tokens in `rows`."""
        logits_NV = self._recordings.replay(batch, outputs=[rows])
        return self._direct.run(batch, rows) if logits_NV is None else logits_NV

    def prepare(self) -> None:
        """Record what has not been."""
        self._recordings.prepare()
