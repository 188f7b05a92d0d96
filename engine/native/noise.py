"""The noise of engine.noise by the library, and the choice it makes. Shape key: K keys, V vocabulary, N laws, M tokens."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.native import library


def can_choose(device: torch.device | str) -> bool:
    """Return whether the library makes noise for this device."""
    return torch.device(device).type == "cpu" and library.is_available()


def gumbels(keys: Sequence[int], vocab_size: int, ids_M: Int[Tensor, " M"] | None = None) -> Float[Tensor, "K M"]:
    """Return standard Gumbel noise, float64, of all tokens or of some."""
    count = vocab_size if ids_M is None else len(ids_M)
    noise, keys_K = torch.empty((len(keys), count), dtype=torch.float64), np.array(keys, dtype=np.uint64)
    library.library().latebranch_gumbels(
        keys_K.ctypes.data,
        len(keys),
        None if ids_M is None else ids_M.data_ptr(),
        count,
        noise.data_ptr(),
        library.num_threads(),
    )
    return noise


def choices(laws_NV: Float[Tensor, "N V"], rows: Sequence[int], keys: Sequence[int]) -> list[tuple[float, int]]:
    """Return the best perturbed log-probability of each of `rows` and its token; NaN or -inf where the law is no law."""
    scores, chosen = np.empty(len(rows)), np.empty(len(rows), dtype=np.int64)
    laws_NV, rows_K, keys_K = laws_NV.contiguous(), np.array(rows, dtype=np.int64), np.array(keys, dtype=np.uint64)
    library.library().latebranch_choose(
        laws_NV.data_ptr(),
        laws_NV.shape[1],
        rows_K.ctypes.data,
        keys_K.ctypes.data,
        len(rows),
        scores.ctypes.data,
        chosen.ctypes.data,
        library.num_threads(),
    )
    return list(zip(scores.tolist(), chosen.tolist(), strict=True))
