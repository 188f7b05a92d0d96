"""Attention over tables = attention that gathers keys: the reference on many batches, the kernel on a few of every kind.

Without a GPU the kernel is run by Triton's interpreter, program by program.
"""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.paged.attention import check_kernel, unsupported_reason
from engine.attention.paged.reference import attend as reference
from engine.attention.paged.table import Shape
from tests.model.paged import Heads, by, causal, chunk, gathered, inputs, level, needs_triton, paged, random_segments, with_tiles

if find_spec("triton"):
    import triton
    import triton.language as tl

    from engine.attention.paged import kernels, launch
    from tests.model.interpreted import widened_products

EXACT, WRONG = 1e-5, 1e-2
FEW_PROGRAMS = 16
ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
RAGGED = (0, 5, 70, 33)  # tokens of context


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Cut keys in two parts or so: an interpreted program takes milliseconds."""
    if find_spec("triton"):
        monkeypatch.setattr(launch, "_PROGRAMS", FEW_PROGRAMS)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    contexts=st.lists(st.integers(0, 90), min_size=1, max_size=5),
    num_padding=st.integers(0, 20),
    window=st.none() | st.integers(1, 40),
    softcap=st.none() | st.just(3.0),
    has_sinks=st.booleans(),
)
def test_the_reference_is_the_gathering_attention(seed, contexts, num_padding, window, softcap, has_sinks):
    heads = Heads(size=8, value_size=8, window=window, softcap=softcap, has_sinks=has_sinks)
    segments = random_segments(seed, contexts)
    num_tokens = sum(segment.num_tokens for segment in segments)
    given = inputs(num_tokens + num_padding, heads)
    out = by(reference, given, paged(segments, num_tokens + num_padding), heads)
    assert (out[:num_tokens] - gathered(given, segments, heads)).abs().max() < EXACT
    assert not out[num_tokens:].any()


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), contexts=st.lists(st.integers(0, 40), min_size=1, max_size=4), window=st.none() | st.just(5))
def test_tokens_read_by_row_see_equal_keys(seed, contexts, window):
    """A token's own segment has the keys of its path."""
    heads = Heads(size=8, value_size=8, window=window)
    segments = [*random_segments(seed, contexts), level()]
    num_tokens = sum(segment.num_tokens for segment in segments)
    given = inputs(num_tokens + 3, heads)
    out = by(reference, given, paged(segments, num_tokens + 3, is_by_row=True), heads)
    assert (out[:num_tokens] - gathered(given, segments, heads)).abs().max() < EXACT
    assert not out[num_tokens:].any()


def kernel_error(heads, segments, num_tokens, dtype=torch.float32, batch_of=lambda batch: batch):
    """Return how far the kernel is from the gathering attention in float32, and demand that padding be zeros."""
    given = inputs(num_tokens, heads, dtype)
    with widened_products():
        out = by(launch.attend, given, batch_of(paged(segments, num_tokens)), heads)
    expected = gathered(given, segments, heads)
    assert not out[len(expected) :].any()
    return float((out[: len(expected)] - expected).abs().max())


CASES = {
    "one token": (Heads(1, 1, 64, 64), lambda: random_segments(1, [0], 1, 1), 1),
    "one token of a long text": (Heads(1, 3, 64, 64), lambda: random_segments(1, [300], 1, 1), 1),
    "ragged": (Heads(2, 2, 64, 64), lambda: random_segments(2, RAGGED), 32),
    "heads of 80": (Heads(2, 3, 80, 80), lambda: random_segments(3, RAGGED), 32),
    "heads of 128, seven queries each": (Heads(1, 7, 128, 128), lambda: random_segments(4, RAGGED), 32),
    "values of another size": (Heads(2, 1, 64, 16), lambda: random_segments(5, RAGGED), 32),
    "window": (Heads(1, 2, 64, 64, window=6), lambda: [*random_segments(6, RAGGED), level()], 32),
    "window shorter than a tree": (Heads(1, 2, 64, 64, window=2), lambda: random_segments(7, RAGGED), 32),
    "cap": (Heads(1, 2, 64, 64, softcap=2.0), lambda: random_segments(8, RAGGED), 32),
    "sinks": (Heads(2, 3, 64, 64, has_sinks=True), lambda: random_segments(8, RAGGED), 32),
    "sinks in a window": (Heads(1, 2, 64, 64, window=6, has_sinks=True), lambda: [*random_segments(6, RAGGED), level()], 32),
    "a level": (Heads(1, 2, 64, 64), lambda: [level()], 2),
    "a chunk beside trees": (Heads(1, 1, 16, 16), lambda: [chunk(100, 30), *random_segments(9, RAGGED)], 128),
    "a chunk in a window": (Heads(1, 1, 16, 16, window=20), lambda: [chunk(100, 30)], 128),
}


@needs_triton
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_is_the_gathering_attention(case):
    heads, segments, num_tokens = CASES[case]
    assert kernel_error(heads, segments(), num_tokens) < EXACT


@needs_triton
@pytest.mark.parametrize("dtype", ROUNDING)
def test_kernel_rounds_no_more_than_inputs(dtype):
    assert kernel_error(Heads(2, 2), random_segments(2, RAGGED), 32, dtype) < ROUNDING[dtype]


@needs_triton
@pytest.mark.parametrize("most", [1, 3, 32])
def test_parts_of_the_keys_are_merged(monkeypatch, most):
    """With any number of parts, those without a key among them."""
    monkeypatch.setattr(launch, "_PROGRAMS", most)
    assert launch.num_parts(Shape(4, 0), 1) == most
    assert kernel_error(Heads(1, 2), random_segments(3, [200, 3], 1, 1), 4) < EXACT


@needs_triton
def test_sinks_left_out_are_noticed():
    heads, segments = Heads(1, 2, has_sinks=True), random_segments(6, RAGGED)
    given = inputs(32, heads)
    out, expected = (
        by(launch.attend, given, paged(segments, 32), replace(heads, has_sinks=False)),
        gathered(given, segments, heads),
    )
    assert (out[: len(expected)] - expected).abs().max() > WRONG


@needs_triton
@pytest.mark.parametrize("most", [1, 3, 32])
def test_sinks_count_once_with_parts(monkeypatch, most):
    """A sink is in the first part of the keys alone."""
    monkeypatch.setattr(launch, "_PROGRAMS", most)
    assert kernel_error(Heads(1, 2, has_sinks=True), random_segments(3, [200, 3], 1, 1), 4) < EXACT


@needs_triton
def test_a_causal_mask_is_noticed():
    segments = random_segments(2, RAGGED)
    given = inputs(32, Heads())
    out = by(launch.attend, given, paged([*map(causal, segments)], 32), Heads())
    expected = gathered(given, segments, Heads())
    assert (out[: len(expected)] - expected).abs().max() > WRONG


@needs_triton
@pytest.mark.parametrize("field", [2, 4, 5, 6], ids=["key slots", "tail positions", "tail keys", "bits"])
def test_a_wrong_offset_is_noticed(field):
    """Tail positions show in windows alone."""
    heads = Heads(1, 2, window=4)
    assert kernel_error(heads, random_segments(6, RAGGED), 32) < EXACT
    assert kernel_error(heads, random_segments(6, RAGGED), 32, batch_of=lambda batch: with_tiles(batch, field, 1)) > WRONG


@needs_triton
def test_a_merge_without_weights_is_noticed(monkeypatch):
    @triton.jit
    def evenly(parts, logs, out, num_rows, num_parts, V: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr):
        row, part, sizes = tl.program_id(0), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
        is_there = (tl.load(logs + part * num_rows + row, mask=part < num_parts, other=float("-inf")) > float("-inf")).to(
            tl.float32
        )
        each = tl.load(parts + (part * num_rows + row)[:, None] * V + sizes[None, :], mask=(part < num_parts)[:, None], other=0.0)
        tl.store(
            out + row * V + sizes, tl.sum(each * is_there[:, None], 0) / tl.maximum(tl.sum(is_there, 0), 1.0), mask=sizes < V
        )

    monkeypatch.setattr(kernels, "merge", evenly)
    assert kernel_error(Heads(1, 2), random_segments(3, [200, 3], 1, 1), 4) > WRONG


@needs_triton
def test_a_window_one_too_wide_is_noticed():
    heads, segments = Heads(1, 2, window=6), random_segments(6, RAGGED)
    given = inputs(32, heads)
    out, expected = by(launch.attend, given, paged(segments, 32), replace(heads, window=7)), gathered(given, segments, heads)
    assert (out[: len(expected)] - expected).abs().max() > WRONG


def test_unsupported_kernel_case_is_named():
    cuda = torch.device("cuda")
    assert "no CUDA device" in (unsupported_reason(torch.device("cpu"), 64, 1, torch.float32) or "")
    assert "heads of 512" in (unsupported_reason(cuda, 512, 1, torch.float32) or "") or find_spec("triton") is None
    assert "16 heads of 256" in (unsupported_reason(cuda, 256, 16, torch.bfloat16) or "") or find_spec("triton") is None
    assert "float64" in (unsupported_reason(cuda, 64, 1, torch.float64) or "") or find_spec("triton") is None
    assert unsupported_reason(cuda, 128, 1, torch.bfloat16) is None or find_spec("triton") is None


def test_kernel_runs_with_tiles_of_each_length():
    tried: list[int] = []

    def attend(query_THGK, keys_SHK, values_SHV, batch, *others):
        tried.append(batch.shape.tile_len)
        assert not reference(query_THGK, keys_SHK, values_SHV, batch, *others).any()

    check_kernel(attend, torch.device("cpu"), 2, 3, 16, torch.float32)
    assert tried == [1, 16]
