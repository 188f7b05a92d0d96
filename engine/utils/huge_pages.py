"""Host memory in huge pages, for tensors that passes read from end to end: a page of 2 MiB replaces 512 small pages in the TLB.

These are Linux's transparent huge pages: `/sys/kernel/mm/transparent_hugepage/enabled` must not be `never`. Without free huge
pages Linux uses small pages. A page takes no memory before it is written.
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


def release(tensor: Tensor) -> None:
    """Return the whole pages of a contiguous tensor to the system, and lose their content."""
    with suppress(OSError, AttributeError):
        begin, end = -(-tensor.data_ptr() // _PAGE_BYTES), (tensor.data_ptr() + tensor.nbytes) // _PAGE_BYTES
        if begin < end:
            num_bytes = ctypes.c_size_t((end - begin) * _PAGE_BYTES)
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin * _PAGE_BYTES), num_bytes, mmap.MADV_DONTNEED)


def copied(tensor: Tensor) -> Tensor:
    """Return a contiguous copy of a host tensor."""
    return empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)
