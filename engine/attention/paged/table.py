"""A batch as one table of 32-bit integers, transferred at once. The shape decides its layout; the topology is data.

    [ C columns of tokens | A columns of output tokens | tiles, 8 numbers each | key slots | tail positions | seen bits ]

The offsets of columns and tiles depend on the shape alone. The rest has the length that the batch needs, and tiles contain the
offsets into it. A tile is a few consecutive queries of one segment, which share the keys they read. Padding tokens are one more
segment, without keys. A query's visibility of the tail is a row of bits, 32 to a word, the lowest first.

Shape key: T tokens, padding included, N output tokens, W tail keys of a segment.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.packing import PackedBatch, Segment, pack

NUM_TILE_FIELDS = 8
WORD_BITS = 32
IDS, POSITIONS, WRITE_SLOTS = range(3)  # the token columns of every pass
_FEW, _MANY, MANY_TOKENS = 8, 16, 128  # queries of a tile below MANY_TOKENS tokens, and from there on


@dataclass(frozen=True, order=True)
class Shape:
    """The numbers that determine all tensor shapes of a pass: tokens, and output tokens.

    With `is_by_row`, each token reads its keys in the order of their positions: its output has the same bits in any pass.
    """

    num_tokens: int
    num_outputs: int
    is_by_row: bool = False

    @property
    def tile_len(self) -> int:
        """Queries of a tile."""
        if self.is_by_row:
            return 1
        return min(_FEW if self.num_tokens < MANY_TOKENS else _MANY, 1 << (self.num_tokens - 1).bit_length())


Numbers = Sequence[int] | NDArray[np.int64]


@dataclass(frozen=True)
class TableColumns:
    """The padding value of each column of tokens and of output tokens."""

    tokens: tuple[int, ...]
    outputs: tuple[int, ...]

    def head_len(self, shape: Shape) -> int:
        """Return the length of all columns and tiles."""
        return (len(self.tokens) + NUM_TILE_FIELDS) * shape.num_tokens + len(self.outputs) * shape.num_outputs


def table_of(
    batch: PackedBatch, shape: Shape, columns: TableColumns, tokens: Sequence[Numbers] = (), outputs: Sequence[Numbers] = ()
) -> NDArray[np.int32]:
    """Return the table of a batch padded to a shape. `tokens` are columns in addition to the batch's own."""
    assert batch.num_tokens <= shape.num_tokens
    if shape.is_by_row:
        batch = pack([one for segment in batch.segments for one in _by_row(segment)], batch.device)
    own = [_padded(*column, shape.num_tokens) for column in zip([*batch.tokens_3T, *tokens], columns.tokens, strict=True)]
    output_columns = [_padded(*column, shape.num_outputs) for column in zip(outputs, columns.outputs, strict=True)]
    head_len, tails = columns.head_len(shape), _tails(batch)
    tiles = _tiles(batch, shape, head_len, tails.first_words)
    return np.concatenate([*own, *output_columns, tiles.ravel(), *tails.parts], dtype=np.int32, casting="unsafe")


def _by_row(segment: Segment) -> Iterator[Segment]:
    """Yield a segment for each token, with the keys that it sees. Those of a chain are a part of the segment's own."""
    num_context = len(segment.key_slots) - len(segment.tail_positions)
    for query, position in enumerate(segment.positions):
        seen = segment.tail_visible_TW[query].nonzero()[0].tolist()
        end = num_context + len(seen)
        keys = segment.key_slots[:end]
        if seen[-1] >= len(seen):
            keys = [*segment.key_slots[:num_context], *(segment.key_slots[num_context + place] for place in seen)]
        ids, slots = segment.token_ids[query : query + 1], segment.write_slots[query : query + 1]
        yield Segment(ids, [position], slots, keys, _ITSELF, [position])


_ITSELF = np.ones((1, 1), dtype=np.bool_)


def halves_of(numbers: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return two columns that hold numbers of 64 bits, the low halves first."""
    halves_N2 = np.ascontiguousarray(numbers).view("<i4").reshape(-1, 2)
    return [halves_N2[:, 0].astype(np.int64), halves_N2[:, 1].astype(np.int64)]


def _padded(numbers: Numbers, padding: int, length: int) -> NDArray[np.int32]:
    padded = np.full(length, padding, dtype=np.int32)
    padded[: len(numbers)] = numbers
    return padded


class _Tails(NamedTuple):
    """The table after the tiles, and the offset in it of each segment's seen bits."""

    parts: list[NDArray[np.int32]]
    first_words: NDArray[np.int64]


def _tails(batch: PackedBatch) -> _Tails:
    if not batch.segments:
        return _Tails([], np.zeros(0, dtype=np.int64))
    words = [_bits(segment.tail_visible_TW) for segment in batch.segments]
    sizes = np.array([0, *(part.size for part in words[:-1])])
    key_slots, tail_positions = batch.key_slots.astype(np.int32), batch.tail_positions.astype(np.int32)
    before = len(key_slots) + len(tail_positions)
    parts = [key_slots, tail_positions, *(part.ravel() for part in words)]
    return _Tails(parts, before + sizes.cumsum())


def num_words(num_tail: int) -> int:
    """Return the number of words of a query's bits."""
    return -(-num_tail // WORD_BITS)


def _bits(seen_TW: NDArray[np.bool_]) -> NDArray[np.int32]:
    num_queries, num_tail = seen_TW.shape
    padded = np.zeros((num_queries, num_words(num_tail) * WORD_BITS // 8), dtype=np.uint8)
    packed = np.packbits(seen_TW, axis=1, bitorder="little")
    padded[:, : packed.shape[1]] = packed
    return padded.view("<i4")


def _tiles(batch: PackedBatch, shape: Shape, head_len: int, first_words: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the tiles, [T, 8]; unused tiles have no queries.

    Fields of the segment: first token, number of queries, offset of key slots, number of keys, offset of tail positions, number
    of tail keys, offset of seen bits. The last field is the tile's first query.
    """
    num_segments = len(batch.segments)
    segments = np.zeros((num_segments + 1, NUM_TILE_FIELDS), dtype=np.int64)
    segments[-1, :2] = batch.num_tokens, shape.num_tokens - batch.num_tokens  # padding
    if num_segments:
        starts, keys, tails, _ = batch.table
        first_tails = head_len + keys[-1]
        fields = [starts[:-1], np.diff(starts), head_len + keys[:-1], np.diff(keys), first_tails + tails[:-1], np.diff(tails)]
        segments[:-1, :6] = np.stack(fields, axis=1)
        segments[:-1, 6] = head_len + first_words
    counts = -(-segments[:, 1] // shape.tile_len)
    tiles = np.zeros((shape.num_tokens, NUM_TILE_FIELDS), dtype=np.int64)
    tiles[: counts.sum()] = np.repeat(segments, counts, axis=0)
    tiles[: counts.sum(), 7] = (np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)) * shape.tile_len
    return tiles


def tail_places(batch: PackedBatch, shape: Shape, columns: TableColumns) -> NDArray[np.int64]:
    """Return where in a batch's table each segment's tail begins: its key slots, its positions and its seen bits, [B, 3]."""
    _, keys, tails, _ = batch.table
    first_key, first_word = columns.head_len(shape), _tails(batch).first_words
    slots = first_key + keys[1:] - np.diff(tails)
    return np.stack([slots, first_key + keys[-1] + tails[:-1], first_key + first_word], axis=1)


class Room(NamedTuple):
    """The place of a tree in a table: its first node's token, output, tail position and seen bits, each without the root's."""

    num_nodes: int
    root_position: int
    first_token: int
    first_output: int
    first_tail: int
    first_word: int
    num_words: int
    root_bit: int


@dataclass(frozen=True)
class PagedBatch:
    """A table on the device, read by its shape and columns."""

    table: Int[Tensor, " _"]
    shape: Shape
    columns: TableColumns

    @cached_property
    def tokens(self) -> tuple[Int[Tensor, " T"], ...]:
        """The columns of tokens, int64."""
        return self._read(0, len(self.columns.tokens), self.shape.num_tokens)

    @cached_property
    def outputs(self) -> tuple[Int[Tensor, " N"], ...]:
        """The columns of output tokens, int64."""
        first = len(self.columns.tokens) * self.shape.num_tokens
        return self._read(first, len(self.columns.outputs), self.shape.num_outputs)

    def with_ids_below(self, end: int) -> Self:
        """Return the batch with token ids clamped below `end`."""
        known = replace(self)
        vars(known)["tokens"] = (
            self.tokens[IDS].clamp(max=end - 1),
            *self.tokens[IDS + 1 :],
        )  # the storage of the cached property
        return known

    @property
    def first_tile(self) -> int:
        """Offset of the tiles."""
        return self.columns.head_len(self.shape) - NUM_TILE_FIELDS * self.shape.num_tokens

    @property
    def first_position(self) -> int:
        """Offset of the tokens' positions."""
        return POSITIONS * self.shape.num_tokens

    @property
    def write_slots_T(self) -> Int[Tensor, " T"]:
        """Slots to write."""
        return self.tokens[WRITE_SLOTS]

    def wide_outputs(self, first: int) -> Int[Tensor, "C N"]:
        """Return numbers of 64 bits from the output columns after `first`, two of them each (halves_of)."""
        length, num_halves = self.shape.num_outputs, len(self.columns.outputs) - first
        begin = len(self.columns.tokens) * self.shape.num_tokens + first * length
        halves_C2N = self.table[begin : begin + num_halves * length].view(-1, 2, length)
        return torch.stack(halves_C2N.unbind(1), dim=-1).view(torch.int64)[..., 0]

    def _read(self, first: int, count: int, length: int) -> tuple[Tensor, ...]:
        return (*self.table[first : first + count * length].view(count, length).to(torch.int64),)
