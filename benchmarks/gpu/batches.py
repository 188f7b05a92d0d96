"""Batches as a step has them: every row a tree on its root, over slots of its own, in no order."""

from collections.abc import Sequence
from itertools import cycle, islice

import numpy as np
import torch

from engine.attention.packing import PackedBatch, pack
from engine.attention.segments import tree_segment
from engine.core.tree import TokenTree


def batch_of(
    num_rows: int, num_nodes: int, contexts: Sequence[int], device: torch.device, seed: int = 0, page_len: int = 1
) -> PackedBatch:
    """Return a batch of so many rows, each with a tree of so many nodes, after contexts of these lengths in turn.

    Slots are in no order, but `page_len` of them after each other.
    """
    rng = np.random.default_rng(seed)
    lengths = [*islice(cycle(contexts), num_rows)]
    count = sum(lengths) + num_rows * num_nodes
    page_len = min(page_len, count)
    pages = rng.permutation(-(-count // page_len))
    slots = (pages[:, None] * page_len + np.arange(page_len)).ravel()
    slots = slots[slots < count]
    segments, first = [], 0
    for length in lengths:
        end = first + length + num_nodes
        segments.append(tree_segment([1], _tree(rng, num_nodes), length, slots[first:end].tolist()))
        first = end
    return pack(segments, device)


def _tree(rng: np.random.Generator, num_nodes: int) -> TokenTree:
    """Return a tree whose nodes' parents are any of the last four before them."""
    parents = (-1, *(int(rng.integers(max(0, node - 4), node)) for node in range(1, num_nodes)))
    draws = tuple(tuple(v for v in range(num_nodes) if parents[v] == node) for node in range(num_nodes))
    return TokenTree(parents, (1, *range(2, num_nodes + 1)), draws)
