"""The kernel: whether it is exact to rounding, and what a layer takes by it and by gathering keys."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.batches import batch_of
from benchmarks.gpu.figures import Figures, Times, in_turns
from engine.attention.packing import PackedBatch
from engine.attention.paged.attention import Attend, PagedContext, kernel
from engine.attention.paged.reference import attend as reference
from engine.attention.paged.table import PagedBatch, Shape, TableColumns, table_of
from engine.attention.scoring import Scoring
from engine.attention.tree_attention import GatheredAttention
from engine.kv_cache.kv_cache import KVCache
from engine.utils.host_transfer import integers_32

MOST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # |out - expected| / |expected|
_FORMATS = (torch.float32, torch.bfloat16)
_LAUNCHES = 10  # between two looks at the clock


@dataclass(frozen=True)
class Layer:
    """How a layer attends: key-value heads, query heads for each, size of a head, window, cap."""

    num_heads: int
    num_shared: int
    size: int
    window: int | None = None
    softcap: float | None = None

    @property
    def scoring(self) -> Scoring:
        """How scores are made."""
        return Scoring(self.size**-0.5, self.window, self.softcap)


LAYERS = (Layer(4, 7, 128), Layer(3, 3, 64), Layer(2, 1, 80), Layer(1, 4, 256, window=512), Layer(8, 2, 128, softcap=30.0))
TINY_LAYERS = (Layer(2, 2, 16), Layer(1, 2, 16, window=6))


def check(figures: Figures, layers: Sequence[Layer], device: torch.device, contexts: Sequence[int]) -> bool:
    """Compare the kernel with the reference in float32 on the same numbers; return whether all agree to rounding."""
    if find_spec("triton") is None:
        figures.add("kernel", left_out="triton is not installed")
        return True
    are_exact = []
    for layer in layers:
        for dtype in _FORMATS if device.type == "cuda" else _FORMATS[:1]:
            for num_rows, num_nodes in ((1, 1), (3, 9)):
                batch = batch_of(num_rows, num_nodes, contexts, device, seed=layer.size)
                error = _error(layer, dtype, batch, device)
                are_exact.append(error <= MOST_ERROR[dtype])
                facts = {"dtype": str(dtype), "rows": num_rows, "nodes": num_nodes, "error": error, "is_exact": are_exact[-1]}
                figures.add("kernel", layer=str(layer), **facts)
    return all(are_exact)


def _error(layer: Layer, dtype: torch.dtype, batch: PackedBatch, device: torch.device) -> float:
    paged, query, cache = _given(layer, dtype, batch, device)
    found, expected = (_attended(attend, layer, query, cache, paged).float() for attend in (kernel(), _in_float32))
    return float((found - expected).norm() / expected.norm())  # NaN is never exact


def _in_float32(query_THGK: Tensor, keys_SHK: Tensor, values_SHV: Tensor, batch: PagedBatch, scoring: Scoring) -> Tensor:
    return reference(query_THGK.float(), keys_SHK.float(), values_SHV.float(), batch, scoring)


def _attended(attend: Attend, layer: Layer, query: Tensor, cache: KVCache, paged: PagedBatch) -> Tensor:
    return PagedContext(paged, cache, attend).attended(0, query, layer.scoring)


def _given(layer: Layer, dtype: torch.dtype, batch: PackedBatch, device: torch.device) -> tuple[PagedBatch, Tensor, KVCache]:
    """Return a batch's table, its queries, and a cache whose slots hold random numbers."""
    num_slots = int(batch.key_slots.max()) + 1
    generator = torch.Generator(device).manual_seed(num_slots)
    cache = KVCache(num_slots, device)
    made = partial(torch.randn, generator=generator, device=device)
    slots = torch.arange(num_slots, device=device)
    cache.write(0, slots, *(made(num_slots, layer.num_heads, layer.size).to(dtype) for _ in range(2)))
    shape, columns = Shape(batch.num_tokens, 0), TableColumns((0, 0, cache.dummy_slot), ())
    query = made(batch.num_tokens, layer.num_heads, layer.num_shared, layer.size).to(dtype)
    return PagedBatch(integers_32(table_of(batch, shape, columns), device), shape, columns), query, cache


def time_layers(figures: Figures, layer: Layer, device: torch.device, sizes: Sequence[tuple[int, int, int]], turns: int) -> None:
    """Time one layer's attention, by gathering and by the kernel, for (rows, nodes, context)."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name, attend = ("kernel", kernel()) if device.type == "cuda" else ("reference", reference)
    for num_rows, num_nodes, context in sizes:
        if figures.is_late("attention"):
            return
        batch = batch_of(num_rows, num_nodes, [context], device)
        paged, query, cache = _given(layer, dtype, batch, device)
        gathered = partial(GatheredAttention(batch, cache).attended, 0, query, layer.scoring)
        paged_too = partial(_attended, attend, layer, query, cache, paged)
        contenders = {"gather": partial(_repeated, gathered), name: partial(_repeated, paged_too)}
        times = in_turns(contenders, turns, device)
        read_bytes = 2 * len(batch.key_slots) * layer.num_heads * layer.size * dtype.itemsize
        facts = {"rows": num_rows, "nodes": num_nodes, "context": context, "launches": _LAUNCHES, "read_bytes": read_bytes}
        figures.add("attention", layer=str(layer), **facts, **times)


def time_pages(
    layer: Layer, dtype: torch.dtype, device: torch.device, sizes: tuple[int, int, int], turns: int
) -> dict[str, Times]:
    """Return the times of slots in no order for (rows, nodes, context), of pages of 16 slots, of slots in order, and of no table.

    Without a table torch attends to all keys, which is a bound.
    """
    attend = kernel() if device.type == "cuda" else reference
    contenders: dict[str, Callable[[], object]] = {}
    for name, page_len in (("one token", 1), ("pages of 16", 16), ("in order", 1 << 30)):
        num_rows, num_nodes, context = sizes
        paged, query, cache = _given(layer, dtype, batch_of(num_rows, num_nodes, [context], device, page_len=page_len), device)
        contenders[name] = partial(_repeated, partial(_attended, attend, layer, query, cache, paged))
    contenders["no table"] = partial(_repeated, _dense(layer, dtype, device, sizes))
    return in_turns(contenders, turns, device)


def _dense(layer: Layer, dtype: torch.dtype, device: torch.device, sizes: tuple[int, int, int]) -> Callable[[], Tensor]:
    num_rows, num_nodes, context = sizes
    query = torch.randn(num_rows, layer.num_heads * layer.num_shared, num_nodes, layer.size, device=device).to(dtype)
    keys, values = torch.randn(2, num_rows, layer.num_heads, context + num_nodes, layer.size, device=device).to(dtype)
    return lambda: functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)


def _repeated(run: Callable[[], Tensor]) -> None:
    for _ in range(_LAUNCHES):
        run()
