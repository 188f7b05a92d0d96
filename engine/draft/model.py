"""A causal model as drafter: an independent draft model with a cache of its own, or the target's first layers over the target's.

Feeds committed tokens first, then a round of nodes of every tree at a time. Slots are the target's: node v of a tree has one slot
in both caches, so keeping a path is one permutation for both.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch

from engine.draft.drafter import FrontierNode, GrowingTree, Proposal
from engine.kv_cache import KVCache
from engine.model import CausalModel
from engine.packing import Segment, pack
from engine.plan import Feeding, Row
from engine.segments import chain_segment


class ModelDrafter:
    """Drafts with `model` over `cache`, its own or the target's, as `feeding` says."""

    def __init__(self, name: str, model: CausalModel, cache: KVCache, feeding: Feeding) -> None:
        self.name = name
        self.feeding = feeding
        self._model = model
        self._cache = cache

    def feed(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> Proposal:
        """Feed committed tokens; propose at the roots."""
        segments = [chain_segment(row.draft_ids, row.draft_len, row.slots) for row in rows]
        index_of = {row.request_id: index for index, row in enumerate(rows)}
        ends = np.cumsum([segment.num_tokens for segment in segments])
        return self._propose(segments, [int(ends[index_of[root.tree.row.request_id]]) - 1 for root in roots])

    def extend(self, frontier: Sequence[FrontierNode]) -> Proposal:
        """Feed some nodes of every tree; propose at each."""
        by_tree = groupby(frontier, key=lambda asked: id(asked.tree))
        segments = [_level_segment([asked.node for asked in level], level[0].tree) for level in (list(g) for _, g in by_tree)]
        return self._propose(segments, list(range(len(frontier))))

    def _propose(self, segments: Sequence[Segment], logit_rows: list[int]) -> Proposal:
        rows_P = torch.tensor(logit_rows, dtype=torch.int64, device=self._model.device)
        logits_PV = self._model.forward(pack(segments, self._model.device), self._cache, rows_P)
        return Proposal(tuple(range(len(logit_rows))), logits_PV)


def _level_segment(nodes: Sequence[int], tree: GrowingTree) -> Segment:
    """Return the segment that feeds nodes of a tree: each sees the context, its ancestors and itself.

    Only slots that hold keys are gathered: a node that has never been fed has none.
    """
    row, root = tree.row, tree.row.root_position
    tail = sorted(tree.fed.union(nodes))
    place = {node: index for index, node in enumerate(tail)}
    visible_TW = np.zeros((len(nodes), len(tail)), dtype=np.bool_)
    for query, node in enumerate(nodes):
        visible_TW[query, [place[ancestor] for ancestor in tree.path(node)]] = True
    return Segment(
        token_ids=[tree.token_ids[node] for node in nodes],
        positions=[root + tree.depths[node] for node in nodes],
        write_slots=[row.slots[root + node] for node in nodes],
        key_slots=[*row.slots[:root], *(row.slots[root + node] for node in tail)],
        tail_visible_TW=visible_TW,
        tail_positions=[root + tree.depths[node] for node in tail],
    )
