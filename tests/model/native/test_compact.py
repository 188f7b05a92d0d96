"""Compact weights: the contents of GGUF files are found in the fewest bits, stored in the expected layout, and multiplied."""

import ctypes

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from engine.model.causal_lm import adopt
from engine.model.linear_backends import NATIVE
from engine.native import library
from engine.native.compact import BLOCK, GROUP, compact_packed, compact_unpacked, compact_weights
from engine.native.linear import NativeLinear
from engine.testing import tiny_module
from tests.needs import needs_library

BITS = (4, 6, 8)
_Kind = gguf.GGMLQuantizationType
ROUNDED = {_Kind.Q4_0: 4, _Kind.Q4_1: 4, _Kind.Q5_0: 6, _Kind.Q8_0: 8}  # that the package can make
SUPERBLOCKS = {_Kind.Q4_K: 4, _Kind.Q6_K: 6}  # of 256 weights: made of random bytes


def of_file(
    kind: gguf.GGMLQuantizationType, num_outputs: int, num_inputs: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Return weights [O, I] as a checkpoint holds them that was made of a file: dequantised, and rounded to a format."""
    rng = np.random.default_rng(seed)
    if kind in ROUNDED:
        weights = rng.normal(size=(num_outputs, num_inputs)).astype(np.float32) * 10.0 ** rng.uniform(-4, 0)
        blocks = gguf.quants.quantize(weights, kind)
    else:
        block_size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, size=(num_outputs, num_inputs // block_size, num_bytes), dtype=np.uint8)
        scales = rng.uniform(1e-5, 1e-3, size=(*blocks.shape[:2], 2)).astype(np.float16).view(np.uint8)
        if kind == _Kind.Q4_K:
            blocks[..., :4] = scales
        else:
            blocks[..., -2:] = scales[..., :2]
        blocks = blocks.reshape(num_outputs, -1)
    return torch.from_numpy(gguf.quants.dequantize(blocks, kind)).to(dtype).float()


def random(bits: int, num_outputs: int, num_inputs: int) -> torch.Tensor:
    """Return weights [O, I] that take so many bits: any code may be at any place."""
    generator = torch.Generator().manual_seed(num_outputs + num_inputs + bits)
    weight_OI = torch.randn(num_outputs, num_inputs, generator=generator)
    if bits == 8:
        return weight_OI
    together = GROUP if bits == 4 else GROUP // 2
    padded = nn.functional.pad(weight_OI, (0, -num_inputs % together)).unflatten(1, (-1, together))
    steps = 1e-3 + torch.rand(*padded.shape[:2], 1, generator=generator)
    codes = torch.randint(-(1 << bits - 1), 1 << bits - 1, padded.shape, generator=generator)
    return ((codes + (0.3 if bits == 4 else 0.0)) * steps).flatten(1)[:, :num_inputs].bfloat16().float()


def layer(weight_OI: torch.Tensor) -> NativeLinear:
    linear = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=False)
    linear.weight.data = weight_OI
    return NativeLinear(linear.requires_grad_(False), "compact")


def error(weight_OI: torch.Tensor, dense_OI: torch.Tensor) -> float:
    """Return the largest error over the largest weight of its group."""
    missing = -weight_OI.shape[1] % GROUP
    groups = [nn.functional.pad(one, (0, missing)).unflatten(1, (-1, GROUP)) for one in (dense_OI - weight_OI, weight_OI)]
    errors_OG, sizes_OG = (group.abs().amax(2) for group in groups)
    return float((errors_OG / sizes_OG.clamp_min(1e-30)).max())


# what is found


@pytest.mark.parametrize("kind", [*ROUNDED, *SUPERBLOCKS], ids=lambda kind: kind.name)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_codes_of_a_file_are_found(kind, seed, dtype):
    """In numbers rounded to bfloat16, as the presets' are, and in the file's own."""
    weight_OI = of_file(kind, 70, 512, seed, dtype)
    compact = compact_weights(weight_OI)
    assert compact.bits == {**ROUNDED, **SUPERBLOCKS}[kind]
    assert error(weight_OI, compact.dense()) < 2 / 256


def test_group_of_equal_numbers_is_a_grid():
    weight_OI = of_file(_Kind.Q4_K, 64, 256)
    weight_OI[3, :32] = 0.0
    weight_OI[4, 32:64] = -0.75
    weight_OI[5, :32] = torch.tensor([0.0, 0.5]).repeat(16)
    weight_OI[6] = 0.0
    compact = compact_weights(weight_OI)
    assert compact.bits == 4
    dense_OI = compact.dense()
    assert not dense_OI[3, :32].any()
    assert not dense_OI[6].any()
    assert error(weight_OI, dense_OI) < 2 / 256


@pytest.mark.parametrize("bits", [4, 6])
def test_weight_off_the_grid_is_detected(bits):
    """In the last of many outputs, too."""
    weight_OI = random(bits, 1500, 256)
    assert compact_weights(weight_OI).bits == bits
    group = weight_OI[-1, : GROUP if bits == 4 else GROUP // 2]
    group[5] += 0.4 * float(group.amax() - group.amin()) / ((1 << bits) - 1)  # about half a step
    assert compact_weights(weight_OI).bits == 8


def test_symmetric_extremes_do_not_fit_32_steps():
    """Codes are -32 to 31: of the sizes that fit -x, 0 and x, one with a code for x is taken."""
    weight_OI = random(6, 64, 256)
    weight_OI[3, :16] = torch.tensor([0.75, -0.75, 0.0, 0.375]).repeat(4)
    compact = compact_weights(weight_OI)
    assert compact.bits == 6
    assert error(weight_OI, compact.dense()) < 2 / 256


@given(st.integers(8, 70), st.integers(64, 140), st.integers(0, 9), st.sampled_from([1e-6, 1.0, 1e6]))
def test_weights_off_grid_round_to_8_bits(num_outputs, num_inputs, seed, size):
    weight_OI = torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(seed)) * size
    dense_OI = compact_weights(weight_OI).dense()[:, :num_inputs]
    assert error(weight_OI, dense_OI) <= 0.5001 / 127


# layout


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(1, 32), (64, 32), (70, 576), (129, 96), (40, 37)])
def test_packed_weights_are_unpacked_equally(bits, shape):
    compact = compact_weights(random(bits, *shape))
    assert compact.bits == bits
    packed = compact_packed(compact)
    assert packed.shape[:2] == (-(-shape[0] // BLOCK), -(-shape[1] // GROUP))
    found = compact_unpacked(packed, compact.scale_O)
    assert found.bits == bits
    for name in ("codes_OI", "step_OS", "offset_OS"):
        assert getattr(found, name).equal(getattr(compact, name)), name


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("output", "place"), [(0, 0), (17, 6), (70, 45), (101, 63)])
def test_code_is_stored_in_the_quad_line(bits, output, place):
    """As in `compact.h`: the four lines of a quad together, one of 16 outputs each, four inputs of an output side by side."""
    compact = compact_weights(random(bits, 128, 64))
    record = compact_packed(compact)[output // BLOCK, place // GROUP].view(-1, 64)
    column, quad, byte = output % BLOCK // 16, place % GROUP // 4, 4 * (output % 16) + place % 4
    code = int(compact.codes_OI[output, place])
    if bits == 8:
        assert int(record[4 * quad + column, byte]) == code
        return
    assert int(record[4 * (quad % 4) + column, byte]) >> 4 * (quad // 4) & 15 == code & 15
    if bits == 6:
        assert int(record[16 + 4 * (quad // 4) + column, byte]) >> 2 * (quad % 4) & 3 == code >> 4


# what is computed


def expected(native: NativeLinear, x: torch.Tensor) -> torch.Tensor:
    """Return the outputs [T, O], float64: inputs rounded to 8 bits by groups of 32."""
    num_inputs = x.shape[1]
    groups = nn.functional.pad(x, (0, -num_inputs % GROUP)).unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(2, keepdim=True)
    codes = (groups * (torch.full_like(largest, 127.0) / largest)).round()
    rounded: torch.Tensor = (codes.double() * (largest / 127.0).double()).flatten(1)[:, :num_inputs]
    return rounded @ native.dense_weight().double().T


@needs_library
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(40, 32), (64, 64), (129, 576), (70, 37), (65, 2080)])  # the last: several stretches
def test_outputs_are_products_with_rounded_inputs(bits, shape):
    native = layer(random(bits, *shape))
    x = torch.randn(97, shape[1], generator=torch.Generator().manual_seed(1))
    exact = expected(native, x)
    lone = torch.cat([native(row[None]) for row in x])
    assert (lone - exact).abs().max() < 2e-6 * exact.abs().max() * shape[1] ** 0.5
    for num_rows in (*range(2, 32), 97):
        assert native(x[:num_rows]).equal(lone[:num_rows]), num_rows


@needs_library
@pytest.mark.parametrize("bits", BITS)
def test_broken_row_affects_no_other_row(bits):
    native = layer(random(bits, 70, 96))
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(2))
    whole = native(x)
    x[1], x[3, 40], x[5, 95] = 0.0, float("nan"), float("inf")
    found = native(x)
    assert not found[1].any()
    assert found[[3, 5]].isnan().all()
    assert found[::2].equal(whole[::2])


@needs_library
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("num_rows", range(1, 7))
def test_sums_of_the_largest_codes_are_exact(bits, sign, num_rows):
    """With the largest codes and inputs there are, of which a sum of pairs may leave 16 bits."""
    others = {4: (0.0, 1.0), 6: (-32.0, -31.0, -5.0), 8: (-127.0, 3.3)}[bits]  # which make the grid what it is
    weight_OI = torch.full((64, 96), {4: 15.0, 6: 31.0, 8: 127.0}[bits])
    for place, other in enumerate(others):
        weight_OI[:, place::16] = other
    native = layer(weight_OI)
    assert native.structure.format == {4: 3, 6: 4, 8: 5}[bits]
    x = torch.full((num_rows, 96), sign)
    for build in library.supported():
        y = torch.empty(num_rows, 64)
        library.compiled_for(build).latebranch_linear(ctypes.byref(native.structure), x.data_ptr(), num_rows, y.data_ptr(), 1)
        assert torch.allclose(y.double(), x.double() @ native.dense_weight().double().T, rtol=1e-6), build


@needs_library
@pytest.mark.skipif(len(library.supported()) < 2, reason="needs a processor that runs both libraries")
@pytest.mark.parametrize("bits", BITS)
def test_either_library_computes_the_same_bits(bits):
    native = layer(random(bits, 130, 1100))
    for num_rows in (*range(1, 26), 97):
        x = torch.randn(num_rows, 1100, generator=torch.Generator().manual_seed(num_rows)) * 10.0 ** (num_rows % 7 - 3)
        found = []
        for build in library.supported():
            found.append(torch.empty(num_rows, 130))
            arguments = ctypes.byref(native.structure), x.data_ptr(), num_rows, found[-1].data_ptr(), 2
            library.compiled_for(build).latebranch_linear(*arguments)
        assert found[0].equal(found[1]), num_rows


@needs_library
def test_layers_of_one_input_differ_in_bits():
    """For example values in 6 bits beside queries in 4. Adopting compares the passes with the module's own."""
    module = tiny_module("llama")
    for decoder in module.model.layers:
        attention = decoder.self_attn
        for projection, bits in ((attention.q_proj, 4), (attention.v_proj, 6)):
            projection.weight.data = random(bits, *projection.weight.shape) * 0.02
    found = adopt(module, torch.device("cpu"), NATIVE, "compact").module.model.layers[0].self_attn
    assert [one.structure.format for one in (found.q_proj, found.k_proj, found.v_proj)] == [3, 5, 4]
