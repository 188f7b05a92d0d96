"""Mixtures of a model's logits and cached text, computed by the library as engine.draft.text.mixture defines them.

Shape key: R rows of a model, K tokens the model knows, P proposals, M tokens that the model or the cache knows.
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
    """Cached text's prediction of one token: columns, their probabilities, and its confidence. No columns: no prediction."""

    columns: Sequence[int]
    odds: Sequence[float]
    chance: float


class Flat(NamedTuple):
    """Predictions as flat arrays: each prediction's first token and the end, columns, float32 probabilities, confidences."""

    firsts: list[int]
    columns: list[int]
    odds: library.Numbers


def flattened(predicted: Sequence[Predicted]) -> Flat:
    """Return predictions as flat arrays."""
    firsts = [*accumulate((len(prediction.columns) for prediction in predicted), initial=0)]
    columns = [*chain.from_iterable(prediction.columns for prediction in predicted)]
    chances = [prediction.chance for prediction in predicted]
    odds = array("f", [*chain.from_iterable(prediction.odds for prediction in predicted), *chances])
    return Flat(firsts, columns, odds)


def can_mix(device: torch.device) -> bool:
    """Return whether the library runs on this device."""
    return device.type == "cpu" and library.is_available()


def mixed(
    model_RK: Float[Tensor, "R K"] | None, rows: Sequence[int | None], predicted: Sequence[Predicted], num_columns: int
) -> tuple[Float[Tensor, "P M"], list[list[bool]]]:
    """Return logits of the mixtures, and for each predicted token whether most of its probability comes from cached text.

    `rows[p]` is the model's row for proposal p. It is None where the model did not run: the distribution is then cached text's.
    Elsewhere the mixture changes the odds of the predicted tokens only. The model's own columns come first.
    """
    num_proposals, num_known = len(rows), 0
    if model_RK is not None:
        assert model_RK.dtype == torch.float32
        assert model_RK.shape[1] <= num_columns
        model_RK, num_known = model_RK.contiguous(), model_RK.shape[1]
    assert len(predicted) == num_proposals
    firsts, columns, odds = flattened(predicted)
    assert all(0 <= column < num_columns for column in columns), "a predicted token has no column"
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
