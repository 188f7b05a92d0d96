"""Runs a model's passes over one cache: directly, or padded to a recorded shape and replayed.

Shape key: T tokens, N rows of logits, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import ref

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.attention.packing import PackedBatch
from engine.attention.paged.completion import GrownNodes, complete, rooms_of
from engine.attention.paged.graphs import GraphedFunction, GraphResources, PassMemory
from engine.attention.paged.table import PagedBatch, TableColumns
from engine.kv_cache.kv_cache import KVCache
from engine.native.walks import Walks
from engine.sampling import device_choice
from engine.sampling.device_choice import NodeChoice, NodeDraws

NO_DRAWS = NodeDraws((), ())


class WrittenSlots(Protocol):
    """A batch whose pass has run."""

    @property
    def write_slots_T(self) -> Int[Tensor, " T"]:
        """The slots that the pass has written, on the device."""
        ...


Listener = Callable[[WrittenSlots], None]


class PassModel(Protocol):
    """A model whose passes can run directly or be recorded."""

    memories: list[PassMemory]

    @property
    def device(self) -> torch.device:
        """The model's device."""
        ...

    @property
    def vocab_size(self) -> int:
        """TableColumns of the logits."""
        ...

    @property
    def reads_tables(self) -> bool:
        """Whether the model can run passes over tables."""
        ...

    def forward(
        self, batch: PackedBatch, cache: KVCache, logit_rows: Sequence[int], walks: Walks | None = None
    ) -> Float[Tensor, "N V"]:
        """Run a pass over packed tokens, which follows the trees of `walks` if the library runs it."""
        ...

    def forward_table(self, batch: PagedBatch, cache: KVCache) -> Float[Tensor, "N V"]:
        """Run a pass over a table; return logits of the tokens in its one column of queried places."""
        ...


class Passes(Protocol):
    """Runs one model over one cache."""

    @property
    def method(self) -> str:
        """How passes run, as a key of measured times: passes of equal methods take equal times."""
        ...

    def run(self, batch: PackedBatch, rows: Sequence[int]) -> Float[Tensor, "N V"]:
        """Return float32 logits of the packed tokens in `rows`."""
        ...


class DirectPasses:
    """Runs each pass directly, then calls `listener`."""

    def __init__(self, model: PassModel, cache: KVCache, listener: Listener | None = None) -> None:
        self._model, self._cache, self._listener = model, cache, listener

    @property
    def method(self) -> str:
        """How passes run."""
        return "torch's"

    def run(self, batch: PackedBatch, rows: Sequence[int], walks: Walks | None = None) -> Float[Tensor, "N V"]:
        """Return float32 logits of the packed tokens in `rows`. The model's library follows the trees of `walks`."""
        logits_NV = self._model.forward(batch, self._cache, rows, walks)
        if self._listener is not None:
            self._listener(batch)
        return logits_NV


@dataclass(frozen=True)
class UnreadPass:
    """The latest pass, some of whose output tokens may be absent nodes. Valid until the next pass."""

    recordings: GraphedFunction
    choices_N3: Float[Tensor, "N 3"]

    def logits(self, places: Sequence[int]) -> Float[Tensor, "N V"]:
        """Return the logits of the output tokens at these places, and let memories keep the same ones."""
        return self.recordings.rows_at(places)


class RecordedPasses:
    """Pads passes to the next recorded shape and replays them; larger passes run directly. Recordings include the listener.

    With `chooses` they include the choice of a token after each output token too, so that the host waits once for a step.
    """

    def __init__(
        self,
        model: PassModel,
        cache: KVCache,
        steps: GraphResources,
        listener: Listener | None = None,
        chooses: bool = False,
    ) -> None:
        self._direct = DirectPasses(model, cache, listener)
        self._recorder = steps.recorder
        self.chooses = chooses
        self._latest: ref[Tensor] | None = None  # the logits whose choices are in the tensor
        num_rows = steps.shapes.most_tokens if chooses else 0
        with torch.inference_mode():
            self._choices_N3 = torch.zeros(num_rows, 3, dtype=torch.float64, device=model.device)

        def run(batch: PagedBatch) -> Float[Tensor, "N V"]:
            logits_NV = model.forward_table(batch, cache)
            if chooses:
                self._choices_N3[: len(logits_NV)] = device_choice.chosen_of_table(logits_NV, batch)
            if listener is not None:
                listener(batch)
            return logits_NV

        columns = TableColumns(tokens=(0, 0, cache.dummy_slot), outputs=(0,) * (1 + device_choice.NUM_COLUMNS * chooses))
        self.recordings = GraphedFunction(steps, columns, run, model.vocab_size, model.memories)

    @property
    def method(self) -> str:
        """How passes run, including the kind of recordings."""
        return f"torch's, padded, {self._recorder.name}{', choosing' if self.chooses else ''}"

    def run(self, batch: PackedBatch, rows: Sequence[int], draws: NodeDraws = NO_DRAWS) -> Float[Tensor, "N V"]:
        """Return float32 logits of the packed tokens in `rows`; the first of them have `draws`."""
        outputs = [rows, *draws.columns(len(rows))] if self.chooses else [rows]
        logits_NV = self.recordings.replay(batch, outputs=outputs)
        self._latest = None if logits_NV is None or not self.chooses or draws is NO_DRAWS else ref(logits_NV)
        return self._direct.run(batch, rows) if logits_NV is None else logits_NV

    def run_unread(self, batch: PackedBatch, rows: Sequence[int], draws: NodeDraws, nodes: GrownNodes) -> "UnreadPass | None":
        """Run a pass over trees that the device has grown, whose rooms are in the batch. Does not wait.

        Nothing runs and the result is None if passes choose no tokens, if tables are by row, or if the pass exceeds all shapes.
        """
        shape = self.recordings.shape_of(batch.num_tokens, len(rows))
        if shape is None or shape.is_by_row or not self.chooses:
            return None
        if not self.recordings.load(batch, shape, outputs=[rows, *draws.columns(len(rows))]):
            return None
        table_pass = self.recordings.pass_of(shape)
        complete(table_pass, nodes, rooms_of(batch, table_pass, rows))
        table_pass.run()
        self._latest = None
        return UnreadPass(self.recordings, self._choices_N3[: len(rows)])

    def choices(self, logits_NV: Float[Tensor, "N V"], count: int) -> list[NodeChoice] | None:
        """Return the choices of the first `count` rows if the latest pass made them from these logits, else None."""
        is_latest = self._latest is not None and self._latest() is logits_NV
        return device_choice.read(self._choices_N3[:count]) if is_latest else None

    def prepare(self) -> None:
        """Record the shapes that are not recorded yet."""
        self.recordings.prepare()
