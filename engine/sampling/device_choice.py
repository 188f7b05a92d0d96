"""The token after each node, chosen on a GPU with a single transfer to the host: the likeliest, and the coupled rule's.

A recorded pass makes the choice itself, from columns of its table.

Shape key: N nodes, V vocabulary, P parts of a vocabulary.
"""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.paged.table import Numbers, PagedBatch, halves_of
from engine.core.sampling_limits import MIN_TEMPERATURE
from engine.sampling.argmax import RowArgMax
from engine.sampling.noise import signed
from engine.utils.host_transfer import floats, integers

_PROGRAMS = 264  # two for each multiprocessor of an H100


class NodeChoice(NamedTuple):
    """A node's arg max, and the token of largest logit / temperature + noise: the arg max at temperature 0."""

    best: RowArgMax
    token_id: int


class NodeDraws(NamedTuple):
    """What the choice at each node depends on beside logits: the temperature, 0 for the arg max, and the key of the noise."""

    temperatures: Sequence[float]
    keys: Sequence[int]

    @property
    def inverse_temperatures(self) -> list[float]:
        """The numbers that logits are multiplied by; 0 for the arg max."""
        return [1.0 / max(one, MIN_TEMPERATURE) if one else 0.0 for one in self.temperatures]

    @property
    def signed_keys(self) -> list[int]:
        """The keys as signed integers."""
        return [signed(key) for key in self.keys]

    def columns(self, num_rows: int) -> list[Numbers]:
        """Return the columns of a table that contain the draws; further rows choose the arg max."""
        wide_2N = np.zeros((2, num_rows), dtype=np.int64)
        wide_2N[0, : len(self.keys)] = np.array(self.inverse_temperatures, dtype=np.float64).view(np.int64)
        wide_2N[1, : len(self.keys)] = self.signed_keys
        return [column for wide_N in wide_2N for column in halves_of(wide_N)]


NUM_COLUMNS = 4  # of NodeDraws


def can_choose_on(device: torch.device) -> bool:
    """Return whether the kernels run on a device."""
    return device.type == "cuda" and _has_triton()


def can_choose(logits_NV: Float[Tensor, "N V"]) -> bool:
    """Return whether the kernels choose from these logits."""
    return can_choose_on(logits_NV.device)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def choices(logits_NV: Float[Tensor, "N V"], temperatures: Sequence[float], keys: Sequence[int]) -> list[NodeChoice]:
    """Return each node's choices: its noise is that of its key. Edits are in the logits; nothing is truncated."""
    device, draws = logits_NV.device, NodeDraws(temperatures, keys)
    inverse_N, keys_N = floats(draws.inverse_temperatures, device), integers(draws.signed_keys, device)
    return read(chosen(logits_NV.contiguous(), inverse_N, keys_N))


def chosen_of_table(logits_NV: Float[Tensor, "N V"], batch: PagedBatch) -> Float[Tensor, "N 3"]:
    """Return the choices of a table's output tokens, whose last columns are NodeDraws.columns. Does not wait for the host."""
    inverse_N, keys_N = batch.wide_outputs(len(batch.columns.outputs) - NUM_COLUMNS)
    return chosen(logits_NV.contiguous(), inverse_N.view(torch.float64), keys_N)


def read(chosen_N3: Float[Tensor, "N 3"] | NDArray[np.float64]) -> list[NodeChoice]:
    """Return choices, which are copied to the host unless they are there."""
    return [NodeChoice(RowArgMax(top, int(top_id)), int(token_id)) for top, top_id, token_id in chosen_N3.tolist()]


def chosen(logits_NV: Float[Tensor, "N V"], inverse_N: Tensor, keys_N: Tensor) -> Float[Tensor, "N 3"]:
    """Return largest logits, their tokens and the chosen tokens, float64. No program of another node is waited for."""
    from engine.sampling import choice_kernels

    num_nodes, vocab_size = logits_NV.shape
    num_parts = max(1, min(choice_kernels.MOST_PARTS, _PROGRAMS // max(1, num_nodes), -(-vocab_size // choice_kernels.BLOCK)))
    partial = logits_NV.new_empty(num_nodes, num_parts, choice_kernels.NUM_FIELDS, dtype=torch.float64)
    out_N3 = logits_NV.new_empty(num_nodes, 3, dtype=torch.float64)
    if num_nodes:
        choice_kernels.choose[num_nodes, num_parts](
            logits_NV, inverse_N, keys_N, partial, vocab_size, num_parts, BLOCK=choice_kernels.BLOCK
        )
        choice_kernels.merge[(num_nodes,)](partial, out_N3, num_parts, BLOCK_P=choice_kernels.MOST_PARTS)
    return out_N3
