"""Rows of logits, computed by the library: the likeliest tokens, and the distributions at given temperatures and truncations.

Shape key: N rows, V vocabulary, R chosen rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from engine.native import library


class KeptTokens(NamedTuple):
    """The tokens that a request keeps of a distribution, as engine.sampling.distributions defines it: 0, 1 and 0 keep all."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def truncations_array(truncations: Sequence[KeptTokens] | None, count: int) -> NDArray[np.float64]:
    """Return the truncations of `count` rows for the library, [count, 3]; None: nothing is truncated."""
    return np.array([KeptTokens()] * count if truncations is None else truncations, dtype=np.float64)


def can_read(logits_NV: Tensor) -> bool:
    """Return whether the library runs on the device of these logits, in their format."""
    return logits_NV.device.type == "cpu" and logits_NV.dtype == torch.float32 and library.is_available()


def likeliest(logits_NV: Float[Tensor, "N V"]) -> list[tuple[float, int]]:
    """Return each row's largest logit, NaN if there is any in the row, and the first token that has it."""
    logits_NV, num_rows = logits_NV.contiguous(), len(logits_NV)
    values_N, tokens_N = np.empty(num_rows, dtype=np.float32), np.empty(num_rows, dtype=np.int64)
    library.library().latebranch_likeliest(
        *(logits_NV.data_ptr(), num_rows, logits_NV.shape[1]),
        *(library.address(values_N), library.address(tokens_N), library.num_threads()),
    )
    return list(zip(values_N.tolist(), tokens_N.tolist(), strict=True))


def probs(
    logits_NV: Float[Tensor, "N V"],
    rows: Sequence[int],
    temperatures: Sequence[float],
    truncations: Sequence[KeptTokens] | None = None,
) -> Float[Tensor, "R V"]:
    """Return softmax(logits / temperature) of each of `rows`, truncated."""
    logits_NV, rows_R = logits_NV.contiguous(), np.array(rows, dtype=np.int64)
    inverse_R = 1.0 / np.array(temperatures, dtype=np.float32)
    kept_R3 = truncations_array(truncations, len(rows))
    probs_RV = torch.empty(len(rows), logits_NV.shape[1])
    library.library().latebranch_probs(
        *(logits_NV.data_ptr(), logits_NV.shape[1], library.address(rows_R), library.address(inverse_R)),
        *(library.address(kept_R3), len(rows), probs_RV.data_ptr(), library.num_threads()),
    )
    return probs_RV
