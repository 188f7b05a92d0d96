"""Passes recorded once for each shape and replayed over the next table. Shape key: N output tokens, M columns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.attention.packing import PackedBatch, pack
from engine.attention.paged.buffer import TableBuffer
from engine.attention.paged.graph_recorder import Recorder
from engine.attention.paged.padding_shapes import PaddingShapes
from engine.attention.paged.table import Numbers, PagedBatch, Shape, TableColumns, table_of
from engine.utils.host_transfer import integers


class PassMemory(Protocol):
    """A hook inside the model that keeps a tensor of each pass. A replay runs no Python, so the tensor is set again after it."""

    def kept(self) -> Tensor | None:
        """Return the tensor of the pass that has just run."""
        ...

    def keep(self, kept: Tensor | None) -> None:
        """Set the tensor of the latest pass."""
        ...


@dataclass(frozen=True)
class GraphResources:
    """The table, shapes and recorder shared by all recorded passes of an engine, which run one after another."""

    buffer: TableBuffer
    shapes: PaddingShapes
    recorder: Recorder


@dataclass(frozen=True)
class TablePass:
    """A recorded pass of one shape over the table that is loaded, which can be edited on the device before each run.

    A run overwrites `rows_NM`, the rows of the output tokens of the shape.
    """

    table: Int[Tensor, " _"]
    shape: Shape
    columns: TableColumns
    rows_NM: Float[Tensor, "N M"]
    run: Callable[[], None]


class GraphedFunction:
    """A function over tables, recorded on the first use of a shape or in `prepare`, and again after a memory was added.

    `run` returns float32 rows of `width` for the output tokens, padding included. Owns these rows.
    """

    def __init__(
        self,
        steps: GraphResources,
        columns: TableColumns,
        run: Callable[[PagedBatch], Float[Tensor, "N M"]],
        width: int,
        memories: Sequence[PassMemory] = (),
    ) -> None:
        self._steps, self.columns, self._run, self._memories = steps, columns, run, memories
        self._device = steps.buffer.table.device
        self._replays: dict[Shape, Callable[[], list[Tensor | None]]] = {}
        self._num_memories = len(memories)  # when the replays were recorded
        with torch.inference_mode():
            self._rows_NM = torch.zeros(steps.shapes.most_tokens, width, device=self._device)

    def replay(
        self, batch: PackedBatch, tokens: Sequence[Numbers] = (), outputs: Sequence[Numbers] = ()
    ) -> Float[Tensor, "N M"] | None:
        """Return the rows of a batch's output tokens. If the batch exceeds all shapes, nothing runs and the result is None.

        `tokens` are columns in addition to the batch's own, `outputs` those of the output tokens.
        """
        shape = self.shape_of(batch.num_tokens, len(outputs[0]))
        if shape is None or not self.load(batch, shape, tokens, outputs):
            return None
        self._replay(shape)
        with torch.inference_mode():
            return self._rows_NM[: len(outputs[0])].clone()

    def load(self, batch: PackedBatch, shape: Shape, tokens: Sequence[Numbers] = (), outputs: Sequence[Numbers] = ()) -> bool:
        """Copy a batch's table to the device, and run nothing; return whether it fits."""
        return self._steps.buffer.load(table_of(batch, shape, self.columns, tokens, outputs))

    def shape_of(self, num_tokens: int, num_outputs: int) -> Shape | None:
        """Return the shape to which a pass is padded; None if it exceeds all shapes."""
        return self._steps.shapes.shape_of(num_tokens, num_outputs)

    @property
    def device(self) -> torch.device:
        """The device of the tables."""
        return self._device

    @property
    def width(self) -> int:
        """Columns of the rows."""
        return self._rows_NM.shape[1]

    @property
    def capacity(self) -> int:
        """Length of the longest table."""
        return len(self._steps.buffer.table)

    def pass_of(self, shape: Shape) -> TablePass:
        """Return the pass of a shape over whichever table is loaded."""
        rows_NM = self._rows_NM[: shape.num_outputs]
        return TablePass(self._steps.buffer.table, shape, self.columns, rows_NM, partial(self._replay, shape))

    @torch.inference_mode()
    def rows_at(self, places: Sequence[int]) -> Float[Tensor, "N M"]:
        """Return the latest pass's rows at some places, and let memories keep the same ones."""
        index = integers(places, self._device)
        for memory in self._memories:
            kept = memory.kept()
            memory.keep(None if kept is None else kept.index_select(0, index))
        return self._rows_NM.index_select(0, index)

    @property
    def recorder(self) -> Recorder:
        """The recorder, for functions that run between these passes."""
        return self._steps.recorder

    def prepare(self) -> None:
        """Record every shape that has not been recorded, over padding alone."""
        nothing = pack([], self._device)
        others = [()] * (len(self.columns.tokens) - len(nothing.tokens_3T))
        for shape in self._steps.shapes.all:
            table = table_of(nothing, shape, self.columns, others, [()] * len(self.columns.outputs))
            if self._is_new(shape) and self._steps.buffer.load(table):
                self._replay(shape)

    def _replay(self, shape: Shape) -> None:
        if self._is_new(shape):
            self._replays[shape] = self._steps.recorder.record(lambda: self._run_once(shape))
        for memory, kept in zip(self._memories, self._replays[shape](), strict=True):
            memory.keep(None if kept is None else kept.clone())  # any later replay may overwrite it

    def _is_new(self, shape: Shape) -> bool:
        """Return whether a shape has not been recorded since the last memory was added."""
        if len(self._memories) > self._num_memories:
            self._num_memories = len(self._memories)
            self._replays.clear()
        return shape not in self._replays

    @torch.inference_mode()
    def _run_once(self, shape: Shape) -> list[Tensor | None]:
        batch = PagedBatch(self._steps.buffer.table, shape, self.columns)
        self._rows_NM[: shape.num_outputs] = self._run(batch)
        return [memory.kept() for memory in self._memories]
