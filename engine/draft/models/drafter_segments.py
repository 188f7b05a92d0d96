"""Segments that a drafter with its own keys feeds in one pass: committed tokens with roots, or a level of every tree.

A node has the same slot in the target's and the drafter's cache, so that one permutation keeps an accepted path in both.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby

from engine.attention.packing import Segment
from engine.attention.segments import chain_segment, level_segment
from engine.core.step_plan import Row
from engine.draft.drafter import FrontierNode, GrowingTree


def fed_segments(rows: Sequence[Row]) -> list[Segment]:
    """Return a segment for each row: its committed tokens to be fed."""
    return [chain_segment(row.draft_ids, row.draft_len, row.slots) for row in rows]


def places_of_roots(rows: Sequence[Row], request_ids: Sequence[str]) -> list[int]:
    """Return the places of some requests' roots among the packed tokens of the rows' segments: the segments' ends."""
    ends = accumulate(len(row.draft_ids) for row in rows)
    end_of = {row.request_id: end for row, end in zip(rows, ends, strict=True)}
    return [end_of[request_id] - 1 for request_id in request_ids]


def level_segments(frontier: Sequence[FrontierNode]) -> list[Segment]:
    """Return a segment for each tree of the frontier, in order; a tree's nodes must be adjacent."""
    return [level_segment(nodes, tree, tree.row.root_position, tree.row.slots) for tree, nodes in trees_of_level(frontier)]


def trees_of_level(frontier: Sequence[FrontierNode]) -> Iterator[tuple[GrowingTree, list[int]]]:
    """Yield each tree of the frontier with its nodes, in order; a tree's nodes must be adjacent."""
    for _, level in groupby(frontier, key=lambda node: id(node.tree)):
        nodes = [*level]
        yield nodes[0].tree, [one.node for one in nodes]
