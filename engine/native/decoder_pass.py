"""A pass of the library over packed segments: collects the addresses of all arrays for one call.

Shape key: T packed tokens, S slots, N rows of logits, M their columns, D width, P positions, K head size.
"""

import ctypes
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.packing import PackedBatch
from engine.kv_cache.kv_cache import BLOCK_BITS, KVCache
from engine.native import library
from engine.native.draft_steps import DraftSteps
from engine.native.linear import QUANTISED
from engine.native.walks import Walks
from engine.utils.host_transfer import Integers

Tables = tuple[Float[Tensor, "P K"], Float[Tensor, "P K"]]  # cosines and sines by position


class Output(msgspec.Struct, frozen=True, eq=False):
    """Logits of some tokens, the output head's inputs for them, and states of all tokens after some layers.

    `after[i]`: i < depth after layer i; depth: after the last norm. A pass of the library has each row's largest logit, NaN if
    the row has a NaN, and its first column; it has inputs of the output head only if it keeps states.
    """

    logits_NM: Float[Tensor, "N M"]
    head_inputs_ND: Float[Tensor, "N D"] | None
    after: dict[int, Float[Tensor, "T D"]]
    largest_N: library.Numbers = array("f")
    likeliest_N: library.Numbers = array("q")


@dataclass(frozen=True)
class SlotStates:
    """States by slot, float32, read in place; packed token t reads the state of slot `before_T[t]`."""

    pool_SD: Float[Tensor, "S D"]
    before_T: Integers


@dataclass(frozen=True, eq=False)
class Features:
    """Features of tokens, stored by the target's passes for a draft head. `keeps` owns the memory behind `structure`."""

    structure: library.FeaturesStructure
    keeps: tuple[object, ...]


@dataclass(frozen=True, eq=False)
class _SharedAddresses:
    """The addresses of a cache and of rotations, which later passes copy. The rotations are kept, so their ids are unique."""

    rotations: Sequence[Tables]
    rotation_ids: Sequence[int]
    addresses: library.Pass


def cache_dtype(precision: str) -> torch.dtype:
    """Return the format of cached keys and values: float16 if inputs are rounded to integers, which is far coarser."""
    return torch.float16 if precision in QUANTISED else torch.float32


class Runner:
    """Runs passes of one model or draft head in a precision. The caller owns the tensors that `structure` points at."""

    def __init__(self, structure: library.Decoder, precision: str) -> None:
        self.structure, self.cache_dtype = structure, cache_dtype(precision)

    def run(
        self,
        batch: PackedBatch,
        cache: KVCache,
        rotations: Sequence[Tables],
        rows: Sequence[int] | Int[Tensor, " N"],
        kept: Collection[int] | None = None,
        slot_states: SlotStates | None = None,
        features: Features | None = None,
        adapted: tuple[NDArray[np.int64], int] | None = None,
        walks: Walks | None = None,
    ) -> Output:
        """Run one pass over the packed tokens; write their keys; return logits of the chosen tokens, and `kept` states if any.

        A target's pass stores the inputs of `features`. A draft head reads `slot_states`, or computes `features` from their
        slots. It writes its states of the chosen tokens to their slots. `adapted` is NativeAdapters.rows_of. The pass follows the
        trees of `walks`, and goes on with their steps; the output is the last step's.
        """
        shape, rows_N = self.structure, array("q", rows)
        num_rows = len(rows_N)
        after = {index: torch.empty(batch.num_tokens, shape.width) for index in kept} if kept else {}
        largest_N, likeliest_N = library.empty_array("f", num_rows), library.empty_array("q", num_rows)
        logits_NM = torch.empty(num_rows, shape.head.num_outputs)
        pass_ = self.pass_over(batch, cache, rotations, slot_states)
        if kept is None:  # an array is made faster than a tensor
            head_inputs_ND, states = None, library.empty_array("f", num_rows * shape.width)
            pass_.states = states.buffer_info()[0]
        else:
            head_inputs_ND = torch.empty(num_rows, shape.width)
            pass_.states = head_inputs_ND.data_ptr()
        pass_.num_rows, pass_.rows, pass_.logits = num_rows, rows_N.buffer_info()[0], logits_NM.data_ptr()
        pass_.largest, pass_.likeliest = largest_N.buffer_info()[0], likeliest_N.buffer_info()[0]
        if after:
            pass_.kept = library.pointers([after[i].data_ptr() if i in after else 0 for i in range(shape.num_layers + 1)])
        if features is not None:
            pass_.features = ctypes.addressof(features.structure)
        if adapted is not None:
            pass_.adapters, pass_.most_rank = library.address(adapted[0]), adapted[1]
        if walks is not None:
            pass_.walked, pass_.num_trees = ctypes.addressof(walks.structure), walks.num_trees
        by = ctypes.byref(shape), ctypes.byref(pass_)
        if walks is None or walks.steps is None:
            library.library().latebranch_decode(*by, library.num_threads())
        else:
            steps = walks.steps
            steps.num_complete = library.library().latebranch_steps(*by, ctypes.byref(steps.structure), library.num_threads())
        if cache.is_watched:
            cache.check_read(batch.key_slots)
        return Output(logits_NM, head_inputs_ND, after, largest_N, likeliest_N)

    def run_drafts(self, steps: DraftSteps, cache: KVCache, rotations: Sequence[Tables], features: Features) -> None:
        """Run drafting steps in a row, whose passes store the inputs of `features`."""
        addresses = self.shared_addresses(cache, rotations)
        addresses.features = ctypes.addressof(features.structure)
        steps.run(self.structure, addresses)

    def pass_over(
        self, batch: PackedBatch, cache: KVCache, rotations: Sequence[Tables], slot_states: SlotStates | None = None
    ) -> library.Pass:
        """Return the structure of a pass over the packed tokens, without its outputs. It points into the arguments."""
        pass_ = self.shared_addresses(cache, rotations, None if slot_states is None else slot_states.pool_SD)
        num_tokens, tokens = batch.starts[-1], batch.numbers.buffer_info()[0]
        row, column, table = 8 * num_tokens, 8 * len(batch.starts), tokens + 24 * num_tokens
        pass_.num_tokens, pass_.num_segments = num_tokens, len(batch.segments)
        pass_.token_ids, pass_.positions, pass_.write_slots = tokens, tokens + row, tokens + 2 * row
        pass_.before = None if slot_states is None else slot_states.before_T.buffer_info()[0]
        pass_.first_token, pass_.first_key = table, table + column
        pass_.first_tail, pass_.first_seen = table + 2 * column, table + 3 * column
        pass_.key_slots, pass_.tail_positions = table + 4 * column, table + 4 * column + 8 * batch.num_keys
        pass_.seen = batch.seen.buffer_info()[0]
        return pass_

    def shared_addresses(
        self, cache: KVCache, rotations: Sequence[Tables], pool_SD: Float[Tensor, "S D"] | None = None
    ) -> library.Pass:
        """Return the structure of a pass with the addresses of everything that does not depend on its tokens."""
        shared, ids = cache.native.get(self), [*map(id, rotations)]
        if shared is None or shared.rotation_ids != ids:
            shared = _SharedAddresses(rotations, ids, self._made_addresses(cache, rotations))
            cache.native[self] = shared
        pass_ = library.Pass.from_buffer_copy(shared.addresses)
        pass_.keeps = shared  # owns the arrays that the copy points at
        pass_.pool = None if pool_SD is None else pool_SD.data_ptr()
        return pass_

    def _made_addresses(self, cache: KVCache, rotations: Sequence[Tables]) -> library.Pass:
        return library.Pass(
            **self._pools_of(cache),
            cosines=library.pointers([cosines.data_ptr() for cosines, _ in rotations]),
            sines=library.pointers([sines.data_ptr() for _, sines in rotations]),
            kept=library.pointers([0] * (self.structure.num_layers + 1)),
            is_cached_in_half=self.cache_dtype == torch.float16,
        )

    def _pools_of(self, cache: KVCache) -> dict[str, Any]:
        """Return the fields of a pass with the addresses of a cache's keys and values, which never move."""
        shape = self.structure
        pools = cache.pools(shape.num_layers, shape.num_kv_heads, shape.head_size, self.cache_dtype)
        first_NBHK = pools[0][0]
        block_stride, slot_stride, head_stride, _ = first_NBHK.stride()
        assert slot_stride == shape.head_size, "a head's keys must be contiguous"
        num_blocks, block_slots = first_NBHK.shape[:2]
        assert num_blocks == 1 or block_slots == 1 << BLOCK_BITS
        return {
            "keys": library.pointers([keys.data_ptr() for keys, _ in pools]),
            "values": library.pointers([values.data_ptr() for _, values in pools]),
            "head_stride": head_stride,
            "block_bits": BLOCK_BITS,
            "block_gap": 0 if num_blocks == 1 else block_stride // slot_stride - block_slots,
        }
