"""The products of a decoder's layer as Triton kernels, with all that surrounds them in the same launch.

    rotated   norm, query-key-value product, bias, norms of heads, rotary embedding, write to the slots
    gated     norm, gate and up products, SiLU(gate) * up
    product   output and down products, added to the states; or norm and the output head

Weights are read once, in rows of `width` numbers. A norm needs no launch: its sum of squares comes from the states that the
product reads, and scales the result. A program has a block of tokens and a block of the weight's rows, or two blocks that belong
together: the halves of a head, or gate and up. It adds along the whole width, so that a token's result depends on no other token.
Sums are float32. Products of float32 numbers do without TF32. Eight-bit weights are widened, and scaled by their row.
Shape key: T tokens, K head size, S slots.
"""

import triton
import triton.language as tl


@triton.jit
def _sums(
    states,
    norm,
    weight,
    tokens,
    is_token,
    first,  # rows of the weight
    second,
    is_row,
    WIDTH: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SECOND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the products of states with one or two blocks of rows, and the states' sums of squares if they are normed."""
    one = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    two = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    number = states.dtype.element_ty
    first_rows = weight + first.to(tl.int64)[None, :] * WIDTH
    second_rows = weight + second.to(tl.int64)[None, :] * WIDTH
    for at in range(0, WIDTH, BLOCK_K):
        columns = at + tl.arange(0, BLOCK_K)
        is_column = columns < WIDTH
        is_state = is_token[:, None] & is_column[None, :]
        is_weight = is_column[:, None] & is_row[None, :]
        x = tl.load(states + tokens[:, None] * WIDTH + columns[None, :], mask=is_state, other=0.0)
        if HAS_NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            x = (wide * tl.load(norm + columns, mask=is_column, other=0.0)[None, :]).to(number)
        rows = tl.load(first_rows + columns[:, None], mask=is_weight, other=0.0)
        one = tl.dot(x, rows.to(number), one, input_precision="ieee")
        if HAS_SECOND:
            rows = tl.load(second_rows + columns[:, None], mask=is_weight, other=0.0)
            two = tl.dot(x, rows.to(number), two, input_precision="ieee")
    return one, two, squares


@triton.jit
def _scaled(sums, rows, is_row, scales, squares, eps, WIDTH: tl.constexpr, HAS_NORM: tl.constexpr, HAS_SCALES: tl.constexpr):
    """Return sums times the scales of their rows and the reciprocal root mean square of their states."""
    if HAS_SCALES:
        sums = sums * tl.load(scales + rows, mask=is_row, other=0.0)[None, :]
    if HAS_NORM:
        sums = sums * tl.rsqrt(squares / WIDTH + eps)[:, None]
    return sums


@triton.jit(do_not_specialize=["num_tokens", "first_position", "first_slot"])
def rotated(
    states,
    norm,
    weight,
    scales,
    bias,
    head_norms,  # [2, K]: of queries and keys
    frequencies,
    table,
    query,
    keys,
    values,
    num_tokens,
    first_position,
    first_slot,
    slot_stride,
    head_stride,
    eps,
    rotary_scale,
    WIDTH: tl.constexpr,
    NUM_QUERY: tl.constexpr,
    NUM_KEY: tl.constexpr,
    K: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_HEAD_NORMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute one head of queries, keys or values; store a query in packed order, a key or value in its token's slot."""
    head = tl.program_id(0)
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_token = tokens < num_tokens
    sizes = tl.arange(0, BLOCK_N)
    is_size = sizes < K // 2
    first = head * K + sizes
    second = first + K // 2
    one, two, squares = _sums(
        states, norm, weight, tokens, is_token, first, second, is_size, WIDTH, True, True, BLOCK_M, BLOCK_N, BLOCK_K
    )
    one = _scaled(one, first, is_size, scales, squares, eps, WIDTH, True, HAS_SCALES)
    two = _scaled(two, second, is_size, scales, squares, eps, WIDTH, True, HAS_SCALES)
    if HAS_BIAS:
        one += tl.load(bias + first, mask=is_size, other=0.0).to(tl.float32)[None, :]
        two += tl.load(bias + second, mask=is_size, other=0.0).to(tl.float32)[None, :]
    if head < NUM_QUERY + NUM_KEY:
        if HAS_HEAD_NORMS:
            own = head_norms + tl.where(head < NUM_QUERY, 0, K) + sizes
            shrink = tl.rsqrt((tl.sum(one * one, 1) + tl.sum(two * two, 1)) / K + eps)[:, None]
            one = one * shrink * tl.load(own, mask=is_size, other=0.0)[None, :]
            two = two * shrink * tl.load(own + K // 2, mask=is_size, other=0.0)[None, :]
        positions = tl.load(table + first_position + tokens, mask=is_token, other=0).to(tl.float32)
        angles = positions[:, None] * tl.load(frequencies + sizes, mask=is_size, other=0.0)[None, :]
        cosines, sines = tl.cos(angles) * rotary_scale, tl.sin(angles) * rotary_scale
        turned = one * cosines - two * sines
        two = two * cosines + one * sines
        one = turned
    is_stored = is_token[:, None] & is_size[None, :]
    if head < NUM_QUERY:
        place = query + (tokens * (NUM_QUERY * K) + head * K)[:, None] + sizes[None, :]
        tl.store(place, one.to(query.dtype.element_ty), mask=is_stored)
        tl.store(place + K // 2, two.to(query.dtype.element_ty), mask=is_stored)
    else:
        slots = tl.load(table + first_slot + tokens, mask=is_token, other=0).to(tl.int64) * slot_stride
        if head < NUM_QUERY + NUM_KEY:
            place = keys + (slots + (head - NUM_QUERY) * head_stride)[:, None] + sizes[None, :]
            tl.store(place, one.to(keys.dtype.element_ty), mask=is_stored)
            tl.store(place + K // 2, two.to(keys.dtype.element_ty), mask=is_stored)
        else:
            place = values + (slots + (head - NUM_QUERY - NUM_KEY) * head_stride)[:, None] + sizes[None, :]
            tl.store(place, one.to(values.dtype.element_ty), mask=is_stored)
            tl.store(place + K // 2, two.to(values.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=["num_tokens"])
def gated(
    states,
    norm,
    weight,  # the gate's rows, then those of `up`
    scales,
    out,
    num_tokens,
    eps,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute a block of SiLU(gate) * up."""
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_token = tokens < num_tokens
    first = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = first < INNER
    second = first + INNER
    gate, up, squares = _sums(
        states, norm, weight, tokens, is_token, first, second, is_row, WIDTH, True, True, BLOCK_M, BLOCK_N, BLOCK_K
    )
    gate = _scaled(gate, first, is_row, scales, squares, eps, WIDTH, True, HAS_SCALES)
    up = _scaled(up, second, is_row, scales, squares, eps, WIDTH, True, HAS_SCALES)
    result = gate * tl.sigmoid(gate) * up
    place = out + tokens[:, None] * INNER + first[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=is_token[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def product(
    states,
    norm,
    weight,
    scales,
    out,
    num_tokens,
    num_rows,
    eps,
    WIDTH: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_ADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute a block of states times weight, added to what `out` has or in its place."""
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_token = tokens < num_tokens
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < num_rows
    sums, _, squares = _sums(
        states, norm, weight, tokens, is_token, rows, rows, is_row, WIDTH, HAS_NORM, False, BLOCK_M, BLOCK_N, BLOCK_K
    )
    sums = _scaled(sums, rows, is_row, scales, squares, eps, WIDTH, HAS_NORM, HAS_SCALES)
    place = out + tokens.to(tl.int64)[:, None] * num_rows + rows[None, :]
    is_stored = is_token[:, None] & is_row[None, :]
    if IS_ADDED:
        sums += tl.load(place, mask=is_stored, other=0.0).to(tl.float32)
    tl.store(place, sums.to(out.dtype.element_ty), mask=is_stored)
