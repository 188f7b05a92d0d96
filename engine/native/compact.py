"""Weights in groups of 32 inputs, stored in the fewest bits that hold them: 4, 6 or 8. compact.h defines the layout.

A checkpoint made of a GGUF file has few distinct values in a group, at equal distances: 16 in Q4_0, Q4_1 and Q4_K, 32 in Q5_0, 64
in Q6_K. This module finds such a grid in the values themselves, so the original file is not needed. Weights on no such grid, for
example of Q5_1 and Q5_K, are rounded to 8 bits by the largest magnitude of their group, as in Q8_0. Shape key: O outputs, I
inputs, N groups, K weights of a group, G groups of an output, S scales of an output, L = 64 bytes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.nn import functional

GROUP = 32  # inputs
BLOCK = 64  # outputs
_LINE = 64  # bytes
_SHIFTS = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None, None]  # of the high bits of a half's four quads
RECORD_BYTES = {4: 20 * 64, 6: 28 * 64, 8: 36 * 64}  # of one group of a block, by bits
_LANES = 16  # outputs of a line
_ROUNDING = 2.0**-8  # of bfloat16, in which checkpoints are stored
_LEAST = 1e-30  # scale of an output whose weights are 0
_SAMPLE = 512  # outputs that are tried before all
_PIECE = 1 << 21  # weights processed together: intermediate results stay in the processor's cache
_ZERO = {4: 0, 6: 32, 8: 128}  # the code of 0 without an offset
_SCALED = {4: 32, 6: 16, 8: 32}  # inputs that share a scale
_MOST = 31  # the largest code of any grid: a grid of 64 has -32 to 31


@dataclass(frozen=True)
class CompactWeights:
    """Stored weights: a weight is `scale_O` (`step_OS` (code - zero) + `offset_OS`), with S steps and offsets for each output.

    Inputs are padded to whole groups. Only 4-bit weights have offsets; others have 0.
    """

    bits: int
    codes_OI: UInt8[Tensor, "O I"]
    step_OS: Float[Tensor, "O S"]
    offset_OS: Float[Tensor, "O S"]
    scale_O: Float[Tensor, " O"]

    def of_outputs(self, wanted: Int[Tensor, " M"] | slice) -> "CompactWeights":
        """Return the weights of some outputs."""
        parts = (self.codes_OI, self.step_OS, self.offset_OS, self.scale_O)
        return CompactWeights(self.bits, *(part[wanted] for part in parts))

    def dense(self) -> Float[Tensor, "O I"]:
        """Return the weights, float32, padding included."""
        numbers_OSK = (self.codes_OI.float() - _ZERO[self.bits]).view(*self.step_OS.shape, -1)
        of_row = self.step_OS.float()[..., None] * numbers_OSK + self.offset_OS.float()[..., None]
        return of_row.flatten(1) * self.scale_O[:, None]


def compact_weights(weight_OI: Float[Tensor, "O I"]) -> CompactWeights:
    """Return weights in the fewest bits that hold them to bfloat16's rounding, or rounded to 8 bits."""
    missing = -weight_OI.shape[1] % GROUP
    padded = functional.pad(weight_OI[None], (0, missing), mode="replicate")[0] if missing else weight_OI
    for bits, fit in ((4, _on_grid_of_16), (6, _on_grid_of_64)):
        if len(padded) > _SAMPLE and _fitted(padded[:: len(padded) // _SAMPLE], bits, fit) is None:
            continue
        found = _fitted(padded, bits, fit)
        if found is not None:
            return found
    found = _fitted(padded, 8, _rounded)
    assert found is not None
    return found


def compact_packed(compact: CompactWeights) -> UInt8[Tensor, "B G L"]:
    """Return the records of each block of 64 outputs, group by group."""
    codes_OI = functional.pad(compact.codes_OI, (0, 0, 0, -len(compact.codes_OI) % BLOCK))
    num_blocks, num_groups = len(codes_OI) // BLOCK, codes_OI.shape[1] // GROUP
    # block, group, quad, column, output, input
    lines = codes_OI.view(num_blocks, 4, _LANES, num_groups, 8, 4).permute(0, 3, 4, 1, 2, 5)
    lines = lines.reshape(num_blocks, num_groups, 8, 4, _LINE)
    parts = [lines if compact.bits == 8 else (lines[:, :, :4] & 0x0F) | ((lines[:, :, 4:] & 0x0F) << 4)]
    if compact.bits == 6:
        twos = (lines >> 4).view(num_blocks, num_groups, 2, 4, 4, _LINE)
        parts.append((twos << _SHIFTS).sum(3, dtype=torch.uint8))
    kept = (compact.step_OS, compact.offset_OS) if compact.bits == 4 else (compact.step_OS,)
    for numbers_OS in kept:
        numbers = functional.pad(numbers_OS, (0, 0, 0, -len(numbers_OS) % BLOCK)).view(num_blocks, BLOCK, num_groups, -1)
        parts.append(numbers.permute(0, 2, 3, 1).contiguous().view(torch.uint8))
    return torch.cat([part.reshape(num_blocks, num_groups, -1) for part in parts], dim=-1)


def compact_unpacked(packed_BGL: UInt8[Tensor, "B G L"], scale_O: Float[Tensor, " O"]) -> CompactWeights:
    """Return the weights of packed records; the length of `scale_O` is the number of outputs."""
    num_blocks, num_groups, size = packed_BGL.shape
    bits = next(bits for bits, num_bytes in RECORD_BYTES.items() if num_bytes == size)
    lines = packed_BGL[..., : -4 * _LINE].reshape(num_blocks, num_groups, -1, _LINE)
    low = lines[:, :, : 4 * 8 if bits == 8 else 4 * 4].reshape(num_blocks, num_groups, -1, 4, _LINE)
    codes = low if bits == 8 else torch.cat([low & 0x0F, low >> 4], dim=2)
    if bits == 6:
        twos = lines[:, :, 16:].reshape(num_blocks, num_groups, 2, 1, 4, _LINE)
        codes = codes | (((twos >> _SHIFTS) & 3) << 4).reshape(codes.shape)
    codes_OI = codes.view(num_blocks, num_groups, 8, 4, _LANES, 4).permute(0, 3, 4, 1, 2, 5).reshape(num_blocks * BLOCK, -1)
    kept = packed_BGL[..., -4 * _LINE :].contiguous().view(torch.float32 if bits == 8 else torch.float16)
    kept = kept.view(num_blocks, num_groups, -1, BLOCK).permute(0, 3, 1, 2)  # block, output, group, number
    step_OS = (kept[..., :1] if bits == 4 else kept).reshape(num_blocks * BLOCK, -1)
    offset_OS = kept[..., 1:].reshape(num_blocks * BLOCK, -1) if bits == 4 else torch.zeros_like(step_OS)
    count = len(scale_O)
    return CompactWeights(bits, codes_OI[:count], step_OS[:count], offset_OS[:count], scale_O)


_Fit = tuple[Float[Tensor, "N K"], Float[Tensor, " N"], Float[Tensor, " N"]]  # codes, steps and offsets


def _fitted(weight_OI: Float[Tensor, "O I"], bits: int, fit: Callable[[Float[Tensor, "N K"]], _Fit]) -> CompactWeights | None:
    """Return weights in `bits` bits, or None if these cannot hold them."""
    found = []
    for piece_OI in _pieces(weight_OI):
        compact = _piece(piece_OI, bits, fit)
        if bits < 8 and not _is_within_rounding(compact, piece_OI):
            return None
        found.append(compact)
    names = ("codes_OI", "step_OS", "offset_OS", "scale_O")
    return CompactWeights(bits, *(torch.cat([getattr(piece, name) for piece in found]) for name in names))


def _pieces(weight_OI: Float[Tensor, "O I"]) -> Iterator[Tensor]:
    yield from torch.split(weight_OI, max(1, _PIECE // weight_OI.shape[1]))


def _piece(weight_OI: Float[Tensor, "O I"], bits: int, fit: Callable[[Float[Tensor, "N K"]], _Fit]) -> CompactWeights:
    num_outputs = len(weight_OI)
    codes_NK, step_N, offset_N = fit(weight_OI.reshape(-1, _SCALED[bits]))
    step_OS, offset_OS = step_N.view(num_outputs, -1), offset_N.view(num_outputs, -1)
    if bits == 8:
        scale_O = torch.ones(num_outputs)
    else:  # normalised, so that float16 keeps its full precision
        scale_O = torch.maximum(step_OS.abs().amax(1), offset_OS.abs().amax(1) / 16).clamp_min(_LEAST)
        step_OS, offset_OS = ((numbers / scale_O[:, None]).half() for numbers in (step_OS, offset_OS))
    codes_OI = (codes_NK + _ZERO[bits]).to(torch.uint8).view(num_outputs, -1)
    return CompactWeights(bits, codes_OI, step_OS.contiguous(), offset_OS.contiguous(), scale_O)


def _is_within_rounding(compact: CompactWeights, weight_OI: Float[Tensor, "O I"]) -> bool:
    """Return whether every weight is within two bfloat16 roundings of the largest weight in its group."""
    groups = len(weight_OI), -1, _SCALED[compact.bits]
    error_OS, size_OS = (numbers.abs().view(groups).amax(-1) for numbers in (compact.dense() - weight_OI, weight_OI))
    return bool((error_OS <= 2 * _ROUNDING * size_OS).all())


def _on_grid_of_16(weight_NK: Float[Tensor, "N K"]) -> _Fit:
    """Fit codes of 0 to 15, the least of which is 0. Use the finest grid that holds all weights, else the finest of all."""
    least_N, most_N = weight_NK.aminmax(dim=1)
    span_N = (most_N - least_N).clamp_min(_LEAST)
    place_NK = (weight_NK - least_N[:, None]) / span_N[:, None]
    allowed_NK = _ROUNDING * (weight_NK.abs() + weight_NK.abs().amax(1, keepdim=True)) / span_N[:, None]
    codes_NK = _first_that_fits(place_NK, allowed_NK, range(15, 0, -1))
    mean_code_N, mean_N = codes_NK.mean(1), weight_NK.mean(1)
    centred_NK = codes_NK - mean_code_N[:, None]
    step_N = (centred_NK * weight_NK).sum(1) / centred_NK.square().sum(1).clamp_min(0.5)
    return codes_NK, step_N, mean_N - step_N * mean_code_N


def _on_grid_of_64(weight_NK: Float[Tensor, "N K"]) -> _Fit:
    """Fit codes of -32 to 31 on a grid through 0. The largest weight gets a negative code: steps may be negative, as in Q6_K."""
    sizes_NK = weight_NK.abs()
    largest_N1, at_N1 = sizes_NK.max(1, keepdim=True)
    signed_N1 = weight_NK.gather(1, at_N1)
    divisor_N1 = torch.where(largest_N1 < _LEAST, 1.0, -signed_N1)
    place_NK = weight_NK / divisor_N1
    allowed_NK = 2 * _ROUNDING * place_NK.abs() + 1e-6
    codes_NK = _first_that_fits(place_NK, allowed_NK, range(32, 0, -1)).clamp_(-_MOST - 1, _MOST)
    step_N = (codes_NK * weight_NK).sum(1) / codes_NK.square().sum(1).clamp_min(0.5)
    return codes_NK, step_N, torch.zeros_like(step_N)


def _first_that_fits(place_NK: Float[Tensor, "N K"], allowed_NK: Float[Tensor, "N K"], sizes: range) -> Float[Tensor, "N K"]:
    """Return rounded multiples of the places, by the first size that makes all integers within tolerance, else by `sizes[0]`."""
    codes_NK = (place_NK * sizes[0]).round()
    left: Tensor = _is_off(place_NK, allowed_NK, sizes[0]).nonzero()[:, 0]
    for size in sizes[1:]:
        if not len(left):
            break
        is_off_N: Bool[Tensor, " N"] = _is_off(place_NK[left], allowed_NK[left], size)
        fits = left[~is_off_N]
        codes_NK[fits] = (place_NK[fits] * size).round()
        left = left[is_off_N]
    return codes_NK


def _is_off(place_NK: Float[Tensor, "N K"], allowed_NK: Float[Tensor, "N K"], size: int) -> Bool[Tensor, " N"]:
    number_NK = place_NK * size
    is_off_NK = (number_NK - number_NK.round()).abs() > allowed_NK * size
    return (is_off_NK | (number_NK > _MOST + 0.5)).any(1)


def _rounded(weight_NK: Float[Tensor, "N K"]) -> _Fit:
    step_N = weight_NK.abs().amax(1).clamp_min(_LEAST) / 127
    return (weight_NK / step_N[:, None]).round(), step_N, torch.zeros_like(step_N)
