"""Packs the tokens of many sequences into one forward, with the slots to which each token attends.

A Segment is the part of one sequence: query tokens, the slots of their keys, and the keys visible to each query. A prompt chunk,
a root with its tree and a level of a growing tree are all segments. Segments of similar size share a padded Group, so that
attention is a few batched products. Shape key: T query tokens, L keys, W tail keys, B segments of a group.

    keys of a segment   [ earlier context: visible to every query | tail: visible by tail_visible_TW ]
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, islice
from typing import Any

import msgspec
import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from engine.utils.host_transfer import Integers, arrays

_MAX_PADDING = 2.0  # a group may be at most this many times as large as its segments together


class Segment(msgspec.Struct, frozen=True):
    """One sequence's queries. `key_slots` ends with the W tail keys at `tail_positions`; earlier keys are at 0, 1, 2, ...

    The first `num_chain` tokens are certain, each the parent of the next: no pass continues from one of them but the last.
    `adapter` names the LoRA adapter under which they run; None is the base.
    """

    token_ids: Sequence[int]
    positions: Sequence[int]
    write_slots: Sequence[int]
    key_slots: Sequence[int]
    tail_visible_TW: NDArray[np.bool_]
    tail_positions: Sequence[int]
    num_chain: int = 0
    adapter: str | None = None

    @property
    def num_tokens(self) -> int:
        """Query tokens, T."""
        return len(self.token_ids)

    @property
    def num_keys(self) -> int:
        """Keys, L."""
        return len(self.key_slots)

    def key_positions(self) -> NDArray[np.int64]:
        """Return the absolute position of every key, int64 [L]."""
        num_context = self.num_keys - len(self.tail_positions)
        return np.concatenate([np.arange(num_context), np.asarray(self.tail_positions, dtype=np.int64)])


@dataclass(frozen=True)
class Group:
    """B segments padded to T queries and L keys. `token_index_BT` selects packed tokens; a padding query sees one key."""

    token_index_BT: Int[Tensor, "B T"]
    key_slots_BL: Int[Tensor, "B L"]
    visible_BTL: Bool[Tensor, "B T L"]
    query_positions_BT: Int[Tensor, "B T"]
    key_positions_BL: Int[Tensor, "B L"]
    _biases: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict, repr=False)

    def bias(self, window: int | None, dtype: torch.dtype) -> Float[Tensor, "B 1 1 T L"]:
        """Return the additive mask: 0 where a query sees a key, -inf elsewhere; computed once a step for each window.

        `window`: a query at position i sees keys at positions (i - window, i].
        """
        key = (window, dtype)
        if key not in self._biases:
            visible = self.visible_BTL
            if window is not None:
                visible = visible & (self.query_positions_BT[:, :, None] - self.key_positions_BL[:, None, :] < window)
            bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
            self._biases[key] = bias[:, None, None]
        return self._biases[key]


@dataclass(frozen=True)
class Padded:
    """Segments as padded groups, on the device.

    `unpad_T` is each packed token's index in the concatenated padded outputs of all groups. `is_identity`: the outputs are in
    packed order without padding.
    """

    groups: tuple[Group, ...]
    unpad_T: Int[Tensor, " T"]
    is_identity: bool


class PackedBatch(msgspec.Struct, frozen=True, dict=True, eq=False):
    """The input of one forward: B segments end to end. Device tensors and padded groups are built on first use.

    `numbers` are in the host's memory: token ids, positions and slots to write, [3, T], then a table of the offsets of each
    segment's packed tokens, keys, tail keys and entries of `seen`, [4, B + 1], then the slots of all keys, then the positions of
    all tail keys. `starts` has the first packed token of each segment, and the end.
    """

    numbers: Integers
    seen: Integers
    starts: tuple[int, ...]
    num_keys: int
    segments: tuple[Segment, ...]
    device: torch.device

    @property
    def num_tokens(self) -> int:
        """Packed tokens, T."""
        return self.starts[-1]

    @property
    def end(self) -> int:
        """The largest position plus one."""
        return max(self.numbers[self.starts[-1] : 2 * self.starts[-1]]) + 1

    @cached_property
    def _parts(self) -> list[NDArray[np.int64]]:
        sizes = (3 * self.num_tokens, 4 * len(self.starts), self.num_keys)
        return np.split(np.frombuffer(self.numbers, dtype=np.int64), [*accumulate(sizes)])

    @property
    def tokens_3T(self) -> Int[np.ndarray[Any, np.dtype[np.int64]], "3 T"]:  # jaxtyping does not see through the alias NDArray
        """Token ids, positions and the slots to write."""
        return self._parts[0].reshape(3, self.num_tokens)

    @property
    def table(self) -> NDArray[np.int64]:
        """The offsets of each segment's parts."""
        return self._parts[1].reshape(4, len(self.starts))

    @property
    def key_slots(self) -> NDArray[np.int64]:
        """The slots of all keys."""
        return self._parts[2]

    @property
    def tail_positions(self) -> NDArray[np.int64]:
        """The positions of all tail keys."""
        return self._parts[3]

    @cached_property
    def _on_device(self) -> list[Tensor]:
        return arrays([*self.tokens_3T], self.device)

    @property
    def input_ids_1T(self) -> Int[Tensor, "1 T"]:
        """Token ids, on the device."""
        return self._on_device[0][None]

    @property
    def position_ids_1T(self) -> Int[Tensor, "1 T"]:
        """Positions, on the device."""
        return self._on_device[1][None]

    @property
    def write_slots_T(self) -> Int[Tensor, " T"]:
        """Slots to write, on the device."""
        return self._on_device[2]

    @cached_property
    def padded(self) -> Padded:
        """The segments as padded groups."""
        return _padded(self.segments, self.starts, self.device)


def _grouped(segments: Sequence[Segment]) -> list[list[int]]:
    """Return indices of segments that share a group: similar sizes together, so that padding stays bounded."""
    order = sorted(range(len(segments)), key=lambda i: (segments[i].num_tokens, segments[i].num_keys))
    groups: list[list[int]] = []
    area = height = width = 0
    for index in order:
        tokens, keys = segments[index].num_tokens, segments[index].num_keys
        new_area, new_height, new_width = area + tokens * keys, max(height, tokens), max(width, keys)
        if groups and (len(groups[-1]) + 1) * new_height * new_width <= _MAX_PADDING * new_area:
            groups[-1].append(index)
            area, height, width = new_area, new_height, new_width
        else:
            groups.append([index])
            area, height, width = tokens * keys, tokens, keys
    return groups


def _tables(segments: Sequence[Segment], starts: Sequence[int]) -> tuple[list[NDArray[np.int64]], NDArray[np.bool_]]:
    """Return a group's integers (token indices, key slots, positions of queries and keys) and its visibility mask."""
    num_rows = len(segments)
    height, width = max(s.num_tokens for s in segments), max(s.num_keys for s in segments)
    token_index = np.zeros((num_rows, height), dtype=np.int64)
    slots = np.empty((num_rows, width), dtype=np.int64)
    visible = np.zeros((num_rows, height, width), dtype=np.bool_)
    query_positions = np.zeros((num_rows, height), dtype=np.int64)
    key_positions = np.zeros((num_rows, width), dtype=np.int64)
    for row, (segment, start) in enumerate(zip(segments, starts, strict=True)):
        tokens, keys = segment.num_tokens, segment.num_keys
        num_context = keys - len(segment.tail_positions)
        token_index[row, :tokens] = np.arange(start, start + tokens)
        token_index[row, tokens:] = start
        slots[row, :keys] = segment.key_slots
        slots[row, keys:] = segment.key_slots[0]
        visible[row, :tokens, :num_context] = True
        visible[row, :tokens, num_context:keys] = segment.tail_visible_TW
        visible[row, tokens:, 0] = True
        query_positions[row, :tokens] = segment.positions
        key_positions[row, :keys] = segment.key_positions()
    return [token_index, slots, query_positions, key_positions], visible


def _unpadding(segments: Sequence[Segment], starts: Sequence[int], groups: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    unpad = np.empty(starts[-1], dtype=np.int64)
    base = 0
    for group in groups:
        height = max(segments[index].num_tokens for index in group)
        for row, index in enumerate(group):
            first = base + row * height
            unpad[starts[index] : starts[index + 1]] = np.arange(first, first + segments[index].num_tokens)
        base += len(group) * height
    return unpad


def pack(segments: Sequence[Segment], device: torch.device) -> PackedBatch:
    """Pack segments in their order into one batch for `device`."""
    token_ids, positions, write_slots, key_slots, tail_positions = (array("q") for _ in range(5))
    seen, offsets = array("B"), array("q", (0, 0, 0, 0))  # offsets of the segments' parts, segment after segment
    for segment in segments:
        token_ids.extend(segment.token_ids)
        positions.extend(segment.positions)
        write_slots.extend(segment.write_slots)
        key_slots.extend(segment.key_slots)
        tail_positions.extend(segment.tail_positions)
        seen.frombytes(segment.tail_visible_TW.tobytes())
        offsets.extend((len(token_ids), len(key_slots), len(tail_positions), len(seen)))
    table = offsets[::4] + offsets[1::4] + offsets[2::4] + offsets[3::4]
    numbers = token_ids + positions + write_slots + table + key_slots + tail_positions
    return PackedBatch(numbers, seen, tuple(offsets[::4]), len(key_slots), tuple(segments), device)


def _padded(segments: Sequence[Segment], starts: Sequence[int], device: torch.device) -> Padded:
    grouped = _grouped(segments)
    unpad = _unpadding(segments, starts, grouped)
    tables = [_tables([segments[i] for i in group], [starts[i] for i in group]) for group in grouped]
    tensors = iter(arrays([unpad, *(table for integers, _ in tables for table in integers)], device))
    unpad_T = next(tensors)

    def group(visible: NDArray[np.bool_]) -> Group:
        token_index_BT, key_slots_BL, query_positions_BT, key_positions_BL = islice(tensors, 4)
        visible_BTL = torch.from_numpy(visible).to(device)
        return Group(token_index_BT, key_slots_BL, visible_BTL, query_positions_BT, key_positions_BL)

    return Padded(tuple(group(visible) for _, visible in tables), unpad_T, bool((unpad == np.arange(len(unpad))).all()))
