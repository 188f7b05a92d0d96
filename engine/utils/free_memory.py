"""Memory that a process no longer needs."""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_MAPS = Path("/proc/self/smaps")


def return_free_memory() -> None:
    """Return freed memory to the system, and unmap pages of libraries that loading has read. Outside of Linux: nothing.

    A page that is used again is mapped again from its file, which the system keeps in memory while there is room.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.malloc_trim(0)
        for begin, end in _unchanged_files(_MAPS.read_text()):
            library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def _unchanged_files(maps: str) -> Iterator[tuple[int, int]]:
    """Yield the addresses of mapped files that the process cannot write, and that have no changed page: relocations are kept."""
    begin = end = 0
    for line in maps.splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            has_file = rest.startswith("r") and rest[1] == "-" and "/" in rest
            begin, end = (int(number, 16) for number in first.split("-")) if has_file else (0, 0)
        elif first == "Anonymous:" and rest.split()[0] == "0" and end:
            yield begin, end
