"""The kinds of linear layers: torch's own, prepacked by oneDNN, and the library's.

`plain` layers are torch's. `packed` reorders float weights once into the blocked layout that oneDNN multiplies fastest on a CPU;
results are equal up to rounding. Weights of a format that oneDNN refuses stay plain. `native` layers run in the library
(engine.native), in float32, bfloat16, int8 or compact. A row's result then has the same bits in any batch. `fp8` layers store
weights in eight bits (engine.model.fp8); the output head keeps its format.
"""

import platform
from collections.abc import Callable
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor, nn

from engine.model.fp8 import Fp8Linear
from engine.native import library
from engine.native.linear import NativeLinear

NATIVE = "native"
FP8 = "fp8"


class PackedLinear(nn.Module):
    """A linear layer over a weight in oneDNN's blocked layout. CPU, inference only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        weight = linear.weight.detach()
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 16)

    @property
    def weight(self) -> Tensor:
        """A tensor without numbers, for models that read the weight's type or shape."""
        return torch.empty(self.out_features, self.in_features, dtype=self._packed.dtype, device="meta")

    def dense_weight(self) -> Tensor:
        """Return a copy of the weight [outputs, inputs] in torch's layout."""
        return self._packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b."""
        if x.dtype == torch.bfloat16 and x.numel() == x.shape[-1]:  # oneDNN multiplies two rows faster than one
            return torch.narrow(self._product(x.reshape(1, -1).expand(2, -1)), 0, 0, 1).view(*x.shape[:-1], -1)
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")  # type: ignore[no-any-return]


_TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-2, "int8": 0.1, "compact": 0.1}  # relative errors of an output
_SAMPLE_ROWS = 4


def _native(linear: nn.Linear, precision: str) -> NativeLinear:
    """Return the library's layer. The replaced layer becomes float32."""
    linear.float()
    return _checked(linear, NativeLinear(linear, precision), precision)


@torch.inference_mode()
def _checked(linear: nn.Linear, native: NativeLinear, precision: str) -> NativeLinear:
    """Return the native layer; raise ValueError if its outputs differ from the replaced layer's, in float32."""
    sample_NI = torch.randn(_SAMPLE_ROWS, linear.in_features, generator=torch.Generator().manual_seed(0))
    expected_NO = linear(sample_NI)
    error = float((native(sample_NI) - expected_NO).norm() / expected_NO.norm().clamp_min(torch.finfo().tiny))
    if not error < _TOLERANCES[precision]:
        raise ValueError(f"in {precision} a layer of {linear.in_features} inputs differs by {error:.0%}")
    return native


@cache
def _packs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN packs weights of this format on this processor. Its report for bfloat16 may be wrong."""
    try:
        PackedLinear(linear_of(torch.zeros(16, 16, dtype=dtype)))(torch.zeros(1, 16, dtype=dtype))
    except RuntimeError:
        return False
    return True


_KINDS: dict[str, Callable[[nn.Linear, str], nn.Module]] = {
    "plain": lambda linear, _: linear,
    "packed": lambda linear, _: PackedLinear(linear) if _packs(linear.weight.dtype) else linear,
    NATIVE: _native,
    FP8: lambda linear, _: Fp8Linear(linear),
}


def linear_of(weight: Float[Tensor, "O I"]) -> nn.Linear:
    """Return a linear layer over this weight itself, without a bias."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return linear


def weight_of(linear: nn.Module) -> Tensor:
    """Return the weight [outputs, inputs] of a linear layer, however it is computed."""
    if isinstance(linear, PackedLinear | NativeLinear | Fp8Linear):
        return linear.dense_weight()
    assert isinstance(linear, nn.Linear)
    return linear.weight


def prepare_linears(model: nn.Module, kind: str, precision: str = "float32") -> None:
    """Replace the model's linear layers in place; `precision` is for native layers. Raise ValueError for an unknown kind.

    Each layer is freed as it is replaced, so that the weights are never in memory twice.
    """
    if kind not in _KINDS:
        raise ValueError(f"unknown linear kind {kind!r}; known: {', '.join(_KINDS)}")
    modules = list(model.modules())
    places = [(parent, name) for parent in modules for name, child in parent.named_children() if type(child) is nn.Linear]
    modules.clear()
    for parent, name in places:
        if kind == FP8 and parent is model:
            continue
        setattr(parent, name, _KINDS[kind](getattr(parent, name), precision))


def fastest_linears(device: torch.device) -> str:
    """Return the kind of linear layers that is fastest on a device."""
    return NATIVE if device.type == "cpu" and library.is_available() else torch_linears(device)


def torch_linears(device: torch.device) -> str:
    """Return the kind that is fastest without the library."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return "packed" if device.type == "cpu" and has_onednn else "plain"


def fastest_precision(device: torch.device, dtype: torch.dtype) -> str:
    """Return the precision for a drafter's weights, whose rounding costs only a little acceptance.

    On a CPU that is the precision with the least memory traffic that the processor multiplies fast: int8 in the library, else
    bfloat16. Elsewhere it is `dtype`.
    """
    if device.type == "cpu" and library.is_available():
        return "int8"
    is_halved = dtype == torch.float32 and device.type == "cpu" and multiplies_bfloat16()
    return "bfloat16" if is_halved else str(dtype).removeprefix("torch.")


def multiplies_bfloat16() -> bool:
    """Return whether the processor has bfloat16 instructions. oneDNN's report includes slower conversion."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and (not is_x86 or torch.cpu._is_avx512_bf16_supported())
