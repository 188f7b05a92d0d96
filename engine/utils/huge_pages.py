"""Memory of the host in huge pages, for what passes read from end to end: one of 2 MiB is looked up where 512 small ones were.

Linux gives them to memory that asks (transparent huge pages; `/sys/kernel/mm/transparent_hugepage/enabled` must not say `never`)
and small pages where it has none left. What is written nowhere takes no memory.
"""

import math
import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

_PAGE_BYTES = 2 << 20
_ROOM_BYTES = 64 << 20  # of which small tensors take parts
_ALIGNED_BYTES = 64  # a line of memory, and the widest vector


class _Rooms:
    """Gives away parts of a room, one after the other; a room is freed with the last tensor that lies in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # models may be loaded side by side
        self._room = torch.empty(0, dtype=torch.uint8)

    def part(self, num_bytes: int) -> Tensor:
        """Return bytes of a room, of one of its own if they fill it."""
        if num_bytes >= _ROOM_BYTES:
            return _mapped(num_bytes)
        num_taken = -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        with self._lock:
            if num_taken > len(self._room):
                self._room = _mapped(_ROOM_BYTES)
            taken, self._room = self._room[:num_bytes], self._room[num_taken:]
        return taken


def _mapped(num_bytes: int) -> Tensor:
    """Return fresh bytes that begin a huge page."""
    memory = mmap.mmap(-1, num_bytes + _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel that was built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the map
    return whole[-whole.data_ptr() % _PAGE_BYTES :][:num_bytes]


_rooms = _Rooms()


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of the host's, in huge pages if it can be; what it holds is not told."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    with torch.inference_mode(False):  # a room is for whoever comes next too, who may write to it outside of inference
        return _rooms.part(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def copied(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor of the host's, laid out anew."""
    return empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)
