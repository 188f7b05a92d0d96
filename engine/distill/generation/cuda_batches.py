"""Texts written in columns where starting a pass takes longer than running it: one column more is a replay.

All that a step changes lies on the device, tokens and states too, and nothing comes back before the batch is done: a CUDA graph
of one step is replayed until all texts have ended. Every batch has the same number of rows and columns, so that one graph does;
a row that is done is written on and cut off, and a batch that is not full repeats its last row.
Shape key: B texts, C columns in all, N tokens of an answer, V vocabulary, F tapped layers, D model width, H key-value heads,
K head size.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.attention.paged.graph_recorder import CudaGraphs, Recorder
from engine.distill.generation.jobs import OpenText, Written, drawn
from engine.distill.generation.torch_batches import Columns, aligned, columns_attended, feed, parts_of
from engine.model.causal_lm import CausalModel
from engine.model.hidden_states import StateTap

_LOOK_EVERY = 16  # steps, at whether all are done
_ALIGNED = 8  # columns: other numbers have their bias copied in each layer


def write_by_graphs(
    model: CausalModel, rows: Sequence[OpenText], num_rows: int, tap: StateTap | None, recorder: Recorder | None = None
) -> Iterator[Written]:
    """Yield texts as their batches are done, `num_rows` of them written together; states lie on the model's device."""
    num_rows = min(num_rows, len(rows))
    width = max(len(row.ids) for row in rows)
    num_tokens = max(row.order.max_tokens for row in rows)
    with columns_attended(model):
        writer = _Writer(model, tap, num_rows, width, num_tokens, recorder or CudaGraphs())
        for first in range(0, len(rows), num_rows):
            yield from writer.write(list(rows[first : first + num_rows]))


class _Writer:
    """What a step reads and writes, on the device; `write` fills it anew for each batch."""

    def __init__(
        self, model: CausalModel, tap: StateTap | None, num_rows: int, width: int, num_tokens: int, recorder: Recorder
    ) -> None:
        device = model.device
        self._model, self._tap = model, tap
        num_columns = -(-(width + num_tokens) // _ALIGNED) * _ALIGNED
        self._columns = _PlacedColumns([0] * num_rows, num_columns, device)
        self._ids_B1 = torch.zeros(num_rows, 1, dtype=torch.int64, device=device)
        self._place_1 = torch.zeros(1, dtype=torch.int64, device=device)  # in the answer, of the token to draw
        self._drawn_BN = torch.zeros(num_rows, num_tokens, dtype=torch.int64, device=device)
        self._uniforms_BN = torch.zeros(num_rows, num_tokens, device=device)
        self._temperature_B = torch.zeros(num_rows, device=device)
        self._ends_E = torch.tensor(model.eos_token_ids, device=device)
        self._states_BCFD: Tensor | None = None
        self._recorder = recorder
        self._replay: Callable[[], Int[Tensor, "B 1"]] | None = None

    def write(self, rows: list[OpenText]) -> Iterator[Written]:
        """Write some texts; yield them."""
        own = len(rows)
        rows = rows + rows[-1:] * (len(self._ids_B1) - own)
        self._begin(rows)
        most = max(row.order.max_tokens for row in rows)
        for place in range(1, most):
            if place % _LOOK_EVERY == 0 and self._are_done(rows, place):
                break
            self._place_1.fill_(place)
            if self._replay is None:  # now that there are keys, and a place for what the recorder may draw
                self._replay = self._recorder.record(self._step)
            self._ids_B1.copy_(self._replay())
            self._columns.move_on()
        drawn_BN = self._drawn_BN.tolist()
        for index, row in enumerate(rows[:own]):
            for token_id in drawn_BN[index]:
                if row.append(token_id, self._model.eos_token_ids):
                    break
            yield row.written(self._states_of(index, len(row.ids)))

    def _begin(self, rows: Sequence[OpenText]) -> None:
        """Feed the prompts and draw the first tokens."""
        num_tokens = self._drawn_BN.shape[1]
        ids_BT, begins = aligned([row.ids for row in rows])
        self._columns.begin(begins)
        uniforms = [row.uniforms + [0.0] * (num_tokens - len(row.uniforms)) for row in rows]
        self._uniforms_BN.copy_(torch.tensor(uniforms))
        self._temperature_B.copy_(torch.tensor([row.order.temperature for row in rows]))
        for part_BT in parts_of(ids_BT):
            logits_BV = feed(self._model, self._columns, part_BT)
            if self._tap is not None:
                self._states_BCFD = self._columns.keep(self._states_BCFD, self._tap.latest().to(torch.bfloat16))
        token_B = drawn(logits_BV, self._temperature_B, self._uniforms_BN[:, 0])
        self._drawn_BN[:, 0] = token_B
        self._ids_B1.copy_(token_B[:, None])
        self._columns.place()

    def _step(self) -> Int[Tensor, "B 1"]:
        """Feed the newest tokens; return the next."""
        columns = self._columns
        with torch.inference_mode():
            logits_BV = feed(self._model, columns, self._ids_B1)
            if self._tap is not None and self._states_BCFD is not None:
                states = self._tap.latest().to(torch.bfloat16)[:, None]
                self._states_BCFD.index_copy_(1, columns.place_1, states)
            uniform_B1 = self._uniforms_BN.index_select(1, self._place_1)
            token_B1 = drawn(logits_BV, self._temperature_B, uniform_B1[:, 0])[:, None]
            self._drawn_BN.index_copy_(1, self._place_1, token_B1)
        return token_B1

    def _are_done(self, rows: Sequence[OpenText], count: int) -> bool:
        """Return whether each text has ended within its first tokens, or has as many as it may."""
        most_B = torch.tensor([row.order.max_tokens for row in rows], device=self._drawn_BN.device)
        has_ended_B = torch.isin(self._drawn_BN[:, :count], self._ends_E).any(1)
        return bool((has_ended_B | (most_B <= count)).all())

    def _states_of(self, index: int, length: int) -> Float[Tensor, "T-1 F D"] | None:
        if self._states_BCFD is None:
            return None
        begin = self._columns.begins[index]
        return self._states_BCFD[index, begin : begin + length - 1].clone()


class _PlacedColumns(Columns):
    """Columns of one batch after the other; once prompts are fed the newest column's place is a number on the device."""

    def __init__(self, begins: Sequence[int], num_columns: int, device: torch.device) -> None:
        super().__init__(begins, num_columns, device)
        self.begins = begins
        self.place_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self._is_placed = False

    def begin(self, begins: Sequence[int]) -> None:
        """Forget all columns; rows begin at others."""
        self.begins = begins
        self.end, self._is_placed = 0, False
        self._begin_B.copy_(torch.tensor(begins))

    def place(self) -> None:
        """Let the next column be the one after what is filled."""
        self._is_placed = True
        self.place_1.fill_(self.end)

    def move_on(self) -> None:
        """Let the next column be the one after it."""
        self.place_1 += 1

    @property
    def new_T(self) -> Int[Tensor, " T"]:
        """The new columns."""
        return self.place_1 if self._is_placed else super().new_T

    @property
    def num_read(self) -> int:
        """How many columns attention reads: all, where the bias hides those that are not there yet."""
        return self.num_columns if self._is_placed else super().num_read

    def open(self, count: int) -> None:
        """Add columns to write; the next one is there as soon as its place is."""
        if self._is_placed:
            self._biases.clear()
        else:
            super().open(count)

    def extend(
        self, layer: int, keys: Float[Tensor, "B H T K"], values: Float[Tensor, "B H T V"]
    ) -> tuple[Float[Tensor, "B H C K"], Float[Tensor, "B H C V"]]:
        """Write a layer's new columns; return those that attention reads."""
        if not self._is_placed:
            return super().extend(layer, keys, values)
        for pool, new in zip(self._pools[layer], (keys, values), strict=True):
            pool.index_copy_(2, self.place_1, new)
        return self._pools[layer]
