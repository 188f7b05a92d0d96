"""Cached text beside a model's logits by the library: the function of engine.draft.text.mixture.

Shape key: R rows of a model, K tokens it knows, P proposals, M tokens known.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from engine.native import library


@dataclass(frozen=True, slots=True)
class Predicted:
    """What cached text says of one token: columns and probabilities, and how far it is trusted; without columns nothing."""

    columns: Sequence[int]
    odds: Sequence[float]
    chance: float


class Flat(NamedTuple):
    """Where each one's tokens begin, and their end; all columns; and, float32, all probabilities with the trusts behind them."""

    firsts: list[int]
    columns: list[int]
    odds: library.Numbers


def flattened(predicted: Sequence[Predicted]) -> Flat:
    """Return what is foretold side by side."""
    firsts = [*accumulate((len(one.columns) for one in predicted), initial=0)]
    columns = [*chain.from_iterable(one.columns for one in predicted)]
    odds = array("f", [*chain.from_iterable(one.odds for one in predicted), *(one.chance for one in predicted)])
    return Flat(firsts, columns, odds)


def can_mix(device: torch.device) -> bool:
    """Return whether the library runs where the logits are."""
    return device.type == "cpu" and library.is_available()


def mixed(
    model_RK: Float[Tensor, "R K"] | None, rows: Sequence[int | None], predicted: Sequence[Predicted], num_columns: int
) -> tuple[Float[Tensor, "P M"], list[list[bool]]]:
    """Return logits of the mixtures, and of each foretold token whether more of it is cached text's.

    `rows[p]` is the model's of proposal p, None where it was not asked: there what is foretold is the law. Of others it changes
    the odds of the foretold tokens alone. A model's own columns are the first.
    """
    num_proposals, num_known = len(rows), 0
    if model_RK is not None:
        assert model_RK.dtype == torch.float32
        assert model_RK.shape[1] <= num_columns
        model_RK, num_known = model_RK.contiguous(), model_RK.shape[1]
    assert len(predicted) == num_proposals
    firsts, columns, odds = flattened(predicted)
    assert all(0 <= column < num_columns for column in columns), "a foretold token has no column"
    places = np.array([*(-1 if row is None else row for row in rows), *firsts, *columns], dtype=np.int64)
    is_rather_cached = np.zeros(firsts[-1], dtype=np.uint8)
    logits_PM = torch.empty(num_proposals, num_columns)
    begin, row, share = library.address(places), 8 * num_proposals, library.address_of(odds)
    library.library().latebranch_mix(
        *(None if model_RK is None else model_RK.data_ptr(), num_known, begin, num_proposals),
        *(begin + row, begin + 2 * row + 8, share, share + 4 * firsts[-1]),
        *(num_columns, logits_PM.data_ptr(), library.address(is_rather_cached)),
    )
    flags = is_rather_cached.astype(np.bool_).tolist()
    return logits_PM, [flags[first:end] for first, end in pairwise(firsts)]
