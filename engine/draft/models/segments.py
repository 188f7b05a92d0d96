"""What a drafter with keys of its own feeds in one pass, as segments: committed tokens and roots, or a level of every tree.

Slots are the target's: node v of a tree has one slot in both caches, so keeping a path is one permutation for both.
"""

from collections.abc import Sequence
from itertools import accumulate, groupby

from engine.attention.packing import Segment
from engine.attention.segments import chain_segment, level_segment
from engine.core.step_plan import Row
from engine.draft.drafter import FrontierNode


def fed_segments(rows: Sequence[Row]) -> list[Segment]:
    """Return a segment for each row: the committed tokens that are to be fed."""
    return [chain_segment(row.draft_ids, row.draft_len, row.slots) for row in rows]


def places_of_roots(rows: Sequence[Row], request_ids: Sequence[str]) -> list[int]:
    """Return where the roots of some requests lie among the packed tokens of the rows' segments: at its segment's end."""
    ends = accumulate(len(row.draft_ids) for row in rows)
    end_of = {row.request_id: end for row, end in zip(rows, ends, strict=True)}
    return [end_of[request_id] - 1 for request_id in request_ids]


def level_segments(frontier: Sequence[FrontierNode]) -> list[Segment]:
    """Return a segment for each tree of the frontier, in order; a tree's nodes lie side by side."""
    levels = [list(level) for _, level in groupby(frontier, key=lambda asked: id(asked.tree))]
    trees = [level[0].tree for level in levels]
    return [
        level_segment([asked.node for asked in level], tree, tree.row.root_position, tree.row.slots)
        for level, tree in zip(levels, trees, strict=True)
    ]
