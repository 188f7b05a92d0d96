"""Attention over a table as two Triton kernels: tiles of queries over their keys, and the merge of parts split over keys.

The layout of the table is engine.attention.paged.table; engine.attention.paged.launch starts the kernels. A program has one tile,
one key-value head and one part of the keys. A row of its products is a query with one of the heads that share the key-value head:

    rows     [ q0 g0 | q0 g1 | .. | q1 g0 | .. ]      M = queries of a tile x G, padded to a power of two
    columns  [ earlier context, visible to all | tail keys, visible by bits ]      N at a time, by an online softmax

Scores, their softmax and sums are float32, as are products of float32 numbers, without TF32.
Shape key: T tokens, H key-value heads, G query heads for each, V size of a value, P parts of the keys.
"""

import triton
import triton.language as tl

from engine.attention.paged.table import NUM_TILE_FIELDS, WORD_BITS

_LOG2_E = tl.constexpr(1.4426950408889634)
_FIELDS, _WORD_BITS = tl.constexpr(NUM_TILE_FIELDS), tl.constexpr(WORD_BITS)
_WORD_SHIFT = tl.constexpr(WORD_BITS.bit_length() - 1)


@triton.jit
def _column_block(
    q,
    state,  # the largest score of each row so far, the sum of its weights, and the weighted sum of values
    begin,
    end,
    num_context,
    tile,  # where the segment's key slots, tail positions and bits begin
    words,  # each row's bits
    positions,
    is_row,
    table,
    keys,
    values,
    head,
    scale,
    softcap,
    window,
    NUM_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    IS_TAIL: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Update the online softmax with the next N keys."""
    best, total, sums = state
    columns = begin + tl.arange(0, BLOCK_N)
    is_column = columns < end
    slots = tl.load(table + tile[0] + columns, mask=is_column, other=0).to(tl.int64)
    sizes, value_sizes = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    key_offsets = (slots * NUM_HEADS + head)[None, :] * K + sizes[:, None]
    k = tl.load(keys + key_offsets, mask=is_column[None, :] & (sizes < K)[:, None], other=0.0)
    scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
    if HAS_SOFTCAP:  # tanh(x) = 2 sigmoid(2 x) - 1
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    is_seen = is_row[:, None] & is_column[None, :]
    tail = columns - num_context
    if IS_TAIL:
        is_tail = is_column & (tail >= 0)
        word = tl.load(words[:, None] + (tail >> _WORD_SHIFT)[None, :], mask=is_seen & is_tail[None, :], other=-1)
        is_seen &= ((word >> (tail & (_WORD_BITS - 1))[None, :]) & 1) == 1  # context's are negative, and their words all ones
    if HAS_WINDOW:
        key_positions = columns
        if IS_TAIL:
            tail_positions = tl.load(table + tile[1] + tail, mask=is_tail, other=0)
            key_positions = tl.where(is_tail, tail_positions, columns)
        is_seen &= positions[:, None] - key_positions[None, :] < window
    scores = tl.where(is_seen, scores * _LOG2_E, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    shift = tl.where(new_best == float("-inf"), 0.0, new_best)  # of rows that have seen nothing yet
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(best - shift)
    value_offsets = (slots * NUM_HEADS + head)[:, None] * V + value_sizes[None, :]
    v = tl.load(values + value_offsets, mask=is_column[:, None] & (value_sizes < V)[None, :], other=0.0)
    sums = tl.dot(weights.to(q.dtype), v.to(q.dtype), sums * decay[:, None], input_precision="ieee")
    return new_best, total * decay + tl.sum(weights, 1), sums


# Shape-dependent numbers are not specialised, or each value would need its own compilation.
@triton.jit(do_not_specialize=["num_tokens", "num_parts", "first_tile", "first_position", "window"])
def attend(
    query,
    keys,
    values,
    table,
    sinks,  # [H G]
    out,  # [T, H G, V], or if keys are split float32 [P, T, H G, V]
    logs,  # if keys are split each row's log2 of its weights' sum [P, T, H G]
    num_tokens,
    num_parts,
    first_tile,
    first_position,
    scale,
    softcap,
    window,
    G: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    TILE_LEN: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Attend with the queries of one tile and one key-value head to one part of the segment's keys."""
    head, part = tl.program_id(1), tl.program_id(2)
    fields = table + first_tile + tl.program_id(0) * _FIELDS
    first_token, num_queries = tl.load(fields), tl.load(fields + 1)
    first_key, num_keys = tl.load(fields + 2), tl.load(fields + 3)
    first_tail, num_tail = tl.load(fields + 4), tl.load(fields + 5)
    first_word, first_query = tl.load(fields + 6), tl.load(fields + 7)
    if first_query < num_queries:
        rows = tl.arange(0, BLOCK_M)
        queries = first_query + rows // G
        is_row = (rows < TILE_LEN * G) & (queries < num_queries)
        tokens = first_token + queries
        heads = tokens * (NUM_HEADS * G) + head * G + rows % G
        sizes = tl.arange(0, BLOCK_K)
        q = tl.load(query + heads[:, None] * K + sizes[None, :], mask=is_row[:, None] & (sizes < K)[None, :], other=0.0)
        positions = tl.load(table + first_position + tokens, mask=is_row, other=0)
        words = table + first_word + queries * tl.cdiv(num_tail, _WORD_BITS)
        num_context = num_keys - num_tail
        first = 0
        if HAS_WINDOW:  # no query of the tile sees an earlier key
            earliest = tl.min(tl.where(is_row, positions, 2147483647), 0)
            first = tl.minimum(tl.maximum(earliest - window + 1, 0), num_context) // BLOCK_N * BLOCK_N
        share = tl.cdiv(tl.cdiv(num_keys - first, BLOCK_N), num_parts) * BLOCK_N
        begin = first + part * share
        end = tl.minimum(begin + share, num_keys)
        first_of_tail = num_context // BLOCK_N * BLOCK_N  # from here on blocks hold tail keys
        middle = tl.maximum(tl.minimum(end, first_of_tail), begin)
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if HAS_SINKS:  # a key without a value, in the first part
            sink = tl.load(sinks + head * G + rows % G).to(tl.float32) * _LOG2_E
            best = tl.where(part == 0, sink, best)
            total = tl.where(part == 0, total + 1.0, total)
        state = best, total, tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        tile = first_key, first_tail
        for at in range(begin, middle, BLOCK_N):
            state = _column_block(
                q, state, at, end, num_context, tile, words, positions, is_row, table, keys, values, head, scale, softcap, window,
                NUM_HEADS, K, V, BLOCK_N, BLOCK_K, BLOCK_V, False, HAS_SOFTCAP, HAS_WINDOW,
            )  # fmt: skip
        for at in range(middle, end, BLOCK_N):
            state = _column_block(
                q, state, at, end, num_context, tile, words, positions, is_row, table, keys, values, head, scale, softcap, window,
                NUM_HEADS, K, V, BLOCK_N, BLOCK_K, BLOCK_V, True, HAS_SOFTCAP, HAS_WINDOW,
            )  # fmt: skip
        best, total, sums = state
        is_empty = total == 0.0
        result = sums / tl.where(is_empty, 1.0, total)[:, None]
        value_sizes = tl.arange(0, BLOCK_V)
        is_written = is_row[:, None] & (value_sizes < V)[None, :]
        places = part.to(tl.int64) * num_tokens * (NUM_HEADS * G) + heads
        tl.store(out + places[:, None] * V + value_sizes[None, :], result.to(out.dtype.element_ty), mask=is_written)
        if IS_SPLIT:
            sizes_of_sums = tl.where(is_empty, float("-inf"), best + tl.log2(tl.where(is_empty, 1.0, total)))
            tl.store(logs + places, sizes_of_sums, mask=is_row)


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def merge(
    parts,
    logs,
    out,
    num_rows,
    num_parts,
    V: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Merge a row's parts, weighted by the sums of their weights: log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK_P)
    sizes = tl.arange(0, BLOCK_V)
    log = tl.load(logs + part * num_rows + row, mask=part < num_parts, other=float("-inf"))
    best = tl.max(log, 0)
    weights = tl.exp2(log - tl.where(best == float("-inf"), 0.0, best))
    total = tl.sum(weights, 0)
    is_there = (part < num_parts)[:, None] & (sizes < V)[None, :]
    sums = tl.load(parts + (part * num_rows + row)[:, None] * V + sizes[None, :], mask=is_there, other=0.0)
    merged = tl.sum(sums * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * V + sizes, merged.to(out.dtype.element_ty), mask=sizes < V)
