"""What a pass of a model must read and multiply, for a roofline: beside its time, how near the machine's bounds it is."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel
from engine.model.fp8 import Fp8Linear
from engine.model.linear_backends import PackedLinear


class Traffic(NamedTuple):
    """Weights of a pass's products, their bytes, and bytes of a token's keys and values in all layers."""

    num_weights: int
    weight_bytes: int
    slot_bytes: int

    def num_bytes(self, num_keys: int) -> int:
        """Return the bytes of weights, read once, and of so many cached tokens."""
        return self.weight_bytes + num_keys * self.slot_bytes

    def num_operations(self, num_tokens: int) -> int:
        """Return the operations of the products: a multiplication and an addition for each weight and token."""
        return 2 * self.num_weights * num_tokens


def traffic_of(model: CausalModel, cache: KVCache) -> Traffic:
    """Return what passes of a model over a cache read, once a pass has written to the cache. Embeddings do not count."""
    sizes = [*_sizes(model)]
    slot_bytes = cache.num_bytes // (cache.num_slots + 1)
    return Traffic(sum(count for count, _ in sizes), sum(num_bytes for _, num_bytes in sizes), slot_bytes)


def _sizes(model: CausalModel) -> Iterator[tuple[int, int]]:
    """Yield the number of weights and bytes of each linear layer."""
    if model.native is not None:
        parts = model.native.parts
        for packed in (parts.head, *(one for layer in parts.layers for one in layer.linears.values())):
            scales = 0 if packed.scale_O is None else packed.scale_O.nbytes
            yield packed.num_inputs * packed.num_outputs, packed.packed.nbytes + scales
        return
    for layer in model.module.modules():
        if isinstance(layer, PackedLinear):
            count = layer.in_features * layer.out_features
            yield count, count * model.module.dtype.itemsize
        elif isinstance(layer, nn.Linear):
            yield layer.weight.numel(), layer.weight.nbytes
        elif isinstance(layer, Fp8Linear):
            yield layer.weight_OI.numel(), layer.weight_OI.nbytes + layer.scales_O.nbytes
