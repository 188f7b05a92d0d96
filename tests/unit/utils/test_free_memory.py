"""What `return_free_memory` unmaps: pages that are the file's own, and that no thread can write."""

import ctypes
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.utils.free_memory import _unchanged_files, return_free_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
NUM_BYTES = 1 << 20


def address_of(maps: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(maps))


def resident_kb(address: int) -> int:
    """Return the kB of the map at an address that are in memory."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            begin, end = (int(number, 16) for number in first.split("-"))
            is_here = begin <= address < end
        elif is_here and first == "Rss:":
            return int(rest.split()[0])
    raise AssertionError("no map has this address")


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[mmap.mmap]:
    """A private map of a file, all of it in memory."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * (NUM_BYTES // 256))
    with path.open("rb") as file:
        maps = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    assert sum(maps[:]) > 0
    yield maps
    protect(maps, mmap.PROT_READ | mmap.PROT_WRITE)


def protect(maps: mmap.mmap, protection: int) -> None:
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address_of(maps)), ctypes.c_size_t(len(maps)), protection) == 0


def test_read_pages_of_files_are_unmapped(mapped):
    """The bug: the template kept 80 MB of libraries mapped that only its imports had read."""
    address = address_of(mapped)
    protect(mapped, mmap.PROT_READ)
    assert resident_kb(address) == NUM_BYTES >> 10
    return_free_memory()
    assert resident_kb(address) == 0
    assert mapped[1:4] == bytes([1, 2, 3])


def test_changed_pages_stay(mapped):
    """As the relocations of a library, which is written first and protected then."""
    mapped[5000:5003] = b"new"
    protect(mapped, mmap.PROT_READ)
    return_free_memory()
    assert mapped[5000:5003] == b"new"
    assert resident_kb(address_of(mapped)) > 0


def test_pages_stay_while_writable(mapped):
    """Another thread may be changing them."""
    return_free_memory()
    assert resident_kb(address_of(mapped)) == NUM_BYTES >> 10


@pytest.mark.parametrize(
    ("permissions", "name", "anonymous_kb", "is_found"),
    [
        ("r-xp", "/lib/one.so", 0, True),
        ("r--s", "/tmp/with spaces (deleted)", 0, True),
        ("r--p", "/lib/one.so", 4, False),
        ("rw-p", "/lib/one.so", 0, False),
        ("r-xp", "", 0, False),
        ("r-xp", "[vdso]", 0, False),
        ("---p", "/lib/one.so", 0, False),
    ],
)
def test_unchanged_files_by_permissions(permissions, name, anonymous_kb, is_found):
    line = f"7f00a000-7f00c000 {permissions} 00000000 fe:00 12 {name}"
    other = "7f00c000-7f00d000 rw-p 00000000 00:00 0 \nSize: 4 kB\nAnonymous: 0 kB"
    maps = f"{line}\nSize:                  8 kB\nAnonymous:             {anonymous_kb} kB\nVmFlags: rd mr\n{other}"
    assert [*_unchanged_files(maps)] == [(0x7F00A000, 0x7F00C000)] * is_found
