"""The kernel of engine.attention.paged.completion: a program writes the nodes of one tree into their room in a table.

Shape key: NODES nodes of a tree without its root, a power of two. The fields of a room are those of table.Room.
"""

import triton
import triton.language as tl

from engine.attention.paged.table import WORD_BITS, Room

_FIELDS = tl.constexpr(len(Room._fields))
_BITS = tl.constexpr(WORD_BITS)


@triton.jit(do_not_specialize=["most_depth", "first_position", "first_low", "first_high"])
def complete_trees(
    table, tokens, parents, depths, keys, rooms, most_depth, first_position, first_low, first_high, NODES: tl.constexpr
):
    """Write tokens, positions and keys, and add the bits of ancestors to the visible ones. Node 0 is the root."""
    tree = tl.program_id(0).to(tl.int64)
    room = rooms + tree * _FIELDS
    num_nodes, root_position = tl.load(room), tl.load(room + 1)
    first_token, first_output, first_tail = tl.load(room + 2), tl.load(room + 3), tl.load(room + 4)
    first_word, num_words, root_bit = tl.load(room + 5), tl.load(room + 6), tl.load(room + 7)
    node = tl.arange(0, NODES)
    is_node = node < num_nodes
    parent_of = parents + tree * NODES - 1
    at = tree * NODES + node
    position = root_position + tl.load(depths + at, mask=is_node, other=0)
    key = tl.load(keys + at, mask=is_node, other=0)
    tl.store(table + first_token + node, tl.load(tokens + at, mask=is_node, other=0).to(tl.int32), mask=is_node)
    tl.store(table + first_position + first_token + node, position.to(tl.int32), mask=is_node)
    tl.store(table + first_tail + node, position.to(tl.int32), mask=is_node)
    tl.store(table + first_low + first_output + node, key.to(tl.int32), mask=is_node)
    tl.store(table + first_high + first_output + node, (key >> 32).to(tl.int32), mask=is_node)
    for word in range(root_bit // _BITS, num_words):
        place = table + first_word + node * num_words + word
        bits = tl.load(place, mask=is_node, other=0)
        seen = node + 1
        for _ in range(most_depth):
            bit = (root_bit + seen).to(tl.int32)
            bits |= tl.where((seen > 0) & (bit // _BITS == word), 1 << (bit % _BITS), 0)
            seen = tl.load(parent_of + seen, mask=is_node & (seen > 0), other=0).to(tl.int32)
        tl.store(place, bits, mask=is_node)
