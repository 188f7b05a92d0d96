"""A pass of the library over packed segments: where everything lies, for one call.

Shape key: T packed tokens, S slots, N rows of logits, M their columns, D width, P positions, K head size.
"""

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.attention.packing import PackedBatch
from engine.kv_cache.pool import KVCache
from engine.native import library
from engine.native.linear import QUANTISED

Tables = tuple[Float[Tensor, "P K"], Float[Tensor, "P K"]]  # cosines and sines by position


@dataclass(frozen=True)
class Output:
    """Logits of some tokens, what the output head was given for them, and states of all tokens after some layers.

    `likeliest` has each row's largest logit, NaN if there is any in the row, and the first column that has it.
    `after[i]`: i < depth after layer i; depth: after the last norm.
    """

    logits_NM: Float[Tensor, "N M"]
    given_ND: Float[Tensor, "N D"]
    after: dict[int, Float[Tensor, "T D"]]
    likeliest: list[tuple[float, int]]


@dataclass(frozen=True)
class SlotStates:
    """States by slot, float32, read and left where they lie; a packed token is given that of its slot in `before_T`."""

    pool_SD: Float[Tensor, "S D"]
    before_T: Int[Tensor, " T"]


@dataclass(frozen=True, eq=False)
class Features:
    """What a draft head reads of a target's tokens, kept by its passes. `structure` points at what `keeps` holds."""

    structure: library.Features
    keeps: tuple[object, ...]


def cache_dtype(precision: str) -> torch.dtype:
    """Return what the library keeps keys and values in: where inputs are rounded in float16, whose rounding is far below that."""
    return torch.float16 if precision in QUANTISED else torch.float32


class Runner:
    """Runs passes of one model or draft head in a precision. `structure` points at tensors that its maker keeps."""

    def __init__(self, structure: library.Decoder, precision: str) -> None:
        self.structure, self.cache_dtype = structure, cache_dtype(precision)
        self._pools: WeakKeyDictionary[KVCache, tuple[library.Pointers, library.Pointers, int]] = WeakKeyDictionary()

    def run(
        self,
        batch: PackedBatch,
        cache: KVCache,
        rotations: Sequence[Tables],
        rows_N: Int[Tensor, " N"],
        kept: Iterable[int] = (),
        given: SlotStates | None = None,
        features: Features | None = None,
    ) -> Output:
        """Run one pass over the packed tokens; write their keys; return logits of the chosen ones, and the `kept` states.

        A target keeps what `features` are made of. A draft head is `given` states, or `features` made of what is kept in their
        slots; it leaves its states of the chosen tokens in theirs.
        """
        shape, num_rows = self.structure, len(rows_N)
        after = {index: torch.empty(batch.num_tokens, shape.width) for index in kept}
        largest_N, likeliest_N = np.empty(num_rows, dtype=np.float32), np.empty(num_rows, dtype=np.int64)
        logits_NM, given_ND = torch.empty(num_rows, shape.head.num_outputs), torch.empty(num_rows, shape.width)
        pass_ = self.pass_over(batch, cache, rotations, given)
        pass_.num_rows, pass_.rows = num_rows, rows_N.data_ptr()
        pass_.states, pass_.logits = given_ND.data_ptr(), logits_NM.data_ptr()
        pass_.largest, pass_.likeliest = library.address(largest_N), library.address(likeliest_N)
        pass_.kept = library.pointers([after[i].data_ptr() if i in after else 0 for i in range(shape.num_layers + 1)])
        if features is not None:
            pass_.features = ctypes.pointer(features.structure)
        library.library().latebranch_decode(ctypes.byref(shape), ctypes.byref(pass_), library.num_threads())
        cache.check_read(batch.flat.key_slots)
        likeliest = list(zip(largest_N.tolist(), likeliest_N.tolist(), strict=True))
        return Output(logits_NM, given_ND, after, likeliest)

    def pass_over(
        self, batch: PackedBatch, cache: KVCache, rotations: Sequence[Tables], given: SlotStates | None = None
    ) -> library.Pass:
        """Return what a pass over the packed tokens needs, but for what is wanted of it. It points into what it is made of."""
        flat, pass_ = batch.flat, self.places(cache, rotations, None if given is None else given.pool_SD)
        tokens, row = library.address(batch.tokens_3T), 8 * batch.num_tokens
        table, column = library.address(flat.table), 8 * len(batch.starts)
        pass_.num_tokens, pass_.num_segments = batch.num_tokens, len(batch.segments)
        pass_.token_ids, pass_.positions, pass_.write_slots = tokens, tokens + row, tokens + 2 * row
        pass_.before = None if given is None else given.before_T.data_ptr()
        pass_.first_token, pass_.first_key = table, table + column
        pass_.first_tail, pass_.first_seen = table + 2 * column, table + 3 * column
        pass_.key_slots, pass_.tail_positions = library.address(flat.key_slots), library.address(flat.tail_positions)
        pass_.seen = library.address(flat.seen)
        return pass_

    def places(self, cache: KVCache, rotations: Sequence[Tables], pool_SD: Float[Tensor, "S D"] | None = None) -> library.Pass:
        """Return where everything lies that is not a pass's own."""
        keys, values, apart = self._pools_of(cache)
        return library.Pass(
            pool=None if pool_SD is None else pool_SD.data_ptr(),
            keys=keys,
            values=values,
            apart=apart,
            cosines=library.pointers([cosines.data_ptr() for cosines, _ in rotations]),
            sines=library.pointers([sines.data_ptr() for _, sines in rotations]),
            kept=library.pointers([0] * (self.structure.num_layers + 1)),
            is_cached_in_half=self.cache_dtype == torch.float16,
        )

    def _pools_of(self, cache: KVCache) -> tuple[library.Pointers, library.Pointers, int]:
        """Return where a cache's keys and values lie, by layer, and the numbers from head to head: once made they stay there."""
        if cache not in self._pools:
            shape = self.structure
            sizes, dtype = (shape.num_kv_heads, shape.head_size), self.cache_dtype
            pools = [cache.pools(layer, *sizes, dtype) for layer in range(shape.num_layers)]
            keys, values = zip(*((keys.data_ptr(), values.data_ptr()) for keys, values in pools), strict=True)
            first = pools[0][0]
            assert first.stride(0) == shape.head_size, "a head's keys lie side by side"
            self._pools[cache] = library.pointers(keys), library.pointers(values), first.stride(1)
        return self._pools[cache]
