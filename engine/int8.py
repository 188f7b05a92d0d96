"""Linear layers over 8-bit integers, each row for itself: half the bytes of bfloat16, and the same bits whatever the batch.

A row is smoothed (arXiv 2211.10438: channels with outliers are divided by what their weights are multiplied with), divided by
its own largest magnitude / 127 and rounded; weights are int8 with one scale for each output. Products are summed in 32-bit
integers, whose order is free: a row's result does not depend on the rows beside it. That holds for processors with VNNI; older
ones add pairs in 16 bits, which overflow.

Smoothing factors are powers of two, found on fixed token ids in float32: the quantised model is the same on every machine, but
for a channel that lies within rounding of the border between two powers.
Shape key: N rows, I inputs, O outputs.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int8, UInt8
from torch import Tensor, nn

_ZERO_POINT = 128
_LARGEST = 127.0
_LEAST = 1e-30  # scale of a row of zeros
_LEAST_RANGE = 1e-5  # of a channel that was never other than zero
_ALPHA = 0.5  # of a channel's range is left to the weights to carry
_SAMPLE_ROWS, _LARGEST_ERROR = 8, 0.2  # of a layer's output, against float32
_CALIBRATION_TEXTS, _CALIBRATION_LENGTH = 4, 128


def can_multiply_int8(device: torch.device) -> bool:
    """Return whether the device has instructions that sum products of bytes in 32 bits."""
    return device.type == "cpu" and bool(torch.cpu._is_vnni_supported())


class SharedRows:
    """Quantises what layers side by side read (queries, keys and values; gate and up) once for all of them.

    Kept until as many have read it as there are readers: what every layer of a model read would fill gigabytes.
    """

    def __init__(self, smoothing_I: Float[Tensor, " I"], num_readers: int = 1) -> None:
        self._factors_I = 1.0 / smoothing_I
        self._num_readers = self._num_left = num_readers
        self._round_up = torch.tensor(_ZERO_POINT + 0.5)
        self._source: Tensor | None = None
        self._rows: tuple[Tensor, Tensor] | None = None

    def quantised(self, x: Float[Tensor, "... I"]) -> tuple[UInt8[Tensor, "... I"], Float[Tensor, "... 1"]]:
        """Return rows and the scale of each: x / smoothing = (rows - 128) * scale, up to rounding."""
        if self._source is not x or self._rows is None:
            self._source, self._rows, self._num_left = x, self._quantise(x), self._num_readers
        rows = self._rows
        self._num_left -= 1
        if not self._num_left:
            self._source = self._rows = None
        return rows

    def _quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        smooth = x * self._factors_I
        scale = torch.linalg.vector_norm(smooth, ord=math.inf, dim=-1, keepdim=True).clamp_min_(_LEAST).mul_(1.0 / _LARGEST)
        return smooth.div_(scale).add_(self._round_up).to(torch.uint8), scale  # cut off what is half too large: rounded


class Int8Linear(nn.Module):
    """A linear layer over integers, float32 in and out. CPU, inference only."""

    def __init__(self, linear: nn.Linear, smoothing_I: Float[Tensor, " I"], rows: SharedRows) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight_OI, self._scale_O = quantised_weight(linear.weight.detach().float() * smoothing_I)
        self._packed: Tensor = torch.ops.onednn.qlinear_prepack(weight_OI, None)  # [I, O]
        self._zeros_O = torch.zeros(self.out_features, dtype=torch.int64)
        self._bias = None if linear.bias is None else linear.bias.detach().float()
        self._smoothing_I, self._rows = smoothing_I, rows

    def dense_weight(self) -> Float[Tensor, "O I"]:
        """Return what the layer multiplies with, float32."""
        return self._packed.to_dense().t().float() * self._scale_O[:, None] / self._smoothing_I

    def forward(self, x: Float[Tensor, "... I"]) -> Float[Tensor, "... O"]:
        """Return x W^T + b, both rounded to 8 bits."""
        rows, scale = self._rows.quantised(x)
        y = torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, _ZERO_POINT, self._packed, self._scale_O, self._zeros_O, None, 1.0, 0, torch.float32, "none", [], ""
        )
        y = y.view(*x.shape[:-1], self.out_features)  # of no rows it comes without their other dimensions
        return y.mul_(scale) if self._bias is None else torch.addcmul(self._bias, y, scale)


def quantised_weight(weight_OI: Float[Tensor, "O I"]) -> tuple[Int8[Tensor, "O I"], Float[Tensor, " O"]]:
    """Return int8 weights and the scale of each output, float32."""
    scale_O = weight_OI.abs().amax(1).clamp_min(_LEAST) / _LARGEST
    return (weight_OI / scale_O[:, None]).round().to(torch.int8), scale_O


@dataclass
class _Readers:
    """Linear layers that read the same tensor, the range of its channels and its first rows."""

    range_I: Tensor
    sample_NI: Tensor
    names: list[str] = field(default_factory=list)


def quantise_linears(model: nn.Module, vocab_size: int) -> None:
    """Replace a language model's linear layers in place. It runs a few texts of fixed token ids first, to see ranges.

    Raises ValueError for a layer whose output changes too much, and for matrices other than linear layers' and embeddings'.
    """
    linears = {name: part for name, part in model.named_modules() if type(part) is nn.Linear}
    for readers in _read(model, linears, vocab_size):
        of_group = [linears[name] for name in readers.names]
        smoothing_I = _smoothing(readers.range_I, torch.stack([one.weight.detach().abs().amax(0) for one in of_group]).amax(0))
        rows = SharedRows(smoothing_I, len(of_group))
        for name, linear in zip(readers.names, of_group, strict=True):
            quantised = Int8Linear(linear, smoothing_I, rows)
            _require_like(linear, quantised, readers.sample_NI, name)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, quantised)
    _require_no_other_matrix(model)


def _require_no_other_matrix(model: nn.Module) -> None:
    """Experts and convolutions, say: sums in floating point, of which a comparison of a few rows may see nothing."""
    for name, part in model.named_modules():
        if not isinstance(part, nn.Embedding) and any(weight.dim() > 1 for weight in part.parameters(recurse=False)):
            raise ValueError(f"{name}, a {type(part).__name__}, multiplies in floating point")


@torch.inference_mode()
def _require_like(linear: nn.Linear, quantised: Int8Linear, sample_NI: Tensor, name: str) -> None:
    expected_NO = linear(sample_NI)
    error = float((quantised(sample_NI) - expected_NO).norm() / expected_NO.norm().clamp_min(_LEAST))
    if not error < _LARGEST_ERROR:
        raise ValueError(f"in 8 bits the layer {name} differs by {error:.0%}")


def _smoothing(range_I: Float[Tensor, " I"], weight_range_I: Float[Tensor, " I"]) -> Float[Tensor, " I"]:
    """Return powers of two by which channels are divided, so that the ranges of inputs and weights meet in the middle."""
    ratio_I = range_I.clamp_min(_LEAST_RANGE) ** _ALPHA / weight_range_I.clamp_min(_LEAST_RANGE) ** (1.0 - _ALPHA)
    return torch.exp2((ratio_I / ratio_I.median()).log2().round())


@torch.inference_mode()
def _read(model: nn.Module, linears: dict[str, nn.Linear], vocab_size: int) -> list[_Readers]:
    """Return who reads what in passes over token ids that are spread over the vocabulary."""
    groups: dict[tuple[str, ...], _Readers] = {}
    order = torch.arange(_CALIBRATION_TEXTS * _CALIBRATION_LENGTH)
    ids = (order * 7919 + order * order * 31 + 17) % vocab_size
    for ids_T in ids.view(_CALIBRATION_TEXTS, _CALIBRATION_LENGTH):
        with _noted(linears) as readers_of:
            model(input_ids=ids_T[None], use_cache=False)
        for _, readers in readers_of.values():
            known = groups.setdefault(tuple(readers.names), readers)
            known.range_I = torch.maximum(known.range_I, readers.range_I)
    return list(groups.values())


@contextmanager
def _noted(linears: dict[str, nn.Linear]) -> Iterator[dict[int, tuple[Tensor, _Readers]]]:
    """Note by which layers each tensor is read while this is open. Tensors are kept, so that their identities stay their own."""
    readers_of: dict[int, tuple[Tensor, _Readers]] = {}

    def note(name: str, x: Tensor) -> None:
        if id(x) not in readers_of:
            rows_NI = x.flatten(0, -2)
            readers_of[id(x)] = (x, _Readers(rows_NI.abs().amax(0), rows_NI[:_SAMPLE_ROWS].clone()))
        readers_of[id(x)][1].names.append(name)

    hooks = [
        linear.register_forward_pre_hook(lambda _, inputs, name=name: note(name, inputs[0])) for name, linear in linears.items()
    ]
    try:
        yield readers_of
    finally:
        for hook in hooks:
            hook.remove()
