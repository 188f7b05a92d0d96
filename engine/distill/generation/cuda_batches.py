"""Generation on a GPU, where launching a pass takes longer than running it: each new column is a replay of a CUDA graph.

All data of a step is on the device, including tokens and states, and nothing is copied back before the batch is finished. One
graph of one step is replayed until all texts have ended. Every batch has the same number of rows and columns, so that the graph
fits all. A finished row is continued and cut off later; a partial batch repeats its last row.
Shape key: B texts, C columns in all, N tokens of an answer, V vocabulary, F tapped layers, D model width, H key-value heads,
K head size.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.attention.paged.graph_recorder import CudaGraphs, Recorder
from engine.distill.generation.jobs import GeneratedText, RunningJob, sampled_tokens
from engine.distill.generation.torch_batches import Columns, aligned, columns_attended, feed, parts_of
from engine.model.causal_lm import CausalModel
from engine.model.hidden_states import StateTap

_CHECK_EVERY = 16  # steps between checks whether all rows are finished
_ALIGNED = 8  # columns: with other numbers each layer would copy its bias


def generate_by_graphs(
    model: CausalModel, rows: Sequence[RunningJob], num_rows: int, tap: StateTap | None, recorder: Recorder | None = None
) -> Iterator[GeneratedText]:
    """Yield texts as their batches of `num_rows` finish; states are on the model's device."""
    num_rows = min(num_rows, len(rows))
    width = max(len(row.ids) for row in rows)
    num_tokens = max(row.job.max_tokens for row in rows)
    with columns_attended(model):
        generator = _GraphGenerator(model, tap, num_rows, width, num_tokens, recorder or CudaGraphs())
        for first in range(0, len(rows), num_rows):
            yield from generator.generate(list(rows[first : first + num_rows]))


class _GraphGenerator:
    """The data that a step reads and writes, on the device; `generate` refills it for each batch."""

    def __init__(
        self, model: CausalModel, tap: StateTap | None, num_rows: int, width: int, num_tokens: int, recorder: Recorder
    ) -> None:
        device = model.device
        self._model, self._tap = model, tap
        num_columns = -(-(width + num_tokens) // _ALIGNED) * _ALIGNED
        self._columns = _PlacedColumns([0] * num_rows, num_columns, device)
        self._ids_B1 = torch.zeros(num_rows, 1, dtype=torch.int64, device=device)
        self._place_1 = torch.zeros(1, dtype=torch.int64, device=device)  # index in the answer of the token to draw
        self._drawn_BN = torch.zeros(num_rows, num_tokens, dtype=torch.int64, device=device)
        self._uniforms_BN = torch.zeros(num_rows, num_tokens, device=device)
        self._temperature_B = torch.zeros(num_rows, device=device)
        self._ends_E = torch.tensor(model.eos_token_ids, device=device)
        self._states_BCFD: Tensor | None = None
        self._recorder = recorder
        self._replay: Callable[[], Int[Tensor, "B 1"]] | None = None

    def generate(self, rows: list[RunningJob]) -> Iterator[GeneratedText]:
        """Generate a batch of texts; yield them."""
        num_own = len(rows)
        rows = rows + rows[-1:] * (len(self._ids_B1) - num_own)
        self._begin(rows)
        most = max(row.job.max_tokens for row in rows)
        for place in range(1, most):
            if place % _CHECK_EVERY == 0 and self._are_done(rows, place):
                break
            self._place_1.fill_(place)
            if self._replay is None:  # recorded only now, because a recording reads keys and draws a token
                self._replay = self._recorder.record(self._step)
            self._ids_B1.copy_(self._replay())
            self._columns.move_on()
        drawn_BN = self._drawn_BN.tolist()
        for index, row in enumerate(rows[:num_own]):
            for token_id in drawn_BN[index]:
                if row.append(token_id, self._model.eos_token_ids):
                    break
            yield row.result(self._states_of(index, len(row.ids)))

    def _begin(self, rows: Sequence[RunningJob]) -> None:
        """Feed the prompts and draw the first tokens."""
        num_tokens = self._drawn_BN.shape[1]
        ids_BT, begins = aligned([row.ids for row in rows])
        self._columns.begin(begins)
        uniforms = [row.uniforms + [0.0] * (num_tokens - len(row.uniforms)) for row in rows]
        self._uniforms_BN.copy_(torch.tensor(uniforms))
        self._temperature_B.copy_(torch.tensor([row.job.temperature for row in rows]))
        for part_BT in parts_of(ids_BT):
            logits_BV = feed(self._model, self._columns, part_BT)
            if self._tap is not None:
                self._states_BCFD = self._columns.keep(self._states_BCFD, self._tap.latest().to(torch.bfloat16))
        token_B = sampled_tokens(logits_BV, self._temperature_B, self._uniforms_BN[:, 0])
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
            token_B1 = sampled_tokens(logits_BV, self._temperature_B, uniform_B1[:, 0])[:, None]
            self._drawn_BN.index_copy_(1, self._place_1, token_B1)
        return token_B1

    def _are_done(self, rows: Sequence[RunningJob], count: int) -> bool:
        """Return whether each text has an end among its first `count` tokens, or has reached its limit."""
        most_B = torch.tensor([row.job.max_tokens for row in rows], device=self._drawn_BN.device)
        has_ended_B = torch.isin(self._drawn_BN[:, :count], self._ends_E).any(1)
        return bool((has_ended_B | (most_B <= count)).all())

    def _states_of(self, index: int, length: int) -> Float[Tensor, "T-1 F D"] | None:
        if self._states_BCFD is None:
            return None
        begin = self._columns.begins[index]
        return self._states_BCFD[index, begin : begin + length - 1].clone()


class _PlacedColumns(Columns):
    """Columns that are reused for each batch. After the prompts the index of the newest column is a number on the device."""

    def __init__(self, begins: Sequence[int], num_columns: int, device: torch.device) -> None:
        super().__init__(begins, num_columns, device)
        self.begins = begins
        self.place_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self._is_placed = False

    def begin(self, begins: Sequence[int]) -> None:
        """Drop all columns and set where rows begin."""
        self.begins = begins
        self.end, self._is_placed = 0, False
        self._begin_B.copy_(torch.tensor(begins))

    def place(self) -> None:
        """Make the column after the filled columns the next column."""
        self._is_placed = True
        self.place_1.fill_(self.end)

    def move_on(self) -> None:
        """Advance to the next column."""
        self.place_1 += 1

    @property
    def new_T(self) -> Int[Tensor, " T"]:
        """The new columns."""
        return self.place_1 if self._is_placed else super().new_T

    @property
    def num_read(self) -> int:
        """The number of columns that attention reads. After the prompts it is all; the bias masks unfilled columns."""
        return self.num_columns if self._is_placed else super().num_read

    def open(self, count: int) -> None:
        """Add columns to write; after the prompts the new column exists already."""
        if self._is_placed:
            self._biases.clear()
        else:
            super().open(count)

    def extend(
        self, layer: int, keys: Float[Tensor, "B H T K"], values: Float[Tensor, "B H T V"]
    ) -> tuple[Float[Tensor, "B H C K"], Float[Tensor, "B H C V"]]:
        """Write a layer's new columns; return the columns that attention reads."""
        if not self._is_placed:
            return super().extend(layer, keys, values)
        for pool, new in zip(self._pools[layer], (keys, values), strict=True):
            pool.index_copy_(2, self.place_1, new)
        return self._pools[layer]
