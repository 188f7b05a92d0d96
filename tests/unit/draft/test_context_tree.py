"""The index of texts by context: its matches are those of an exhaustive search."""

from collections import Counter
from collections.abc import Sequence
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.draft.text import suffix_counts as context_tree
from engine.draft.text.suffix_counts import ContextTree, Match, merged

tokens = st.integers(0, 2)
texts = st.lists(st.tuples(st.lists(tokens, max_size=4), st.lists(tokens, max_size=30)), max_size=3)  # (context, continuations)
Texts = Sequence[tuple[list[int], list[int]]]


def counted(several: Texts, context: list[int], most: int = context_tree.MAX_CONTEXT) -> Match | None:
    """Look at every place of every text for the longest end of the context that is followed by anything."""
    for length in range(min(len(context), most), 0, -1):
        end, counts = context[len(context) - length :], Counter[int]()
        for before, text in several:
            whole = [*before, *text]
            places = range(max(len(before), length), len(whole))
            counts.update(whole[place] for place in places if whole[place - length : place] == end)
        if counts:
            return Match(length, counts)
    return None


def tree_of(several: Texts) -> ContextTree:
    tree = ContextTree()
    for before, text in several:
        tree.begin(before)
        for token_id in text:
            tree.append(token_id)
    return tree


def check(several: Texts, context: list[int]) -> None:
    assert tree_of(several).match(context) == counted(several, context, context_tree.MAX_CONTEXT)


@given(texts, st.lists(tokens, max_size=12))
def test_match_equals_exhaustive_search(several, context):
    check(several, context)


@given(st.lists(tokens, max_size=40), st.integers(1, 5))
def test_contexts_are_compared_up_to_limit(text, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_tree, "MAX_CONTEXT", most)
        for end in range(len(text) + 1):
            check([([], text)], text[:end])


@given(st.lists(tokens, min_size=1, max_size=40))
def test_growing_text_is_matched_at_every_token(text):
    tree = ContextTree()
    tree.begin()
    for end, token_id in enumerate(text):
        assert tree.match(text[:end]) == counted([([], text[:end])], text[:end])
        tree.append(token_id)


def enough(match: Match | None, least: int) -> Match | None:
    return match if match is not None and match.length >= least else None


@given(texts, st.lists(tokens, max_size=12), st.integers(0, 12), st.integers(1, 4))
def test_earlier_match_ignores_later_tokens(several, text, end, least):
    check_before(several, text, min(end, len(text)), least)


def check_before(several: Texts, text: list[int], end: int, least: int) -> None:
    assert tree_of(several).match(text, end, least) == enough(counted(several, text[:end]), least)


_matched = ContextTree.match


@pytest.mark.parametrize(
    "mutant",
    [
        lambda tree, text, end, least: _matched(tree, text, None, least),
        lambda tree, text, end, least: _matched(tree, text[end:] + text[:end], None, least),  # goes on before the first token
        lambda tree, text, end, least: _matched(tree, text, end),
    ],
)
def test_matches_before_a_token_kill(mutant, monkeypatch):
    several: Texts = [([], [1, 0, 2, 0, 1, 0])]
    check_before(several, [2, 1, 0], 1, 2)
    monkeypatch.setattr(ContextTree, "match", mutant)
    with pytest.raises(AssertionError):
        check_before(several, [2, 1, 0], 1, 2)


@given(texts, st.lists(tokens, max_size=12), st.data())
def test_merged_partial_trees_equal_one_tree(several, context, data):
    """A text is cut into two, as prompt and output are, and texts are put into two trees."""
    check_parts([([], one) for _, one in several], context, data.draw(st.integers(0, 30)))


def check_parts(several: Texts, context: list[int], cut: int) -> None:
    first, second = ([(before, text[:cut]) for before, text in several], [(text[:cut], text[cut:]) for _, text in several])
    known = [match for part in (first, second) if (match := tree_of(part).match(context)) is not None]
    assert (reduce(merged, known) if known else None) == tree_of(several).match(context)


def test_parts_kill_wrong_merges(monkeypatch):
    several: Texts = [([], [0, 1, 2, 0, 1, 0, 0, 1, 2])]
    check_parts(several, [0, 1], 5)
    for mutant in (lambda one, other: one, lambda one, other: max(one, other, key=lambda match: match.length)):
        monkeypatch.setitem(globals(), "merged", mutant)
        with pytest.raises(AssertionError):
            check_parts(several, [0, 1], 5)


def forks(tree: ContextTree) -> int:
    stack, count = [tree._root], 0
    while stack:
        below = [child for child in stack.pop().children.values() if not isinstance(child, int)]
        count += len(below)
        stack += below
    return count


@given(st.lists(tokens, max_size=60), st.integers(1, 3))
def test_memory_is_at_most_fork_per_token(text, times):
    assert forks(tree_of([([], text * times)])) <= len(text) * times


_forked, _shared = ContextTree._new_node, ContextTree._common_length


def forgets_what_came_before(tree, at, depth, counts, below):
    return _forked(tree, at, depth, {}, below)


def loses_the_other_context(tree, at, depth, counts, below):
    node = _forked(tree, at, depth, counts, below)
    node.children.clear()
    return node


def believes_one_token_more(tree, text, end, at, known, most):
    return min(most, _shared(tree, text, end, at, known, most) + 1)


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("_new_node", forgets_what_came_before),
        ("_new_node", loses_the_other_context),
        ("_common_length", believes_one_token_more),
    ],
)
def test_matches_kill(name, mutant, monkeypatch):
    text = [0, 1, 2, 0, 1, 2, 1, 1, 2, 0, 2, 1, 0, 1, 2, 0, 0, 1]
    check_ends(text)
    monkeypatch.setattr(ContextTree, name, mutant)
    with pytest.raises((AssertionError, IndexError)):
        check_ends(text)


def check_ends(text: list[int]) -> None:
    """Check what follows every part of the text, and every part after another token."""
    for end in range(len(text)):
        for begin in range(end):
            check([([], text)], text[begin:end])
            check([([], text)], [2 - text[begin], *text[begin + 1 : end]])
