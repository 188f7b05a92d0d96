"""Host memory in huge pages, for tensors that passes read from end to end: a page of 2 MiB replaces 512 small ones in the TLB.

These are Linux's transparent huge pages: `/sys/kernel/mm/transparent_hugepage/enabled` must not be `never`. Without free huge
pages Linux uses small ones. A page takes no memory before it is written.
"""

import ctypes
import math
import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

_PAGE_BYTES = 2 << 20
_ARENA_BYTES = 64 << 20  # shared by small tensors
_MADV_COLLAPSE = 25  # of Linux 6.1
_ALIGNED_BYTES = 64  # a cache line, and the widest vector


class _Arena:
    """Allocates small tensors in blocks of huge pages; a block is freed with its last tensor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # several threads may load models
        self._free = torch.empty(0, dtype=torch.uint8)

    def allocate(self, num_bytes: int) -> Tensor:
        """Return bytes of the current block; a large tensor gets its own block."""
        if num_bytes >= _ARENA_BYTES:
            return _mapped(num_bytes)
        num_taken = -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        with self._lock:
            if num_taken > len(self._free):
                self._free = _mapped(_ARENA_BYTES)
            taken, self._free = self._free[:num_bytes], self._free[num_taken:]
        return taken


def _mapped(num_bytes: int) -> Tensor:
    """Return new bytes that begin at a huge page."""
    memory = mmap.mmap(-1, num_bytes + _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel built without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the map
    return whole[-whole.data_ptr() % _PAGE_BYTES :][:num_bytes]


_arena = _Arena()


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised host tensor, in huge pages if possible."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    with torch.inference_mode(False):  # later tensors of the same block may be written outside of inference mode
        return _arena.allocate(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def growing(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised host tensor whose regions `[i]` are filled from their beginnings and may stay nearly empty.

    A region's first 2 MiB are in small pages: in a huge one its first byte would take them all. `collapse` moves them.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes + _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with torch.inference_mode(False):  # it may be written outside of inference mode
        whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the map
    first = -whole.data_ptr() % _PAGE_BYTES  # the first huge page
    if hasattr(mmap, "MADV_HUGEPAGE"):
        size = num_bytes // shape[0]
        for begin in range(0, num_bytes, size):
            start, end = (_pages_above(begin) + 1) * _PAGE_BYTES, (begin + size) // _PAGE_BYTES * _PAGE_BYTES
            if start < end:
                with suppress(OSError):
                    memory.madvise(mmap.MADV_HUGEPAGE, first + start, end - start)
    with torch.inference_mode(False):
        return whole[first:][:num_bytes].view(dtype).view(shape)


def release(tensor: Tensor) -> None:
    """Return the memory of a `growing` tensor to the system, and lose its content."""
    with suppress(OSError, AttributeError):
        num_bytes = tensor.nbytes // mmap.PAGESIZE * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(num_bytes), mmap.MADV_DONTNEED)


def collapse(tensor: Tensor, num_regions: int) -> None:
    """Move the beginnings of the regions of a `growing` tensor into huge pages. Costs some milliseconds; older kernels cannot."""
    size = tensor.nbytes // num_regions
    with suppress(OSError, AttributeError):
        madvise = ctypes.CDLL(None).madvise
        for begin in range(0, tensor.nbytes, size):
            for page in range(begin // _PAGE_BYTES, min(_pages_above(begin) + 1, tensor.nbytes // _PAGE_BYTES)):
                address = ctypes.c_void_p(tensor.data_ptr() + page * _PAGE_BYTES)
                madvise(address, ctypes.c_size_t(_PAGE_BYTES), _MADV_COLLAPSE)  # fails for pages that are unused


def _pages_above(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES)


def copied(tensor: Tensor) -> Tensor:
    """Return a contiguous copy of a host tensor."""
    return empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)
