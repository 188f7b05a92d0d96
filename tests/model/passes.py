"""Rows as a step feeds them: prompt chunks first, then a last chunk with a tree on it, all packed with others.

A Scene is data; `node_logits` runs it. A mutant breaks one part of the run: `segment` what one row feeds, `batch` what all do.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from engine.attention.packing import PackedBatch, Segment, pack
from engine.attention.segments import chain_segment, tree_segment
from engine.core.tree import TokenTree
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel
from tests.model.tiny import own_logits

CPU = torch.device("cpu")


@dataclass(frozen=True)
class SceneRow:
    """A text fed up to each cut, then from the last cut on with the tree on its last token."""

    text: tuple[int, ...]
    cuts: tuple[int, ...]
    tree: TokenTree
    slots: tuple[int, ...]

    def path_texts(self) -> list[list[int]]:
        """Return the text that ends in each node of the tree."""
        return [[*self.text, *(self.tree.token_ids[v] for v in self.tree.path(node)[1:])] for node in range(self.tree.num_nodes)]


def scene_row(rng: random.Random, text: Sequence[int], tree: TokenTree, free_slots: list[int]) -> SceneRow:
    """Return the row with random cuts and slots taken from the free ones."""
    cuts = sorted(rng.sample(range(1, len(text)), rng.randint(0, min(3, len(text) - 1))))
    length = len(text) + tree.num_nodes - 1
    slots = tuple(free_slots.pop() for _ in range(length))
    return SceneRow(tuple(text), tuple(cuts), tree, slots)


def same(value):
    """The mutant that changes nothing."""
    return value


def repadded(batch: PackedBatch, **changes: Any) -> PackedBatch:
    """Return the batch with other padded groups."""
    changed = structs.replace(batch)
    vars(changed)["padded"] = replace(batch.padded, **changes)  # where a cached property is kept
    return changed


def node_logits(
    model: CausalModel,
    rows: Sequence[SceneRow],
    segment: Callable[[Segment], Segment] = same,
    batch: Callable[[PackedBatch], PackedBatch] = same,
) -> list[Tensor]:
    """Return each row's logits [N, V] after every node, the rows packed together in every pass."""
    cache = KVCache(1 + max(slot for row in rows for slot in row.slots), CPU)
    progress = [0] * len(rows)
    chunk = 0
    while any(chunk < len(row.cuts) for row in rows):
        feeding = [i for i, row in enumerate(rows) if chunk < len(row.cuts)]
        chains = []
        for i in feeding:
            row, end = rows[i], rows[i].cuts[chunk]
            chains.append(chain_segment(row.text[progress[i] : end], progress[i], row.slots))
            progress[i] = end
        model.forward(batch(pack([segment(chain) for chain in chains], CPU)), cache, torch.tensor([0]))
        chunk += 1
    last = [
        segment(tree_segment(row.text[start:], row.tree, start, row.slots)) for row, start in zip(rows, progress, strict=True)
    ]
    packed = batch(pack(last, CPU))
    logits_TV = model.forward(packed, cache, torch.arange(packed.num_tokens))
    return [logits_TV[end - row.tree.num_nodes : end] for row, end in zip(rows, packed.starts[1:], strict=True)]


def error_of(logits: Sequence[Tensor], family: str, rows: Sequence[SceneRow]) -> float:
    """Return the largest difference from transformers' logits of each node's path run alone."""
    texts = [text for row in rows for text in row.path_texts()]
    expected = own_logits(family, texts)
    found = torch.cat(list(logits))
    wanted = torch.stack([expected[i, len(text) - 1] for i, text in enumerate(texts)])
    difference = float((found - wanted).abs().max())
    return difference if difference == difference else float("inf")
