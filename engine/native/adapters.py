"""LoRA adapters as the library reads them (low_rank.h): the low-rank terms of a decoder's layers, for the rows of a pass.

Shape key: R rank, I inputs, O outputs, T packed tokens.
"""

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from engine.attention.packing import PackedBatch
from engine.native import library
from engine.weights.lora import Adapter, LowRank

_LANES, _RANKS, _OUTPUTS = 16, 4, 64  # multiples of inputs, of ranks, and of outputs, which are computed in such blocks
_LAYER = re.compile(r"model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)_proj")
_PARTS = {"q": "query", "k": "key", "v": "value", "o": "output"}  # others have the library's name


class UnknownLayer(ValueError):
    """An adapter has a term of a layer that the library does not run."""


@dataclass(frozen=True, eq=False)
class _Table:
    """An adapter's terms of all layers. `keeps` owns the memory behind `layers`."""

    layers: "ctypes.Array[library.AdaptedLayer]"
    most_rank: int
    keeps: Sequence[Tensor]


class NativeAdapters:
    """The adapters of a decoder by name."""

    def __init__(self, adapters: Sequence[Adapter], num_layers: int) -> None:
        self._tables = {adapter.name: _table(adapter, num_layers) for adapter in adapters}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the adapters."""
        return tuple(self._tables)

    def rows_of(self, batch: PackedBatch) -> tuple[NDArray[np.int64], int] | None:
        """Return the address of each token's terms (0: none) and the largest rank; None if no segment has an adapter."""
        used = {one.adapter for one in batch.segments if one.adapter is not None}
        if not used:
            return None
        addresses: dict[str | None, int] = {None: 0, **{name: ctypes.addressof(self._tables[name].layers) for name in used}}
        of_segments = np.array([addresses[one.adapter] for one in batch.segments], dtype=np.int64)
        rows_T = np.repeat(of_segments, [one.num_tokens for one in batch.segments])
        return rows_T, max(self._tables[name].most_rank for name in used)


def _table(adapter: Adapter, num_layers: int) -> _Table:
    layers, most_rank, keeps = (library.AdaptedLayer * num_layers)(), 0, list[Tensor]()
    for name, low in adapter.layers.items():
        place, part = _place(name)
        if part not in library.LINEARS or place >= num_layers:
            raise UnknownLayer(f"lora {adapter.name}: the library does not run {name}")
        a_RI, b_BRO = _packed(low)
        setattr(layers[place], part, library.LowRankStructure(a_RI.data_ptr(), b_BRO.data_ptr(), len(a_RI)))
        most_rank = max(most_rank, len(a_RI))
        keeps += [a_RI, b_BRO]
    return _Table(layers, most_rank, keeps)


def _place(name: str) -> tuple[int, str]:
    """Return the layer of a module's name and the part in it; the part is empty for a name of another form."""
    found = _LAYER.fullmatch(name)
    return (0, "") if found is None else (int(found[1]), _PARTS.get(found[2], found[2]))


def _packed(low: LowRank) -> tuple[Tensor, Tensor]:
    """Return a [R, I] and b [O / 16, R, 16], padded with zeros to whole blocks of outputs."""
    (num_ranks, num_inputs), num_outputs = low.a_RI.shape, len(low.b_OR)
    a_RI = functional.pad(low.a_RI, (0, -num_inputs % _LANES, 0, -num_ranks % _RANKS)).contiguous()
    b_OR = functional.pad(low.b_OR, (0, -num_ranks % _RANKS, 0, -num_outputs % _OUTPUTS))
    return a_RI, b_OR.view(-1, _LANES, len(a_RI)).transpose(1, 2).contiguous()
