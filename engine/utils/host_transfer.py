"""Transfers of a few numbers between host and device. A transfer costs the same at any small size, so they are combined."""

from array import array
from collections.abc import Sequence
from itertools import accumulate, islice
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    Integers: TypeAlias = "array[int]"
else:
    Integers = array  # cannot be subscripted at run time


def as_longs(numbers: Sequence[int]) -> "array[int]":
    """Return a contiguous int64 array in host memory; an argument that is one already is returned itself."""
    return numbers if isinstance(numbers, array) and numbers.typecode == "q" else array("q", numbers)


def integers(values: Sequence[int], device: torch.device) -> Tensor:
    """Return int64 numbers on the device."""
    return _to_device(torch.from_numpy(np.array(values, dtype=np.int64)), device)


def floats(values: Sequence[float], device: torch.device) -> Tensor:
    """Return float64 numbers on the device."""
    return _to_device(torch.from_numpy(np.array(values, dtype=np.float64)), device)


def integers_32(values: NDArray[np.int32], device: torch.device) -> Tensor:
    """Return int32 numbers on the device."""
    return _to_device(torch.from_numpy(values), device)


def column(values: Sequence[float], like: Tensor) -> Tensor:
    """Return numbers [N, 1] of the dtype and on the device of another tensor."""
    numbers = torch.from_numpy(np.array(values, dtype=np.float64)[:, None]).to(like.dtype)
    return _to_device(numbers, like.device)


def to_host(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Return the numbers of tensors of one axis, as float64: one transfer for all of them."""
    numbers = iter(torch.cat([*tensors]).tolist())
    return [[*islice(numbers, len(tensor))] for tensor in tensors]


def rows_to_host(tensors: Sequence[Tensor]) -> list[list[list[float]]]:
    """Return the numbers of tensors [P, ...] by row and tensor, as float64: one transfer for all of them."""
    together = torch.cat([tensor.double() for tensor in tensors], dim=1).tolist()
    widths = [tensor.shape[1] for tensor in tensors]
    rows = map(iter, together)
    return [[[*islice(row, width)] for width in widths] for row in rows]


def arrays(values: Sequence[NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """Return arrays of integers on the device."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in values]
    together = _to_device(torch.from_numpy(np.concatenate([array.ravel() for array in values])), device)
    parts = together.split_with_sizes([array.size for array in values])
    return [part.view(array.shape) for part, array in zip(parts, values, strict=True)]


def arrays_of(tensors: Sequence[Tensor]) -> list[NDArray[np.float64]]:
    """Return tensors' numbers on the host, as float64: one transfer for all of them."""
    together = torch.cat([tensor.flatten().double() for tensor in tensors]).numpy(force=True)
    parts = np.split(together, [*accumulate(tensor.numel() for tensor in tensors[:-1])])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor on the device, without a call of torch if the device is the host.

    A GPU copies from pinned memory, so that the host need not wait.
    """
    if device.type == "cpu":
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
