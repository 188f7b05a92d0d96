"""Texts on their way into trees: a bounded part at a time, of use at once, each text once for all its requests."""

import gc
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.draft.text import text_index
from engine.draft.text.suffix_counts import ContextTree
from engine.draft.text.text_index import Indexer, TextIndex, TextWithContext, text_with_context

token_ids = st.lists(st.integers(0, 3), max_size=20).map(tuple)
texts = st.lists(st.builds(TextWithContext, st.lists(st.integers(0, 3), max_size=3).map(tuple), token_ids), max_size=4)


def tree_of(several: Sequence[TextWithContext]) -> ContextTree:
    tree = ContextTree()
    for context, ids in several:
        tree.begin(context)
        for token_id in ids:
            tree.append(token_id)
    return tree


def own_tree(index: TextIndex) -> ContextTree:
    assert isinstance(index.tree, ContextTree)
    return index.tree


@given(texts, st.integers(1, 7), token_ids)
def test_partial_indexing_builds_the_whole_tree(several, most, context):
    index = TextIndex(ContextTree())
    for text in several:
        index.add(text)
    num_left = sum(len(text.token_ids) for text in several)
    while not index.is_complete:
        num_taken = index.index_tokens(most)
        assert num_taken == min(most, num_left)
        num_left -= num_taken
    assert num_left == 0
    assert own_tree(index).match(context) == tree_of(several).match(context)


def test_partially_indexed_text_is_matched():
    index = TextIndex(ContextTree())
    index.add(TextWithContext((9,), tuple(range(8))))
    index.index_tokens(3)
    assert own_tree(index).match([9]) == tree_of([TextWithContext((9,), (0, 1, 2))]).match([9])
    assert own_tree(index).match([2]) is None
    index.index_tokens(1)
    assert own_tree(index).match([2]) is not None


def indexed(lengths: Sequence[int], num_steps: int, most: int) -> tuple[list[int], list[int]]:
    """Return how much of texts of these lengths is indexed after so many steps, and how much each step did."""
    indexer = Indexer(ContextTree)
    indexes = [
        indexer.index_of("", TextWithContext((), tuple(range(100 * place, 100 * place + length))))
        for place, length in enumerate(lengths)
    ]
    done = [indexer.advance(most) for _ in range(num_steps)]
    return [max(0, len(own_tree(index)._text) - 1) for index in indexes], done


def test_indexing_is_bounded_and_fair_per_step(monkeypatch):
    monkeypatch.setattr(text_index, "_TOKENS_PER_TURN", 5)
    assert indexed([50, 3, 50], 1, 9) == ([5, 3, 1], [9])
    assert indexed([50, 3, 50], 12, 9) == ([50, 3, 50], [9] * 11 + [4])


def test_turns_kill_first_come_first_served(monkeypatch):
    monkeypatch.setattr(text_index, "_TOKENS_PER_TURN", 1000)
    with pytest.raises(AssertionError):
        assert indexed([50, 3, 50], 1, 9)[0][1] == 3


def test_text_is_indexed_once_per_tenant():
    indexer, text = Indexer(ContextTree), TextWithContext((1,), tuple(range(50)))
    indexes = [indexer.index_of("mine", TextWithContext(*map(tuple, map(list, text)))) for _ in range(128)]
    others = [indexer.index_of("other", text), indexer.index_of("mine", TextWithContext((2,), text.token_ids))]
    assert len({id(index) for index in (*indexes, *others)}) == 3
    assert indexer.advance(1000) == 3 * 50


def test_released_text_is_not_indexed():
    indexer = Indexer(ContextTree)
    index = indexer.index_of("mine", TextWithContext((), tuple(range(50))))
    indexer.advance(10)
    del index
    gc.collect()
    assert indexer.advance(1000) == 0
    assert not indexer._shared


def test_context_is_cut_at_comparison_limit():
    assert text_with_context(range(100), (7,)) == TextWithContext(tuple(range(68, 100)), (7,))
