"""Edits of a loaded table on the device: passes over nodes that the host has not seen.

All trees have the same number of lanes, each of which feeds one node or padding. The tail of a tree's keys are all of its nodes.
Shape key: B trees, W lanes of a tree, N nodes of a tree with its root, K words of N bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional

from engine.attention.packing import Segment
from engine.attention.paged.graphs import TablePass
from engine.attention.paged.table import IDS, POSITIONS, WORD_BITS, WRITE_SLOTS, num_words

_PREVIOUS = WRITE_SLOTS + 1  # the column of a head's pass: the slots whose states are read


def lane_segment(context_slots: Sequence[int], position: int, slots: Sequence[int], width: int, dummy_slot: int) -> Segment:
    """Return a segment of lanes that feed padding; `slots` are those of the tree's nodes, and `position` is the root's."""
    return Segment(
        token_ids=[0] * width,
        positions=[position] * width,
        write_slots=[dummy_slot] * width,
        key_slots=[*context_slots, *slots],
        tail_visible_TW=np.ones((width, len(slots)), dtype=np.bool_),
        tail_positions=[position] * len(slots),
    )


@dataclass(frozen=True)
class Lanes:
    """Tokens that lanes feed at positions and write to slots. Each reads the state of the slot before it.

    `seen_BWN` are the nodes that each lane sees. A node has its key in `node_slots_BN`, at its place in `node_positions_BN`.
    """

    ids_BW: Int[Tensor, "B W"]
    positions_BW: Int[Tensor, "B W"]
    slots_BW: Int[Tensor, "B W"]
    previous_BW: Int[Tensor, "B W"]
    seen_BWN: Bool[Tensor, "B W N"]
    node_slots_BN: Int[Tensor, "B N"]
    node_positions_BN: Int[Tensor, "B N"]


def feed_lanes(one: TablePass, lanes: Lanes, places_B3: Int[Tensor, "B 3"]) -> None:
    """Write lanes to the table of a pass. `places_B3` are those of its segments' tails (table.tail_places). Does not wait."""
    table, columns, length, count = one.table, one.columns, one.shape.num_tokens, lanes.ids_BW.numel()
    written = {IDS: lanes.ids_BW, POSITIONS: lanes.positions_BW, WRITE_SLOTS: lanes.slots_BW}
    if len(columns.tokens) > _PREVIOUS:
        written[_PREVIOUS] = lanes.previous_BW
    for index, column_BW in written.items():
        table[index * length : index * length + count] = column_BW.flatten()
    if len(columns.outputs) > 1:  # the slots of the tokens with outputs, after their places
        first = len(columns.tokens) * length + one.shape.num_outputs
        table[first : first + count] = lanes.slots_BW.flatten()
    words_BW = words_of(lanes.seen_BWN).flatten(1)
    parts = (lanes.node_slots_BN, lanes.node_positions_BN, words_BW)
    offsets = (torch.arange(part.shape[1], device=table.device) for part in parts)
    places = [places_B3[:, index, None] + offset for index, offset in enumerate(offsets)]
    table.index_copy_(0, torch.cat(places, dim=1).flatten(), torch.cat(parts, dim=1).flatten().to(table.dtype))


def words_of(seen_BWN: Bool[Tensor, "*B N"]) -> Int[Tensor, "*B K"]:
    """Return the bits of a table, of which the last of a word is negative."""
    num_nodes = seen_BWN.shape[-1]
    padded = functional.pad(seen_BWN, (0, num_words(num_nodes) * WORD_BITS - num_nodes))
    place = torch.arange(WORD_BITS, device=seen_BWN.device)
    weights = torch.where(place == WORD_BITS - 1, -1, 1) << place
    words: Tensor = (torch.unflatten(padded, -1, (-1, WORD_BITS)) * weights).sum(-1)
    return words
