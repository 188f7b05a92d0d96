"""The noise of engine.sampling.noise computed by the library, choices of tokens by it, and rankings by it.

Shape key: K keys, V vocabulary, N distributions, P draft distributions, M tokens of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.native import library
from engine.native.distributions import KeptTokens, truncations_array


def can_choose(device: torch.device | str) -> bool:
    """Return whether the library runs on this device."""
    return torch.device(device).type == "cpu" and library.is_available()


def gumbels(keys: Sequence[int], vocab_size: int, ids_M: Int[Tensor, " M"] | None = None) -> Float[Tensor, "K M"]:
    """Return standard Gumbel noise, float64, of all tokens or of `ids_M`."""
    count = vocab_size if ids_M is None else len(ids_M)
    noise, keys_K = torch.empty((len(keys), count), dtype=torch.float64), np.array(keys, dtype=np.uint64)
    library.library().latebranch_gumbels(
        library.address(keys_K),
        len(keys),
        None if ids_M is None else ids_M.data_ptr(),
        count,
        noise.data_ptr(),
        library.num_threads(),
    )
    return noise


def choices(probs_NV: Float[Tensor, "N V"], rows: Sequence[int], keys: Sequence[int]) -> list[tuple[float, int]]:
    """Return each row's best perturbed log-probability and its token; NaN or -inf for an invalid distribution."""
    scores, chosen = np.empty(len(rows)), np.empty(len(rows), dtype=np.int64)
    probs_NV, rows_K, keys_K = probs_NV.contiguous(), np.array(rows, dtype=np.int64), np.array(keys, dtype=np.uint64)
    library.library().latebranch_choose(
        probs_NV.data_ptr(),
        probs_NV.shape[1],
        library.address(rows_K),
        library.address(keys_K),
        len(rows),
        library.address(scores),
        library.address(chosen),
        library.num_threads(),
    )
    return list(zip(scores.tolist(), chosen.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class BestTokens:
    """The best tokens of one draft distribution, best first, with their noise (0 without noise) and probabilities.

    `collision` is the sum of the squared probabilities of all tokens; NaN for logits that make no distribution.
    """

    token_ids: tuple[int, ...]
    noise: tuple[float, ...]
    odds: tuple[float, ...]
    collision: float


def rankings(
    logits_PM: Float[Tensor, "P M"],
    temperatures: Sequence[float],
    sharpness: Sequence[float],
    most: int,
    keys: Sequence[int] | None,
    ids_M: Int[Tensor, " M"] | None,
    truncations: Sequence[KeptTokens] | None = None,
) -> list[BestTokens]:
    """Return at most `most` possible tokens of softmax(logits / temperature), truncated, ranked by log q.

    With `keys` they are ranked by sharpness * log q plus noise. `ids_M` maps columns to tokens.
    """
    num_rows, num_columns = logits_PM.shape
    logits_PM, most = logits_PM.contiguous(), min(most, num_columns)
    inverse_P = 1.0 / np.array(temperatures, dtype=np.float32)
    kept_P3 = truncations_array(truncations, num_rows)
    sharpness_P = np.array(sharpness, dtype=np.float32)
    keys_P = None if keys is None else np.array(keys, dtype=np.uint64)
    # The last column of `ids` is the number of tokens, that of `odds` the collision.
    ids, noise = np.empty((num_rows, most + 1), dtype=np.int64), np.empty((num_rows, most))
    odds = np.empty((num_rows, most + 1), dtype=np.float32)
    library.library().latebranch_rank(
        logits_PM.data_ptr(),
        num_rows,
        num_columns,
        library.address(inverse_P),
        library.address(kept_P3),
        library.address(sharpness_P),
        None if keys_P is None else library.address(keys_P),
        None if ids_M is None else ids_M.data_ptr(),
        most,
        library.address(ids),
        library.address(noise),
        library.address(odds),
        library.num_threads(),
    )
    found = []
    for (*tokens, count), values, (*shares, collision) in zip(ids.tolist(), noise.tolist(), odds.tolist(), strict=True):
        found.append(BestTokens(tuple(tokens[:count]), tuple(values[:count]), tuple(shares[:count]), collision))
    return found
