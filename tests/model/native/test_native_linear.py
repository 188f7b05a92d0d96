"""The library's linear layers: products of the stored weights, each row as if it were alone, by vectors and by tiles."""

import math
from functools import cache

import pytest
import torch
from torch import nn

from engine.model import linear_backends
from engine.model.causal_lm import adopt
from engine.model.linear_backends import NATIVE, prepare_linears, weight_of
from engine.native.compact import GROUP
from engine.native.linear import QUANTISED, NativeLinear, packed, unpacked
from engine.testing import tiny_module
from tests.model.native_models import PRECISIONS
from tests.needs import needs_library

pytestmark = needs_library
SHAPES = [(1, 1), (37, 43), (48, 40), (64, 64), (65, 129), (130, 63), (256, 200), (1100, 70)]  # inputs, outputs


@cache
def layer(precision: str, num_inputs: int = 48, num_outputs: int = 40, bias: bool = True) -> tuple[nn.Linear, NativeLinear]:
    with torch.random.fork_rng():
        torch.manual_seed(num_inputs + num_outputs)
        linear = nn.Linear(num_inputs, num_outputs, bias=bias).requires_grad_(False)
    return linear, NativeLinear(linear, precision)


def rows(num_rows: int, num_inputs: int) -> torch.Tensor:
    """Rows of unlike sizes, with outliers."""
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, num_inputs, generator=generator) * 10.0 ** torch.arange(num_rows)[:, None].remainder(5).sub(2)
    x[:, num_inputs // 2] *= 50.0
    return x


def error_bound(native: NativeLinear, precision: str, x: torch.Tensor) -> torch.Tensor:
    """How far outputs [T, O] may be from exact ones: float32's rounding of sums, and that of inputs to 15 bits, or by 32 to 8."""
    sizes_TO = x.abs().double() @ native.dense_weight().abs().double().T
    together, steps = {"int8": (x.shape[1], 127 * 128), "compact": (GROUP, 127)}.get(precision, (1, math.inf))
    largest_TG, weights_OG = (
        nn.functional.pad(numbers.abs().double(), (0, -x.shape[1] % together)).unflatten(1, (-1, together))
        for numbers in (x, native.dense_weight())
    )
    rounding_TO: torch.Tensor = largest_TG.amax(2) / steps / 2 @ weights_OG.sum(2).T
    return rounding_TO + 1e-6 * (sizes_TO + 1.0)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_are_products_of_stored_weights(shape, bias, precision):
    linear, native = layer(precision, *shape, bias)
    for num_rows in (*range(1, 41), 97, 203):
        x = rows(num_rows, shape[0])
        exact_TO = x.double() @ native.dense_weight().double().T + (linear.bias.double() if bias else 0.0)
        assert ((native(x) - exact_TO).abs() <= error_bound(native, precision, x)).all(), num_rows


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_row_bits_are_equal_in_any_batch(shape, precision):
    """Fewer than four are multiplied by vectors; more in int8 by tiles where there are any; panels are of 96."""
    native = layer(precision, *shape)[1]
    x = rows(203, shape[0])
    lone = torch.cat([native(row[None]) for row in x])
    for num_rows in (*range(1, 41), 96, 97, 98, 99, 100, 203):
        assert torch.equal(native(x[:num_rows]), lone[:num_rows]), num_rows


def test_the_comparison_sees_inputs_rounded_together():
    """Like one scale for the whole batch: the distribution of another model."""
    native = layer("int8", 64, 64, False)[1]
    x = rows(4, 64)
    scale = x.abs().amax() / (127 * 128)
    assert (
        (native((x / scale).round() * scale) - x.double() @ native.dense_weight().double().T).abs()
        > error_bound(native, "int8", x)
    ).any()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_stored_weight_is_rounded(precision):
    linear, native = layer(precision, 65, 129)
    dense_OI = native.dense_weight()
    assert weight_of(native).equal(dense_OI)
    if precision in QUANTISED:
        together = linear.in_features if precision == "int8" else GROUP
        largest_OI = torch.cat([part.abs().amax(1, keepdim=True).expand_as(part) for part in linear.weight.split(together, 1)], 1)
        assert ((dense_OI - linear.weight).abs() <= largest_OI / 127 * 0.5001).all()
    else:
        assert dense_OI.equal(linear.weight.to(getattr(torch, precision)).float())


@pytest.mark.parametrize(("group", "multiple"), [(1, 1), (2, 2), (4, 64)])
def test_packed_weights_are_found_where_they_were(group, multiple):
    weight_OI = torch.arange(70 * 67).view(70, 67)
    stored = packed(weight_OI, group, multiple)
    assert stored.shape == (2, (67 + -67 % multiple) // group, 64, group)
    assert stored[1, 5 // group, 3, 5 % group] == weight_OI[67, 5]
    dense = unpacked(stored)
    assert dense[:70, :67].equal(weight_OI)
    assert not dense[70:].any()
    assert not dense[:, 67:].any()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_of_zeros_and_large_numbers_work(precision):
    linear, native = layer(precision)
    x = torch.stack([torch.zeros(48), torch.full((48,), 1e20), torch.full((48,), 1e-20), torch.full((48,), 1e-44)])
    for found in (native(x), torch.cat([native(row[None]) for row in x])):
        assert torch.allclose(found[0], linear.bias)
        assert torch.isfinite(found).all()
        assert torch.allclose(found[2:], linear.bias.expand(2, -1), atol=1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("num_rows", [1, 3, 5, 6, 16])
def test_sums_of_the_largest_integers_are_exact(num_rows, sign):
    """Every weight and every input as large as they get: 4096 products of 127 and 127 x 128 are beyond 32 bits."""
    linear = nn.Linear(4096, 64, bias=False)
    linear.weight.data.fill_(sign)
    found = NativeLinear(linear.requires_grad_(False), "int8")(torch.ones(num_rows, 4096))
    assert torch.allclose(found, torch.full((num_rows, 64), sign * 4096), rtol=1e-6)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_stays_in_its_row(bad, precision):
    native = layer(precision)[1]
    x = rows(9, 48)
    expected = native(x)
    x[4, 7] = bad
    found = native(x)
    assert not torch.isfinite(found[4]).any()
    assert torch.equal(found[torch.arange(9) != 4], expected[torch.arange(9) != 4])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_any_number_of_axes_and_no_rows(precision):
    native = layer(precision)[1]
    x = rows(6, 48)
    assert native(x.view(2, 3, 48)).equal(native(x).view(2, 3, 40))
    assert native(x[0]).equal(native(x)[0])
    assert native(x[:, None].expand(6, 2, 48)[::2]).equal(native(x)[::2, None].expand(3, 2, 40)), "rows that are not contiguous"
    assert native(x.double()).equal(native(x))
    assert native(torch.zeros(1, 0, 48)).shape == (1, 0, 40)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_layer_of_a_model_is_replaced(precision):
    module = tiny_module("qwen2")
    num_linears = sum(type(part) is nn.Linear for part in module.modules())
    prepare_linears(module, NATIVE, precision)
    assert sum(isinstance(part, NativeLinear) for part in module.modules()) == num_linears > 10
    assert not any(type(part) is nn.Linear for part in module.modules())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_broken_layer_does_not_pass(precision, monkeypatch):
    """The first output of every row is lost."""
    forward = NativeLinear.forward
    monkeypatch.setattr(NativeLinear, "forward", lambda self, x: forward(self, x).index_fill(-1, torch.tensor([0]), 0.0))
    with pytest.raises(ValueError, match=f"in {precision} a layer of 32 inputs differs"):
        prepare_linears(tiny_module("llama"), NATIVE, precision)
    assert set(linear_backends._TOLERANCES) == set(PRECISIONS)


def test_layers_of_one_input_differ_in_format():
    """A float32 layer is narrowed if bfloat16 holds its weights exactly: queries may be, and keys beside them not."""
    module = tiny_module("llama", hidden_size=33, num_attention_heads=3, num_key_value_heads=1)
    attention = module.model.layers[0].self_attn
    attention.q_proj.weight.data = attention.q_proj.weight.bfloat16().float()
    model = adopt(module, torch.device("cpu"), NATIVE)
    assert [layer.self_attn.q_proj.structure.format for layer in model.module.model.layers] == [1, 0, 0]
