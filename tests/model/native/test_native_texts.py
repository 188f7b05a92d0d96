"""Cached text in the library equals that of engine.draft.text.matching in Python, whatever is begun, added, learned and read."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.types import Request
from engine.draft.text import text_cache
from engine.draft.text.agreement import Agreement
from engine.draft.text.matching import CachedDistribution, NativeMatcher, PythonMatcher, TextTree
from engine.draft.text.recent_texts import RecentLimits
from engine.draft.text.suffix_counts import MAX_CONTEXT
from engine.draft.text.text_cache import TextCache
from engine.native.texts import NativeTree, TextsHandle
from tests.needs import needs_library
from tests.unit.draft.test_texts import row_of

pytestmark = needs_library

tokens = st.lists(st.integers(0, 2), max_size=60)
Part = tuple[list[int], list[int]]  # a context and the tokens after it
parts = st.lists(st.tuples(tokens, tokens), max_size=3)


def tree_of(make: Callable[[], TextTree], several: Sequence[Part]) -> TextTree:
    tree = make()
    for context, token_ids in several or [([], [])]:
        tree.begin(context[-MAX_CONTEXT:])
        tree.extend(token_ids)
    return tree


def outcomes(matcher: NativeMatcher | PythonMatcher, sources: dict[str, Any], new: list[list[int]], read: list[list[int]]) -> Any:
    """Learn tokens of a request, some at a time. Return what is predicted after every part of them and of other texts."""
    made: dict[str, Any] = {name: tree_of(matcher.new_tree, several) for name, several in sources.items()}
    several = matcher.texts_of(made["prediction"], made["prompt"], made["output"])
    history: list[int] = [token_id for part in sources["output"][-1:] for token_id in part[1]]
    found: list[Any] = []
    for number, token_ids in enumerate(new):
        several.recent = (made["young"], made["old"])[: number + 1]
        first = len(history)
        history += token_ids
        found.append(several.learn(history, first, len(history)))
        found += [several.distribution([*history[-MAX_CONTEXT:], *path]) for path in read]
    few = matcher.texts_of(None, made["prompt"], made["output"])
    found += [one.distribution(path) for one in (several, few, matcher.texts_of()) for path in read]
    return [[*one.probs.items(), one.confidence, one.predicted] if isinstance(one, CachedDistribution) else one for one in found]


def check(sources: dict[str, Any], new: list[list[int]], read: list[list[int]], least: int) -> None:
    assert outcomes(NativeMatcher(least), sources, new, read) == outcomes(PythonMatcher(least), sources, new, read)


@given(
    st.fixed_dictionaries(dict.fromkeys(("prediction", "prompt", "output", "young", "old"), parts)),
    st.lists(tokens, max_size=4),
    st.lists(tokens, max_size=4),
    st.integers(1, 3),
)
def test_library_predicts_and_learns_as_python(sources, new, read, least):
    check(sources, new, read, least)


SOURCES: dict[str, Any] = {
    "prediction": [([], [0, 1, 2, 0, 1, 1])],
    "prompt": [([], [0, 1, 2, 2, 1, 0, 1, 2])],
    "output": [([1, 2], [0, 1, 0, 2, 0])],
    "young": [([2], [0, 1, 2, 0, 0])],
    "old": [([], [1, 1, 0, 2, 0])],
}
NEW, READ = [[0, 1], [2, 0, 1, 1], [0, 2, 0, 1]], [[], [0], [2, 0], [0, 1]]


def test_long_matches_reach_the_same_bounds():
    """Contexts beyond MAX_CONTEXT, and a confidence that no further agreement raises."""
    text = [*range(40), 99, *range(1, 40), 98]
    sources: dict[str, Any] = SOURCES | {"output": [(text, text * 3)], "prompt": [([], [*text, *text])]}
    new = [text * 4, [7], [*text[5:], 1, 2, 3]]
    check(sources, new, [[], text[:39], text[39:], text[:5]], 1)


def of_doubled_decay(agreement, source, match, token_id):
    _observe(agreement, source, match, token_id)
    _observe(agreement, source, match, token_id)


_observe = Agreement.observe
_texts_of: Any = NativeMatcher.texts_of
_set_tokens: Any = TextsHandle.set_tokens
_set_recent: Any = vars(TextsHandle)["recent"].fset


@pytest.mark.parametrize(
    ("where", "name", "mutant"),
    [
        (Agreement, "observe", of_doubled_decay),
        (Agreement, "observe", lambda agreement, source, match, token_id: _observe(agreement, source, match, token_id + 1)),
        (NativeMatcher, "texts_of", lambda matcher, *own: _texts_of(matcher, None, *own[1:])),
        (NativeMatcher, "texts_of", lambda matcher, *own: _texts_of(matcher, *own[:1], *own[2:])),
        (NativeMatcher, "texts_of", lambda matcher, *own: _texts_of(matcher, *own[1::-1], *own[2:])),
        (TextsHandle, "recent", property(lambda own: (), lambda own, trees: None)),
        (TextsHandle, "recent", property(lambda own: own._recent, lambda own, trees: _set_recent(own, trees[:1]))),
        (TextsHandle, "set_tokens", lambda own, tokens, num_new=0: _set_tokens(own, tokens[:-1], max(0, num_new - 1))),
        (TextsHandle, "set_tokens", lambda own, tokens, num_new=0: _set_tokens(own, tokens, max(0, num_new - 1))),
    ],
)
def test_comparison_notices_another_matcher(monkeypatch, where, name, mutant):
    check(SOURCES, NEW, READ, 2)
    monkeypatch.setattr(where, name, mutant)
    with pytest.raises(AssertionError):
        check(SOURCES, NEW, READ, 2)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 3), tokens, st.one_of(st.just([]), tokens)),
        st.tuples(st.just("commit"), st.integers(0, 3), st.lists(st.integers(0, 2), max_size=6), st.booleans()),
        st.tuples(st.just("end"), st.integers(0, 3), st.just([]), st.just([])),
        st.tuples(st.just("read"), st.integers(0, 3), st.lists(st.integers(0, 2), max_size=4), st.booleans()),
    ),
    max_size=40,
)


def run(matcher: type[NativeMatcher] | type[PythonMatcher], several: Any) -> list[Any]:
    """Run requests of two tenants, whose outputs are evicted; return what their cache predicts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_cache, "matcher_of", matcher)
        patch.setattr(text_cache, "MAX_INDEXED_PER_STEP", 20)
        cache = TextCache(recent=RecentLimits(40, 60))
    histories: dict[str, list[int]] = {}
    found: list[Any] = []
    for kind, number, token_ids, other in several:
        name = str(number)
        if kind == "begin" and name not in histories:
            histories[name] = [0, *token_ids]
            request = Request(name, (0, *token_ids), tenant="ab"[number % 2], prediction_ids=tuple(other))
            cache.begin(request, histories[name])
        elif kind == "end" and name in histories:
            cache.end(name)
            del histories[name]
        elif kind == "commit" and name in histories:
            histories[name] += token_ids
            found.append(cache.advance(histories))
            found.append(cache.chain_length(name, 4, 0.3) if other else None)
        elif kind == "read" and name in histories:
            one = cache.distribution_after(row_of(name, histories[name]), token_ids)
            found.append(None if one is None else [*one.probs.items(), one.confidence, one.predicted, one.is_sure])
    return found


@given(steps)
def test_caches_of_both_matchers_are_equal(several):
    assert run(NativeMatcher, several) == run(PythonMatcher, several)


def test_thousands_of_followers_take_linear_time():
    """The bug to prevent: a lookup compared each follower with all others, so a prompt could stop the engine for seconds."""
    tree, other = (tree_of(NativeTree, [([], [one for follower in range(2, 20_002) for one in (0, 1, follower)])]) for _ in "ab")
    several = NativeMatcher(2).texts_of(tree, other, other)
    start = time.process_time()
    found = several.distribution([0, 1])
    assert time.process_time() - start < 0.2
    assert found is not None
    assert len(found.probs) == 20_000


def test_continuation_longer_than_the_buffer_is_whole():
    matcher = NativeMatcher(1)
    tree = tree_of(matcher.new_tree, [([], [token_id for follower in range(1, 3000) for token_id in (0, follower)])])
    found = matcher.texts_of(prompt=tree).distribution([0])
    assert found is not None
    assert list(found.probs) == [*range(1, 3000)]
