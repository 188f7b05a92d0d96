"""Random batches as tables, with pools of keys and values: the inputs of attention over tables, on any device."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

from engine.attention.packing import Segment, pack
from engine.attention.paged.attention import Attend
from engine.attention.paged.table import PagedBatch, Shape, TableColumns, table_of
from engine.attention.scoring import Scoring
from engine.attention.segments import chain_segment, level_segment, tree_segment
from engine.attention.tree_attention import GatheredAttention
from engine.core.tree import TokenTree
from engine.kv_cache.kv_cache import KVCache
from tests.model.passes import CPU

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COLUMNS = TableColumns(tokens=(0, 0, 1 << 20), outputs=())


@dataclass(frozen=True)
class Heads:
    """How a layer attends: key-value heads, query heads for each, sizes of keys and values, window, cap, sinks."""

    num: int = 2
    num_shared: int = 2
    size: int = 64
    value_size: int = 64
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    def scoring(self, device: torch.device = DEVICE) -> Scoring:
        """Return how weights are made."""
        count = self.num * self.num_shared
        sinks_HG = torch.linspace(-1.0, 3.0, count, device=device).view(self.num, -1) if self.has_sinks else None
        return Scoring(self.size**-0.5, self.window, self.softcap, sinks_HG)


def random_tree(rng: random.Random, num_nodes: int) -> TokenTree:
    """Return a tree of any shape."""
    parents = (-1, *(rng.randrange(node) for node in range(1, num_nodes)))
    draws = tuple(tuple(v for v in range(num_nodes) if parents[v] == node) for node in range(num_nodes))
    return TokenTree(parents, tuple(range(num_nodes)), draws)


def random_segments(seed: int, contexts: Sequence[int], most_nodes: int = 7, most_certain: int = 3) -> list[Segment]:
    """Return a segment for each length of earlier context: a tree on some certain tokens, over shuffled slots."""
    rng = random.Random(seed)
    trees = [random_tree(rng, rng.randint(1, most_nodes)) for _ in contexts]
    certain = [rng.randint(1, most_certain) for _ in contexts]
    lengths = [c + n + tree.num_nodes - 1 for c, n, tree in zip(contexts, certain, trees, strict=True)]
    free = rng.sample(range(sum(lengths) + 9), sum(lengths))
    slots = [[free.pop() for _ in range(length)] for length in lengths]
    parts = zip(certain, trees, contexts, slots, strict=True)
    return [tree_segment([*range(count)], tree, context, own) for count, tree, context, own in parts]


class Growing:
    """A tree as far as it has grown, of which some nodes have keys."""

    def __init__(self, tree: TokenTree, fed: set[int]) -> None:
        self.token_ids, self.depths, self.fed, self._tree = [*tree.token_ids], [*tree.depths], fed, tree

    def path(self, node: int) -> list[int]:
        return [*self._tree.path(node)]


def level() -> Segment:
    """Return a level of a growing tree. Its tail is longer than the fed part and has gaps."""
    tree = TokenTree((-1, 0, 0, 1, 2, 2, 4), (*range(7),), ((1, 2), (3,), (4, 5), (), (6,), (), ()))
    return level_segment([3, 6], Growing(tree, {0, 1, 2, 4}), 37, [*range(60, 200)][::-1])


def chunk(length: int, context: int) -> Segment:
    """Return a prompt's chunk."""
    return chain_segment([1] * length, context, [*range(300, 300 + context + length)][::-1])


def paged(segments: Sequence[Segment], num_tokens: int | None = None, is_by_row: bool = False) -> PagedBatch:
    """Return the segments as a table, padded to a number of tokens."""
    batch = pack(segments, CPU)
    shape = Shape(num_tokens or batch.num_tokens, 0, is_by_row)
    return PagedBatch(torch.from_numpy(table_of(batch, shape, COLUMNS)).to(DEVICE), shape, COLUMNS)


@dataclass(frozen=True)
class Inputs:
    """Queries of T tokens [T, H, G, K] and pools of keys and values [S, H, K]."""

    query_THGK: Tensor
    keys_SHK: Tensor
    values_SHV: Tensor


def inputs(num_tokens: int, heads: Heads, dtype: torch.dtype = torch.float32, num_slots: int = 700) -> Inputs:
    """Return random numbers."""
    generator = torch.Generator().manual_seed(num_tokens)
    query = torch.randn(num_tokens, heads.num, heads.num_shared, heads.size, generator=generator)
    keys = torch.randn(num_slots, heads.num, heads.size, generator=generator)
    values = torch.randn(num_slots, heads.num, heads.value_size, generator=generator)
    return Inputs(*(x.to(DEVICE, dtype) for x in (query, keys, values)))


def by(attend: Attend, given: Inputs, batch: PagedBatch, heads: Heads) -> Tensor:
    """Return what an attention over tables makes of it, float32 on the processor."""
    out = attend(*(given.query_THGK, given.keys_SHK, given.values_SHV, batch), heads.scoring())
    return out.float().cpu()


def gathered(given: Inputs, segments: Sequence[Segment], heads: Heads) -> Tensor:
    """Return what attention makes of it that gathers keys, in float32 from the same numbers."""
    batch = pack(segments, CPU)
    cache = KVCache(len(given.keys_SHK) - 1, CPU)
    cache.write(0, torch.arange(len(given.keys_SHK)), given.keys_SHK.float().cpu(), given.values_SHV.float().cpu())
    query_THGK = given.query_THGK[: batch.num_tokens].float().cpu()
    out = GatheredAttention(batch, cache).attended(0, query_THGK, heads.scoring(CPU))
    return out.view(*query_THGK.shape[:3], -1)


def with_tiles(batch: PagedBatch, column: int, change: int) -> PagedBatch:
    """Return the table with a number added to one field of every tile that has queries."""
    table = batch.table.clone()
    tiles = table[batch.first_tile :][: batch.shape.num_tokens * 8].view(-1, 8)
    tiles[tiles[:, 3] > 0, column] += change
    return replace(batch, table=table)


def causal(segment: Segment) -> Segment:
    """Return the segment with the mask of a chain in place of its tree's."""
    num_queries, num_tail = segment.tail_visible_TW.shape
    return structs.replace(segment, tail_visible_TW=np.tri(num_queries, num_tail, num_tail - num_queries, dtype=np.bool_))
