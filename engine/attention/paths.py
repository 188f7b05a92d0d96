"""The order in which recurrent layers take the tokens of a batch, so that each continues from its parent's state.

Shape key: B sequences or nodes that are processed together, N tokens of each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.attention.packing import PackedBatch, Segment


@dataclass(frozen=True)
class PathStep:
    """Packed tokens that a layer takes in one call, and the slots of the states from which and after which it takes them.

    `parents` is None for sequences that begin.
    """

    token_index_BN: NDArray[np.int64]
    parents: tuple[int, ...] | None
    ends: tuple[int, ...]


def path_steps(batch: PackedBatch) -> list[PathStep]:
    """Return the steps of a batch: the chains of certain tokens, one by one, then the nodes of all trees, level by level."""
    chains: list[PathStep] = []
    levels: list[list[tuple[int, int, int]]] = []  # of packed token, parent's slot and own slot
    for segment, start in zip(batch.segments, batch.starts, strict=False):
        parents = [*_parents(segment)]
        count = segment.num_chain if segment.num_chain > 1 else int(parents[0] is None)
        if count:
            first = None if parents[0] is None else (parents[0],)
            chains.append(PathStep(np.arange(start, start + count)[None], first, (segment.write_slots[count - 1],)))
        depths: dict[int, int] = {}
        for token in range(count, segment.num_tokens):
            parent, slot = parents[token], segment.write_slots[token]
            assert parent is not None, "only the first token of a sequence has no parent"
            depth = depths[slot] = depths.get(parent, -1) + 1
            if depth == len(levels):
                levels.append([])
            levels[depth].append((start + token, parent, slot))
    return [*chains, *map(_level, levels)]


def _level(nodes: Sequence[tuple[int, int, int]]) -> PathStep:
    tokens, parents, slots = zip(*nodes, strict=True)
    return PathStep(np.array(tokens, dtype=np.int64)[:, None], parents, slots)


def _parents(segment: Segment) -> Iterator[int | None]:
    """Yield the slot of the token before each token on its path: the last other key that it sees. None begins a sequence."""
    num_context = segment.num_keys - len(segment.tail_positions)
    before = int(segment.key_slots[num_context - 1]) if num_context else None
    tail = np.asarray(segment.key_slots[num_context:], dtype=np.int64)
    for slot, visible_W in zip(segment.write_slots, segment.tail_visible_TW, strict=True):
        seen = tail[visible_W & (tail != slot)]
        yield int(seen[-1]) if len(seen) else before
