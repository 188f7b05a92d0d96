"""Memory in huge pages: as requested, disjoint, kept while used, and advised to the kernel."""

import gc
import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from engine.kv_cache.kv_cache import KVCache
from engine.native.linear import NativeLinear
from engine.utils import huge_pages
from tests.needs import needs_library

has_them = Path("/sys/kernel/mm/transparent_hugepage").exists()
needs_them = pytest.mark.skipif(not has_them, reason="the kernel was built without transparent huge pages")
shapes = st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int64])


@given(st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=8))
def test_tensors_are_as_requested_and_disjoint(requested):
    tensors = [huge_pages.empty(*one) for one in requested]
    for number, (tensor, (shape, dtype)) in enumerate(zip(tensors, requested, strict=True)):
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0 or not tensor.numel()
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert (tensor == number).all()


def test_copy_is_equal_and_separate():
    one = torch.arange(3000, dtype=torch.int64).view(30, 100)
    copy = huge_pages.copied(one)
    assert torch.equal(copy, one)
    copy.zero_()
    assert one.sum() > 0


def flags_at(address: int) -> list[str]:
    """Return what the kernel notes of the map that holds an address."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and ":" not in first:
            begin, end = (int(number, 16) for number in first.split("-"))
            is_here = begin <= address < end
        elif is_here and first == "VmFlags:":
            return rest.split()
    return []


def test_inference_allocation_is_writable_outside_inference():
    with torch.inference_mode():
        huge_pages.empty((huge_pages._ARENA_BYTES - 64,), torch.uint8).zero_()
        pool = huge_pages.empty((3, 5), torch.float32)
    for tensor in (pool, huge_pages.empty((3, 5), torch.float32)):
        assert not tensor.is_inference()
        tensor.copy_(torch.ones(3, 5))


def test_kernel_without_huge_pages_gives_small_pages(monkeypatch):
    class Refusing(mmap.mmap):
        def madvise(self, option: int) -> None:  # type: ignore[override]
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    assert huge_pages.empty((100 << 20,), torch.uint8)[-1] == 0


@needs_them
@pytest.mark.parametrize("num_bytes", [1000, 100 << 20])
def test_kernel_is_advised_of_huge_pages(num_bytes):
    tensor = huge_pages.empty((num_bytes,), torch.uint8)
    assert "hg" in flags_at(tensor.data_ptr())
    assert "hg" not in flags_at(torch.empty(num_bytes, dtype=torch.uint8).data_ptr())


@needs_them
def test_allocation_is_page_aligned_and_freed():
    tensor = huge_pages.empty((100 << 20,), torch.uint8)
    address = tensor.data_ptr()
    assert address % (2 << 20) == 0
    part = tensor[5:6]
    del tensor
    gc.collect()
    assert "hg" in flags_at(part.data_ptr())
    del part
    gc.collect()
    assert "hg" not in flags_at(address)


@needs_them
def test_release_returns_a_caches_memory():
    cache = KVCache(32_768, torch.device("cpu"))
    ((keys, values),) = cache.pools(1, 3, 64, torch.float16)
    keys[:25], values[:25] = 1.0, 2.0  # blocks
    before = anonymous_kb()
    cache.release()
    assert anonymous_kb() - before < -5000
    keys[:25] = 3.0
    assert bool((keys[:25] == 3.0).all())


def anonymous_kb() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:"))


@needs_them
def test_caches_use_huge_pages():
    for keys, values in KVCache(1000, torch.device("cpu")).pools(2, 2, 64, torch.float32):
        assert all("hg" in flags_at(pool.data_ptr()) for pool in (keys, values))


@needs_them
@needs_library
def test_weights_use_huge_pages():
    assert "hg" in flags_at(NativeLinear(nn.Linear(64, 64).requires_grad_(False), "int8").structure.weight)
