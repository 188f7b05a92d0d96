"""Completes a loaded table with trees that only the device knows.

The host loads a table with room for the most nodes that each tree may have: a star, whose nodes see the tokens before the tree,
the root and themselves. The device writes the tokens, positions, ancestors and keys of noise of the nodes that exist. Nodes that
do not exist are children of the root with token 0. No node sees them, and no result of theirs is read.

Shape key: B trees, N nodes of a tree without its root, W words of a node, K tail keys.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from engine.attention.packing import PackedBatch
from engine.attention.paged.graphs import TablePass
from engine.attention.paged.levels import words_of
from engine.attention.paged.table import IDS, POSITIONS, WORD_BITS, Room, num_words, tail_places
from engine.utils.host_transfer import arrays

_LOW_KEYS = -2  # the output column of the low halves of keys; the high halves follow


class GrownNodes(NamedTuple):
    """The nodes of trees without their roots, on the device: tokens, parents (0 is the root), depths and keys of their noise."""

    tokens_BN: Int[Tensor, "B N"]
    parents_BN: Int[Tensor, "B N"]
    depths_BN: Int[Tensor, "B N"]
    keys_BN: Int[Tensor, "B N"]
    most_depth: int


Rooms = Int[np.ndarray[Any, np.dtype[np.int64]], "B 8"]


def rooms_of(batch: PackedBatch, one: TablePass, rows: Sequence[int]) -> Rooms:
    """Return the rooms of a batch's trees, a Room for each; `rows` are the packed tokens with outputs."""
    places_B3 = tail_places(batch, one.shape, one.columns)
    output_of = {token: output for output, token in reversed([*enumerate(rows)])}
    rooms = []
    for segment, start, (_, first_tail, first_word) in zip(batch.segments, batch.starts, places_B3.tolist(), strict=False):
        num_chain, count = segment.num_chain, num_words(len(segment.tail_positions))
        if 0 < num_chain < segment.num_tokens:
            first = start + num_chain
            places = first, output_of[first], first_tail + num_chain, first_word + num_chain * count
            rooms.append(Room(segment.num_tokens - num_chain, segment.positions[num_chain - 1], *places, count, num_chain - 1))
    return np.array(rooms, dtype=np.int64).reshape(-1, len(Room._fields))


def complete(one: TablePass, nodes: GrownNodes, rooms: Rooms) -> None:
    """Write the nodes of the first trees into their rooms in the table of a pass. Does not wait."""
    if one.table.device.type != "cuda":
        complete_by_torch(one, nodes, rooms)
    elif len(rooms):
        complete_by_kernel(one, nodes, arrays([rooms], one.table.device)[0])


def complete_by_kernel(one: TablePass, nodes: GrownNodes, rooms: Int[Tensor, "B 8"]) -> None:
    """Write the nodes with a program for each tree."""
    from engine.attention.paged.completion_kernel import complete_trees

    num_nodes, first_low, first_high = nodes.tokens_BN.shape[1], *_key_places(one)
    complete_trees[(len(rooms),)](
        one.table, *nodes[:4], rooms, nodes.most_depth, POSITIONS * one.shape.num_tokens, first_low, first_high, NODES=num_nodes
    )


def _key_places(one: TablePass) -> tuple[int, int]:
    """Return where the low and high halves of the output tokens' keys begin."""
    num_tokens, num_outputs = len(one.columns.tokens), len(one.columns.outputs)
    first = num_tokens * one.shape.num_tokens + (num_outputs + _LOW_KEYS) * one.shape.num_outputs
    return first, first + one.shape.num_outputs


def complete_by_torch(one: TablePass, nodes: GrownNodes, rooms: Rooms) -> None:
    """Write the nodes with torch: the reference of the kernel, on any device and without a wait."""
    table, num_tokens, (first_low, first_high) = one.table, one.shape.num_tokens, _key_places(one)
    for tree, room in enumerate(map(Room._make, rooms.tolist())):
        token_N, parent_N, depth_N, key_N = (numbers_BN[tree, : room.num_nodes] for numbers_BN in nodes[:4])
        halves_N2 = key_N.contiguous().view(torch.int32).view(-1, 2)
        columns = {
            IDS * num_tokens + room.first_token: token_N,
            POSITIONS * num_tokens + room.first_token: room.root_position + depth_N,
            room.first_tail: room.root_position + depth_N,
            first_low + room.first_output: halves_N2[:, 0],
            first_high + room.first_output: halves_N2[:, 1],
        }
        for first, column_N in columns.items():
            table[first : first + room.num_nodes] = column_N
        sees = torch.eye(room.num_nodes + 1, dtype=torch.bool, device=table.device)
        for _ in range(nodes.most_depth - 1):
            sees[1:] |= sees[parent_N]
        seen_NK = sees.new_zeros(room.num_nodes, room.num_words * WORD_BITS)
        seen_NK[:, room.root_bit : room.root_bit + room.num_nodes + 1] = sees[1:]
        words_NW = table[room.first_word : room.first_word + room.num_nodes * room.num_words].view(room.num_nodes, -1)
        words_NW |= words_of(seen_NK).to(table.dtype)
