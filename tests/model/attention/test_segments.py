"""Segments of a chain and of a tree on its last token: visibility, positions, and the slots that are written."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from engine.attention.packing import Segment
from engine.attention.segments import chain_segment, tree_segment
from engine.core.tree import TokenTree
from tests.strategies import token_trees


def check(segment: Segment, certain_ids: list[int], tree: TokenTree, context_len: int, slots: list[int]) -> None:
    """Compare with the definition: a token sees the sequence before it, and a node also sees its path.

    Nothing else is visible.
    """
    num_chain = len(certain_ids)
    texts = [list(range(index + 1)) for index in range(num_chain)]
    texts += [[*range(num_chain), *(num_chain - 1 + v for v in tree.path(node)[1:])] for node in range(1, tree.num_nodes)]
    assert segment.num_tokens == len(texts)
    assert segment.num_keys == context_len + len(texts)
    assert [sorted(np.flatnonzero(row)) for row in segment.tail_visible_TW] == texts
    assert list(segment.positions) == [context_len + len(text) - 1 for text in texts]
    assert segment.key_positions().tolist() == [*range(context_len), *segment.positions]
    assert list(segment.token_ids) == [*certain_ids, *tree.token_ids[1:]]
    assert list(segment.key_slots) == slots[: segment.num_keys]
    assert list(segment.write_slots) == slots[context_len : segment.num_keys]


certain = st.lists(st.integers(0, 60), min_size=1, max_size=8)


@given(certain, token_trees(), st.integers(0, 9))
def test_tree_segment(certain_ids, tree, context_len):
    slots = list(range(100, 100 + context_len + len(certain_ids) + tree.num_nodes + 2))
    check(tree_segment(certain_ids, tree, context_len, slots), certain_ids, tree, context_len, slots)


@given(certain, st.integers(0, 9))
def test_chain_is_a_root_at_its_end(certain_ids, context_len):
    slots = list(range(50))
    tree = TokenTree.single(certain_ids[-1])
    check(chain_segment(certain_ids, context_len, slots), certain_ids, tree, context_len, slots)


def causal(segment):
    return structs.replace(segment, tail_visible_TW=np.tri(segment.num_tokens, dtype=np.bool_))


def without_the_chain(segment):
    visible = segment.tail_visible_TW.copy()
    visible[3:, :2] = False
    return structs.replace(segment, tail_visible_TW=visible)


def by_index(segment):
    return structs.replace(segment, positions=range(segment.positions[0], segment.positions[0] + segment.num_tokens))


def keys_by_index(segment):
    return structs.replace(segment, tail_positions=range(segment.positions[0], segment.positions[0] + segment.num_tokens))


def written_over_the_context(segment):
    return structs.replace(segment, write_slots=segment.key_slots[: segment.num_tokens])


@pytest.mark.parametrize("mutant", [causal, without_the_chain, by_index, keys_by_index, written_over_the_context])
def test_tree_segment_detects_mutants(mutant):
    tree = TokenTree((-1, 0, 0, 1), (7, 8, 9, 8), ((1, 2), (3,), (), ()))
    slots = list(range(20))
    segment = tree_segment([5, 6, 7], tree, 4, slots)
    check(segment, [5, 6, 7], tree, 4, slots)
    with pytest.raises(AssertionError):
        check(mutant(segment), [5, 6, 7], tree, 4, slots)
