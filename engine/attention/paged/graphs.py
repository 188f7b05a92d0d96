"""Passes that are recorded once for each shape and replayed over the next table. Shape key: N places asked about, M columns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from engine.attention.packing import PackedBatch, pack
from engine.attention.paged.buffer import TableBuffer
from engine.attention.paged.graph_recorder import Recorder
from engine.attention.paged.padding_shapes import Ladder
from engine.attention.paged.table import Columns, Numbers, PagedBatch, Shape, table_of


class PassMemory(Protocol):
    """Whoever keeps a tensor of each pass, from inside the model. A replay runs no Python, so it is given back what it kept."""

    def kept(self) -> Tensor | None:
        """Return what was kept of the pass that has just run."""
        ...

    def keep(self, kept: Tensor | None) -> None:
        """Keep what was returned when the pass was recorded, with what the latest pass has left there."""
        ...


@dataclass(frozen=True)
class StaticSteps:
    """What all recorded passes of an engine share: they run one after another."""

    buffer: TableBuffer
    ladder: Ladder
    recorder: Recorder


class Recordings:
    """One function over tables, recorded when a shape first comes or is prepared, and anew when somebody else keeps something.

    `run` returns float32 rows of `width` for the places asked about, padding included. Owns the rows it leaves.
    """

    def __init__(
        self,
        steps: StaticSteps,
        columns: Columns,
        run: Callable[[PagedBatch], Float[Tensor, "N M"]],
        width: int,
        memories: Sequence[PassMemory] = (),
    ) -> None:
        self._steps, self._columns, self._run, self._memories = steps, columns, run, memories
        self._device = steps.buffer.table.device
        self._replays: dict[Shape, Callable[[], list[Tensor | None]]] = {}
        self._num_memories = len(memories)  # when the replays were recorded
        with torch.inference_mode():
            self._rows_NM = torch.zeros(steps.ladder.most_tokens, width, device=self._device)

    def replay(
        self, batch: PackedBatch, tokens: Sequence[Numbers] = (), asked: Sequence[Numbers] = ()
    ) -> Float[Tensor, "N M"] | None:
        """Return the rows of a batch's places; None, and nothing was run, if it is larger than what is recorded.

        `tokens` are numbers beside those of the batch, `asked` those of the places.
        """
        shape = self._steps.ladder.shape_of(batch.num_tokens, len(asked[0]))
        if shape is None or not self._steps.buffer.load(table_of(batch, shape, self._columns, tokens, asked)):
            return None
        self._replay(shape)
        with torch.inference_mode():
            return self._rows_NM[: len(asked[0])].clone()

    def prepare(self) -> None:
        """Record every shape that has not come yet, over padding alone."""
        nothing = pack([], self._device)
        others = [()] * (len(self._columns.tokens) - len(nothing.tokens_3T))
        for shape in self._steps.ladder.shapes:
            table = table_of(nothing, shape, self._columns, others, [()] * len(self._columns.asked))
            if self._is_new(shape) and self._steps.buffer.load(table):
                self._replay(shape)

    def _replay(self, shape: Shape) -> None:
        if self._is_new(shape):
            self._replays[shape] = self._steps.recorder.record(lambda: self._run_once(shape))
        for memory, kept in zip(self._memories, self._replays[shape](), strict=True):
            memory.keep(None if kept is None else kept.clone())  # later replays, of others too, write where it lies

    def _is_new(self, shape: Shape) -> bool:
        """Return whether a shape has not been recorded; nothing has, once somebody else keeps something."""
        if len(self._memories) > self._num_memories:
            self._num_memories = len(self._memories)
            self._replays.clear()
        return shape not in self._replays

    @torch.inference_mode()
    def _run_once(self, shape: Shape) -> list[Tensor | None]:
        batch = PagedBatch(self._steps.buffer.table, shape, self._columns)
        self._rows_NM[: shape.num_asked] = self._run(batch)
        return [memory.kept() for memory in self._memories]
