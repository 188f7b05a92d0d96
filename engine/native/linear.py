"""Linear layers over weights packed for the library, in float32, bfloat16, int8 or compact; float32 in and out.

Shape key: I inputs, O outputs, B blocks of 64 outputs, G adjacent inputs of an output (1, 2 or 4).
"""

import ctypes
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int, Int8
from torch import Tensor, nn
from torch.nn import functional

from engine.native import library
from engine.native.compact import BLOCK, GROUP, RECORD_BYTES, compact_packed, compact_unpacked, compact_weights
from engine.utils import huge_pages

_ZERO = 128  # of unsigned weights
_LEAST = 1e-30  # scale of an output whose weights are 0
_LARGEST = 127.0
_LAYOUTS = {  # the library's number of a format, adjacent inputs of an output, and the multiple to which inputs are padded
    "float32": (0, 1, 2),
    "bfloat16": (1, 2, 2),
    "int8": (2, 4, 64),
}
QUANTISED = ("int8", "compact")  # precisions that round inputs to integers; transformers has none of them
_ROWS = 64 * BLOCK  # outputs that are unpacked together
_COMPACT = {4: 3, 6: 4, 8: 5}  # the library's number of compact weights, by bits


@dataclass(frozen=True, eq=False)
class PackedWeights:
    """A layer's weights as the library reads them. It owns the memory that `structure` points at."""

    num_inputs: int
    num_outputs: int
    number: int  # the library's number of the format
    packed: Tensor
    scale_O: Float[Tensor, " O"] | None = None
    bias_O: Float[Tensor, " O"] | None = None

    @cached_property
    def structure(self) -> library.Linear:
        """The library's structure."""
        addresses = self.packed.data_ptr(), _address(self.scale_O), _address(self.bias_O)
        return library.Linear(*addresses, self.num_inputs, self.num_outputs, self.number)

    @classmethod
    def zeros(cls, num_inputs: int, num_outputs: int) -> "PackedWeights":
        """Return float32 weights of 0, to time what reading them takes. Sizes are multiples of a block's."""
        number, group, _ = _LAYOUTS["float32"]
        shape = (num_outputs // BLOCK, num_inputs // group, BLOCK, group)
        return cls(num_inputs, num_outputs, number, huge_pages.empty(shape, torch.float32).zero_())

    def first(self, num_outputs: int) -> "PackedWeights":
        """Return the layer of the first outputs; all of them if there are fewer. Whole blocks are taken."""
        count = min(self.num_outputs, -(-num_outputs // BLOCK) * BLOCK)
        scale_O, bias_O = (None if one is None else one[:count] for one in (self.scale_O, self.bias_O))
        return replace(self, num_outputs=count, packed=self.packed[: -(-count // BLOCK)], scale_O=scale_O, bias_O=bias_O)

    def times(self, rows: Float[Tensor, "... I"]) -> Float[Tensor, "... O"]:
        """Return x W^T + b of float32 rows."""
        rows, num_rows = rows.contiguous(), rows.numel() // self.num_inputs
        y = torch.empty((*rows.shape[:-1], self.num_outputs))
        library.library().latebranch_linear(
            ctypes.byref(self.structure), rows.data_ptr(), num_rows, y.data_ptr(), library.num_threads()
        )
        return y

    def dense(self) -> Float[Tensor, "O I"]:
        """Return the weights that the layer multiplies by, float32."""
        return self._dense(self.packed, self.scale_O, self.num_outputs)

    def rows(self, outputs_M: Int[Tensor, " M"]) -> Float[Tensor, "M I"]:
        """Return the weights of some outputs, ascending, float32. It takes little memory besides the result."""
        found = []
        for begin in range(0, self.num_outputs, _ROWS):
            first, last = torch.searchsorted(outputs_M, torch.tensor([begin, begin + _ROWS])).tolist()
            if first < last:
                scale_O = None if self.scale_O is None else self.scale_O[begin : begin + _ROWS]
                part = self.packed[begin // BLOCK : (begin + _ROWS) // BLOCK]
                found.append(self._dense(part, scale_O, min(_ROWS, self.num_outputs - begin), outputs_M[first:last] - begin))
        return torch.cat(found)

    def _dense(
        self, packed: Tensor, scale_O: Tensor | None, num_outputs: int, wanted_M: Int[Tensor, " M"] | None = None
    ) -> Float[Tensor, "M I"]:
        """Return the weights of the wanted outputs of some blocks, by default of all."""
        wanted = slice(None) if wanted_M is None else wanted_M
        if self.number in _COMPACT.values():
            assert scale_O is not None
            return compact_unpacked(packed, scale_O).of_outputs(wanted).dense()[:, : self.num_inputs]
        weight_MI = unpacked(packed)[:num_outputs, : self.num_inputs][wanted].float()
        return weight_MI if scale_O is None else (weight_MI - _ZERO) * scale_O[wanted, None]


class NativeLinear(nn.Module):
    """A linear layer of the library. CPU, inference only. Float weights that bfloat16 represents exactly are stored in it."""

    def __init__(self, linear: nn.Linear, precision: str) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weights = _packed_weights(linear, precision)

    @property
    def structure(self) -> library.Linear:
        """The library's structure."""
        return self.weights.structure

    def dense_weight(self) -> Float[Tensor, "O I"]:
        """Return the weights that the layer multiplies by, float32."""
        return self.weights.dense()

    def forward(self, x: Float[Tensor, "... I"]) -> Float[Tensor, "... O"]:
        """Return x W^T + b."""
        return self.weights.times(x.to(torch.float32))


def _packed_weights(linear: nn.Linear, precision: str) -> PackedWeights:
    """Return a layer's weights in a precision, in huge pages."""
    weight_OI, sizes = linear.weight.detach().float(), (linear.in_features, linear.out_features)
    bias_O = None if linear.bias is None else linear.bias.detach().float().contiguous()
    if precision == "compact":
        compact = compact_weights(weight_OI)
        kept = huge_pages.copied(compact_packed(compact))
        return PackedWeights(*sizes, _COMPACT[compact.bits], kept, compact.scale_O, bias_O)
    scale_O = None
    if precision == "float32" and torch.equal(weight_OI.bfloat16().float(), weight_OI):
        precision = "bfloat16"  # the same numbers in half the bytes: results are bit-equal
    if precision == "int8":
        signed_OI, scale_O = quantised_weight(weight_OI)
        stored_OI = (signed_OI.to(torch.int16) + _ZERO).to(torch.uint8)
    else:
        stored_OI = weight_OI.to(getattr(torch, precision))
    number, group, multiple = _LAYOUTS[precision]
    return PackedWeights(*sizes, number, huge_pages.copied(packed(stored_OI, group, multiple)), scale_O, bias_O)


def weight_bytes(precision: str) -> float:
    """Return the most bytes that a weight takes in a precision, including the scales of its group."""
    return RECORD_BYTES[8] / (GROUP * BLOCK) if precision == "compact" else float(getattr(torch, precision).itemsize)


def packed(weight_OI: Tensor, group: int, multiple: int) -> Tensor:
    """Return weights [B, I / G, 64, G] as the library reads them, inputs padded to a multiple."""
    num_outputs, num_inputs = weight_OI.shape
    padded = functional.pad(weight_OI, (0, -num_inputs % multiple, 0, -num_outputs % BLOCK))
    return padded.view(-1, BLOCK, padded.shape[1] // group, group).transpose(1, 2).contiguous()


def unpacked(packed_BNOG: Tensor) -> Tensor:
    """Return packed weights by output and input, including padding."""
    return packed_BNOG.transpose(1, 2).reshape(packed_BNOG.shape[0] * BLOCK, -1)


def quantised_weight(weight_OI: Float[Tensor, "O I"]) -> tuple[Int8[Tensor, "O I"], Float[Tensor, " O"]]:
    """Return int8 weights and the scale of each output, float32."""
    scale_O = weight_OI.abs().amax(1).clamp_min(_LEAST) / _LARGEST
    return (weight_OI / scale_O[:, None]).round().to(torch.int8), scale_O


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
