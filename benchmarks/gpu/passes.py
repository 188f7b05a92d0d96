"""What a pass of a whole model takes: T(N) for N nodes a row, as it comes by gathering, padded, and padded as a CUDA graph."""

from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.gpu.batches import batch_of
from benchmarks.gpu.figures import Figures, in_turns
from benchmarks.gpu.models import ModelShape, model_of
from engine.attention.packing import PackedBatch, pack
from engine.attention.paged.buffer import TableBuffer
from engine.attention.paged.graph_recorder import CudaGraphs, Recorder, Unrecorded
from engine.attention.paged.graphs import GraphResources
from engine.attention.paged.padding_shapes import PaddingShapes
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel
from engine.model.passes import DirectPasses, Passes, RecordedPasses

_CAPACITY = 1 << 20  # numbers of a table


def time_passes(
    figures: Figures, shape: ModelShape, device: torch.device, sizes: Sequence[tuple[int, int]], nodes: Sequence[int], turns: int
) -> None:
    """Time passes for (rows, context) and numbers of nodes; larger ones than a step's are left out."""
    model, most = model_of(shape, device), 512
    num_slots = max(rows * context for rows, context in sizes) + most
    cache = KVCache(num_slots, device)
    ways = ways_of(model, cache, most, device)
    for num_rows, context in sizes:
        for num_nodes in nodes:
            if figures.is_late("pass"):
                return
            if num_rows * num_nodes <= most:
                batch = batch_of(num_rows, num_nodes, [context], device)
                times = in_turns({name: partial(_run, way, batch) for name, way in ways.items()}, turns, device)
                facts = {"rows": num_rows, "context": context, "nodes": num_nodes}
                figures.add("pass", model=shape.name, dtype=str(shape.dtype), **facts, **times)


def ways_of(model: CausalModel, cache: KVCache, most: int, device: torch.device) -> dict[str, Passes]:
    """Return ways to run the model over the cache, whose slots hold random numbers."""
    recorders: dict[str, Recorder] = {"padded": Unrecorded()}
    if device.type == "cuda":
        recorders["graph"] = CudaGraphs(is_required=True)
    buffer = TableBuffer(_CAPACITY, device)
    ways: dict[str, Passes] = {"gather": _Gathering(model, cache)}
    ways["gather"].run(batch_of(1, 1, [0], device), [0])
    with torch.inference_mode():
        for layer in range(cache.num_layers):
            for pool in cache.layer(layer):
                pool.normal_()
    shapes = PaddingShapes(most)
    ways |= {name: RecordedPasses(model, cache, GraphResources(buffer, shapes, one)) for name, one in recorders.items()}
    return ways


class _Gathering:
    """Passes as they come, by the attention that gathers keys."""

    def __init__(self, model: CausalModel, cache: KVCache) -> None:
        self._model, self._passes = model, DirectPasses(model, cache)

    @property
    def method(self) -> str:
        """As they come."""
        return self._passes.method

    def run(self, batch: PackedBatch, rows: Sequence[int]) -> torch.Tensor:
        """Return logits of the packed tokens in `rows`."""
        attend, self._model.attend = self._model.attend, None
        try:
            return self._passes.run(batch, rows)
        finally:
            self._model.attend = attend


def _run(way: Passes, batch: PackedBatch) -> torch.Tensor:
    """Run a pass as a step does: what is made of a batch for a pass is made anew."""
    return way.run(pack(batch.segments, batch.device), range(batch.num_tokens))
