"""Segments of the three kinds: a chain of certain tokens, a chain with a tree on its last token, a level of a growing tree.

One rule for all: node v of a tree lies at logical position root_position + v, and its text position is root_position + depth(v).
"""

from collections.abc import Sequence

import numpy as np

from engine.packing import Segment
from engine.tree import TokenTree


def chain_segment(token_ids: Sequence[int], context_len: int, slots: Sequence[int]) -> Segment:
    """Return the segment that feeds `token_ids` after `context_len` cached tokens; `slots` covers both."""
    return tree_segment(token_ids, TokenTree.single(token_ids[-1]), context_len, slots)


def tree_segment(certain_ids: Sequence[int], tree: TokenTree, context_len: int, slots: Sequence[int]) -> Segment:
    """Return the segment of certain tokens whose last is the root of `tree`. `slots` covers context, chain and nodes.

    tail mask        chain  nodes
        chain      [ tril     0   ]
        nodes      [ ones  ancestors ]      (the root is the chain's last and the tree's first: one row)
    """
    num_chain, num_tail = len(certain_ids), len(certain_ids) + tree.num_nodes - 1
    visible_WW = np.tri(num_tail, dtype=np.bool_)
    visible_WW[num_chain - 1 :, num_chain - 1 :] = tree.ancestors_NN
    root = context_len + num_chain - 1
    positions = [*range(context_len, root), *(root + depth for depth in tree.depths)]
    end = context_len + num_tail
    return Segment(
        token_ids=[*certain_ids, *tree.token_ids[1:]],
        positions=positions,
        write_slots=slots[context_len:end],
        key_slots=slots[:end],
        tail_visible_TW=visible_WW,
        tail_positions=positions,
    )
