"""Segments of the three kinds: a chain of certain tokens, a chain with a tree on its last token, a level of a growing tree.

Node v of a tree is stored in the sequence's slot number root_position + v, and its text position is root_position + depth(v).
"""

from array import array
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from engine.attention.packing import Segment
from engine.core.tree import TokenTree

_ROOT_ALONE = TokenTree.single(0)  # the root is the chain's last token
_SEES_ITSELF = np.ones((1, 1), dtype=np.bool_)


class GrowingNodes(Protocol):
    """A growing tree: token and depth of each node, and the nodes that have keys."""

    token_ids: list[int]
    depths: list[int]
    fed: set[int]

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root to `node`, both included."""
        ...


def chain_segment(token_ids: Sequence[int], context_len: int, slots: Sequence[int]) -> Segment:
    """Return the segment that feeds `token_ids` after `context_len` cached tokens; `slots` covers both."""
    return tree_segment(token_ids, _ROOT_ALONE, context_len, slots)


def tree_segment(
    certain_ids: Sequence[int], tree: TokenTree, context_len: int, slots: Sequence[int], adapter: str | None = None
) -> Segment:
    """Return the segment of certain tokens whose last is the root of `tree`. `slots` covers context, chain and nodes.

    tail mask        chain  nodes
        chain      [ tril     0   ]
        nodes      [ ones  ancestors ]      (the root is the chain's last and the tree's first: one row)
    """
    assert certain_ids
    num_nodes = len(tree.parents)
    if len(certain_ids) == num_nodes == 1:
        end, position = context_len + 1, (context_len,)
        key_slots = slots if len(slots) == end else slots[:end]
        return Segment(certain_ids, position, (slots[context_len],), key_slots, _SEES_ITSELF, position, adapter=adapter)
    num_chain, num_tail = len(certain_ids), len(certain_ids) + num_nodes - 1
    visible_WW = tree.ancestors_NN
    if num_chain > 1:
        visible_WW = np.tri(num_tail, dtype=np.bool_)
        visible_WW[num_chain - 1 :, num_chain - 1 :] = tree.ancestors_NN
    root = context_len + num_chain - 1
    positions = [*range(context_len, root), *[root + depth for depth in tree.depths]]
    end = context_len + num_tail
    return Segment(
        token_ids=[*certain_ids, *tree.token_ids[1:]],
        positions=positions,
        write_slots=slots[context_len:end],
        key_slots=slots[:end],
        tail_visible_TW=visible_WW,
        tail_positions=positions,
        num_chain=num_chain,
        adapter=adapter,
    )


def level_segment(nodes: Sequence[int], tree: GrowingNodes, root_position: int, slots: Sequence[int]) -> Segment:
    """Return the segment that feeds nodes of a growing tree: each sees the context, its ancestors and itself.

    Only slots with keys are gathered, those of nodes that have been fed.
    """
    tail = sorted(tree.fed.union(nodes))
    key_slots = array("q", slots[:root_position])
    key_slots.extend(slots[root_position + node] for node in tail)
    place = {node: index for index, node in enumerate(tail)}
    visible_TW = np.zeros((len(nodes), len(tail)), dtype=np.bool_)
    for query, node in enumerate(nodes):
        visible_TW[query, [place[ancestor] for ancestor in tree.path(node)]] = True
    return Segment(
        token_ids=[tree.token_ids[node] for node in nodes],
        positions=[root_position + tree.depths[node] for node in nodes],
        write_slots=[slots[root_position + node] for node in nodes],
        key_slots=key_slots,
        tail_visible_TW=visible_TW,
        tail_positions=[root_position + tree.depths[node] for node in tail],
    )
