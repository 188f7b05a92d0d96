"""Generation by a model's own module, with a dense attention, for models that the library does not run.

The texts of a batch begin together with their prompts aligned at the ends, so each step adds one column to all texts. Keys and
values of a layer are one dense block, which attention reads in place. (The engine's slots would have to be gathered first, which
takes most of a step with hundreds of short texts.)
Shape key: B texts, T new columns, C columns in all, H key-value heads, G query heads for each, K head size, F tapped layers,
D model width, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from engine.attention.scoring import Scoring
from engine.attention.tree_attention import UnsupportedAttention
from engine.distill.generation.jobs import GeneratedText, RunningJob, next_tokens
from engine.model.causal_lm import CausalModel
from engine.model.hidden_states import StateTap

NAME = "latebranch-columns"
_DONE_SHARE = 8  # finished rows leave the batch when they are one in this many
_TOKENS = 65_536  # of a pass: long prompts of a large batch are fed in several passes


def generate_by_torch(
    model: CausalModel, rows: Sequence[RunningJob], num_rows: int, tap: StateTap | None
) -> Iterator[GeneratedText]:
    """Yield texts as they finish, in batches of `num_rows`."""
    with columns_attended(model):
        for first in range(0, len(rows), num_rows):
            yield from _Batch(model, list(rows[first : first + num_rows]), tap).run()


def aligned(prompts: Sequence[Sequence[int]]) -> tuple[Int[Tensor, "B T"], list[int]]:
    """Return prompts that end at one column, and the column where each begins.

    A row's columns before its prompt hold the prompt's first token, and are masked.
    """
    width = max(len(ids) for ids in prompts)
    begins = [width - len(ids) for ids in prompts]
    return torch.tensor([[ids[0]] * begin + [*ids] for ids, begin in zip(prompts, begins, strict=True)]), begins


def parts_of(ids_BT: Int[Tensor, "B T"]) -> Iterator[Int[Tensor, "B T"]]:
    """Yield new columns in parts, one for each pass."""
    yield from torch.split(ids_BT, max(1, _TOKENS // len(ids_BT)), dim=1)


def feed(model: CausalModel, columns: "Columns", ids_BT: Int[Tensor, "B T"]) -> Float[Tensor, "B V"]:
    """Run one pass over new columns; return the logits after the last."""
    columns.open(ids_BT.shape[1])
    with torch.inference_mode():
        out = model.module(
            input_ids=ids_BT.to(model.device),
            position_ids=columns.positions_BT,
            use_cache=False,
            logits_to_keep=1,
            attention_context=columns,
        )
    return out.logits[:, -1]  # type: ignore[no-any-return]


class _Batch:
    """Texts that are generated together; row r of every tensor belongs to `rows[r]`."""

    def __init__(self, model: CausalModel, rows: list[RunningJob], tap: StateTap | None) -> None:
        self._model, self._tap, self._rows = model, tap, rows
        self._ids_BT, begins = aligned([row.ids for row in self._rows])
        num_columns = self._ids_BT.shape[1] + max(row.job.max_tokens for row in self._rows)
        self._columns = Columns(begins, num_columns, model.device)
        self._states_BCFD: Tensor | None = None

    def run(self) -> Iterator[GeneratedText]:
        """Yield the texts as they finish."""
        while not all(row.is_done for row in self._rows):
            token_ids = self._step()
            for index, (row, token_id) in enumerate(zip(self._rows, token_ids, strict=True)):
                if row.append(token_id, self._model.eos_token_ids):
                    yield self._result(index)
            self._drop_done()
            self._ids_BT = torch.tensor([row.ids[-1:] for row in self._rows])

    def _step(self) -> list[int]:
        """Feed the newest columns; return each row's next token."""
        for ids_BT in parts_of(self._ids_BT):
            logits_BV = self._feed(ids_BT)
        return next_tokens(logits_BV, self._rows)

    def _feed(self, ids_BT: Int[Tensor, "B T"]) -> Float[Tensor, "B V"]:
        """Run one pass over columns; keep its states and return the logits after the last."""
        logits_BV = feed(self._model, self._columns, ids_BT)
        if self._tap is not None:
            self._states_BCFD = self._columns.keep(self._states_BCFD, self._tap.latest().to("cpu", torch.bfloat16))
        return logits_BV

    def _result(self, index: int) -> GeneratedText:
        row, end = self._rows[index], self._columns.end
        if self._states_BCFD is None:
            return row.result(None)
        return row.result(self._states_BCFD[index, end - len(row.ids) + 1 : end].clone())

    def _drop_done(self) -> None:
        """Once enough rows are finished, move running rows to their places and shrink the batch."""
        num_left = sum(not row.is_done for row in self._rows)
        if not num_left or (len(self._rows) - num_left) * _DONE_SHARE < len(self._rows):
            return
        holes = [index for index, row in enumerate(self._rows[:num_left]) if row.is_done]
        movers = [index for index, row in enumerate(self._rows) if index >= num_left and not row.is_done]
        self._columns.move(movers, holes, num_left)
        if self._states_BCFD is not None:
            end = self._columns.end
            self._states_BCFD[holes, :end] = self._states_BCFD[movers, :end]
        for hole, mover in zip(holes, movers, strict=True):
            self._rows[hole] = self._rows[mover]
        del self._rows[num_left:]


class Columns:
    """Keys and values of a batch, [B, H, C, K] for each layer, filled in the columns before `end`.

    Row b begins at column `begin_B[b]`; its columns before that are masked.
    """

    def __init__(self, begins: Sequence[int], num_columns: int, device: torch.device) -> None:
        self.num_columns = num_columns
        self.end = 0
        self._begin_B = torch.tensor(begins, device=device)
        self._num_new = 0
        self._pools: dict[int, tuple[Tensor, Tensor]] = {}
        self._biases: dict[int | None, Tensor] = {}

    @property
    def new_T(self) -> Int[Tensor, " T"]:
        """The new columns."""
        return torch.arange(self.end - self._num_new, self.end, device=self._begin_B.device)

    @property
    def num_read(self) -> int:
        """The number of columns that attention reads, from the first on."""
        return self.end

    @property
    def positions_BT(self) -> Int[Tensor, "B T"]:
        """Positions of the new columns in each row's text; 0 before it begins."""
        return (self.new_T - self._begin_B[:, None]).clamp_min(0)

    def open(self, count: int) -> None:
        """Add columns to write."""
        self.end += count
        self._num_new = count
        self._biases.clear()

    def extend(
        self, layer: int, keys: Float[Tensor, "B H T K"], values: Float[Tensor, "B H T V"]
    ) -> tuple[Float[Tensor, "B H C K"], Float[Tensor, "B H C V"]]:
        """Write a layer's new columns; return all that are filled."""
        if layer not in self._pools:
            # Zeros: attention may read unfilled columns with weight 0, and 0 times NaN would be NaN.
            pools = [new.new_zeros(*new.shape[:2], self.num_columns, new.shape[3]) for new in (keys, values)]
            self._pools[layer] = (pools[0], pools[1])
        filled = [pool[: len(self._begin_B), :, : self.end] for pool in self._pools[layer]]
        for columns, new in zip(filled, (keys, values), strict=True):
            columns[:, :, self.end - self._num_new :] = new
        return filled[0], filled[1]

    def keep(self, kept_BCFD: Float[Tensor, "B C F D"] | None, states_TFD: Tensor) -> Float[Tensor, "B C F D"]:
        """Add the new columns' states, row after row, to the kept states, if any; return all."""
        num_rows = len(self._begin_B)
        if kept_BCFD is None:
            kept_BCFD = states_TFD.new_empty(num_rows, self.num_columns, *states_TFD.shape[1:])
        kept_BCFD[:num_rows, self.end - self._num_new : self.end] = torch.unflatten(states_TFD, 0, (num_rows, self._num_new))
        return kept_BCFD

    def bias(self, window: int | None, dtype: torch.dtype) -> Float[Tensor, "B 1 1 T C"]:
        """Return 0 where a new column sees a column and -inf elsewhere; a column before its row begins sees itself."""
        if window not in self._biases:
            column_C, query_T1 = torch.arange(self.num_read, device=self._begin_B.device), self.new_T[:, None]
            is_seen_TC = column_C <= query_T1
            if window is not None:
                is_seen_TC &= column_C > query_T1 - window
            is_seen = is_seen_TC & ((column_C >= self._begin_B[:, None, None]) | (column_C == query_T1))
            bias = torch.zeros(is_seen.shape, dtype=dtype, device=is_seen.device).masked_fill_(~is_seen, float("-inf"))
            self._biases[window] = bias[:, None, None]
        return self._biases[window]

    def move(self, sources: Sequence[int], targets: Sequence[int], num_left: int) -> None:
        """Copy rows over others, then drop all but the first `num_left`."""
        from_N, to_N = (torch.tensor(rows, dtype=torch.int64, device=self._begin_B.device) for rows in (sources, targets))
        with torch.inference_mode():  # as the pools were made in it
            for pool in (pool for pools in self._pools.values() for pool in pools):
                pool[to_N, :, : self.end] = pool[from_N, :, : self.end]
        self._begin_B[to_N] = self._begin_B[from_N]
        self._begin_B = self._begin_B[:num_left]


def columns_attention(
    module: nn.Module,
    query: Float[Tensor, "B HG T K"],
    key: Float[Tensor, "B H T K"],
    value: Float[Tensor, "B H T V"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " HG"] | None = None,
    attention_context: Columns | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "B T HG V"], None]:
    """Write the layer's new columns, then attend to all columns; the signature is that of transformers' AttentionInterface."""
    if attention_context is None or attention_mask is not None:
        raise UnsupportedAttention("this attention needs columns and computes its own masks")
    keys, values = attention_context.extend(module.layer_idx, key, value)  # type: ignore[arg-type]
    num_rows, num_heads, num_columns = keys.shape[:3]
    num_queries = query.shape[2]
    folded = query.reshape(num_rows, num_heads, -1, query.shape[3])
    bias = attention_context.bias(sliding_window, query.dtype)
    if softcap is None and s_aux is None:
        bias = bias.expand(-1, -1, folded.shape[2] // num_queries, -1, -1).reshape(num_rows, 1, -1, num_columns)
        out = functional.scaled_dot_product_attention(folded, keys, values, bias, scale=scaling)
    else:
        sinks_HG = None if s_aux is None else s_aux.view(num_heads, -1)
        scoring = Scoring(query.shape[3] ** -0.5 if scaling is None else scaling, softcap=softcap, sinks_HG=sinks_HG)
        scores = torch.unflatten(scoring.capped(folded @ keys.transpose(-1, -2) * scoring.scale), 2, (-1, num_queries))
        out = scoring.weights(scores + bias).to(values.dtype).flatten(2, 3) @ values
    return out.reshape(num_rows, query.shape[1], num_queries, -1).transpose(1, 2).contiguous(), None


@contextmanager
def columns_attended(model: CausalModel) -> Iterator[None]:
    """Let the model attend to columns inside the context, and to the engine's slots after it."""
    model.module.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.restore_attention()


AttentionInterface.register(NAME, columns_attention)
