"""What a request may draft from: its own text, its prediction, its tenant's outputs; how laws are mixed and trusted."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.draft import texts
from engine.draft.agreement import Agreement, TextSource
from engine.draft.context_tree import ContextTree, Match
from engine.draft.texts import CachedLaw, TextCache
from engine.plan import Row
from engine.tree import PLAIN
from engine.types import DraftSource, Request, SamplingParams, Speculation

PROMPT = (5, 6, 7)


def row_of(request_id: str, history: Sequence[int]) -> Row:
    """Return the row that a request has while its text is `history`."""
    root = len(history) - 1
    return Row(request_id, root, (history[-1],), 0, True, root, (), PLAIN, (), SamplingParams(), "nss", 0, history, len(history))


def law(cache: TextCache, history: Sequence[int], path: Sequence[int] = (), request_id: str = "r") -> CachedLaw | None:
    return cache.law_after(row_of(request_id, history), path)


def begun(cache: TextCache, prompt: Sequence[int] = PROMPT, request_id: str = "r", **fields) -> list[int]:
    """Begin a request and return its history."""
    history = list(prompt)
    cache.begin(Request(request_id, tuple(prompt), **fields), history)
    return history


def known(cache: TextCache, *args: Any, **kwargs: Any) -> CachedLaw:
    """Return the law that there must be."""
    found = law(cache, *args, **kwargs)
    assert found is not None
    return found


def said(cache: TextCache, output: Sequence[int], tenant: str, request_id: str = "earlier") -> None:
    """Run a whole request of a tenant."""
    history = begun(cache, request_id=request_id, tenant=tenant)
    history += output
    cache.end(request_id)


def test_the_law_is_the_share_of_continuations():
    assert known(TextCache(), [0, 1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 1, 2]).odds == pytest.approx({3: 2 / 3, 4: 1 / 3})


def test_the_longest_match_decides():
    assert known(TextCache(), [1, 2, 0, 1, 2, 3, 1, 2, 0, 1, 2]).odds == {3: 1.0}


def test_matches_shorter_than_asked_for_say_nothing():
    assert law(TextCache(min_tokens=3), [1, 2, 0, 9, 1, 2]) is None
    assert law(TextCache(min_tokens=2), [1, 2, 0, 9, 1, 2]) is not None


def test_the_law_follows_the_text_and_the_path():
    cache = TextCache()
    history = begun(cache)
    assert law(cache, history) is None
    history += [8, 9, 5, 6]
    assert list(known(cache, history).odds) == [7]
    assert list(known(cache, history, (7,)).odds) == [8]
    assert law(cache, history, (1,)) is None


def test_a_prediction_is_expected_at_once_and_found_again_after_it_was_left():
    cache = TextCache()
    history = begun(cache, prediction_ids=(20, 21, 22, 23, 24))
    assert list(known(cache, history).odds) == [20]
    assert known(cache, history).origins == {20: DraftSource.PREDICTION}
    history += [20, 99]
    assert law(cache, history) is None
    history += [22]
    assert list(known(cache, history).odds) == [23]
    assert cache.run("r", 8) <= 2


def test_a_prediction_that_comes_true_is_drafted_in_long_runs():
    """What was right so far is believed: the longer the match, the longer the run, up to what is asked for."""
    cache = TextCache()
    history = begun(cache, prediction_ids=tuple(range(100, 180)))
    runs = []
    for token_id in range(100, 140):
        runs.append(cache.run("r", 16))
        history.append(token_id)
    assert runs[0] <= 4
    assert runs[-1] == 16
    assert cache.run("r", 6) == 6
    history += [3, 1, 4]
    assert cache.run("r", 16) == 0


def test_outputs_are_drafted_from_for_their_tenant():
    cache = TextCache(recent_tokens=100)
    said(cache, [40, 41, 42, 43], "mine")
    history = begun(cache, tenant="mine", request_id="later")
    history += [41, 42]
    assert list(known(cache, history, request_id="later").odds) == [43]
    assert known(cache, history, request_id="later").origins == {43: DraftSource.CACHE}


@given(st.sampled_from(["", "mine", "other"]), st.sampled_from(["", "mine", "other"]))
def test_no_tenant_drafts_from_anothers_text_and_nobody_from_nobodys(earlier, later):
    check_isolation(TextCache(recent_tokens=100), earlier, later)


def check_isolation(cache: TextCache, earlier: str, later: str) -> None:
    said(cache, [40, 41, 42, 43], earlier)
    history = begun(cache, tenant=later, request_id="later")
    history += [41, 42]
    assert (law(cache, history, request_id="later") is not None) == (earlier == later != "")


def test_isolation_kills_one_store_for_all(monkeypatch):
    own = TextCache._recent_of
    monkeypatch.setattr(TextCache, "_recent_of", lambda cache, tenant: own(cache, "everybody"))
    with pytest.raises(AssertionError):
        check_isolation(TextCache(recent_tokens=100), "mine", "other")


@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(0, 50))
def test_what_is_kept_of_a_tenant_is_bounded(lengths, most):
    cache = TextCache(recent_tokens=most)
    for number, length in enumerate(lengths):
        said(cache, [100 * number + i for i in range(length)], "mine")
    kept = [tree for recent in cache._tenants.values() for tree in recent.generations]
    assert sum(num_continuations(tree) for tree in kept) <= most


def num_continuations(tree: ContextTree) -> int:
    """Return how many tokens can be drafted from a tree: each is counted once among what follows contexts of one token."""
    return sum(1 if isinstance(child, int) else sum(child.counts.values()) for child in tree._root.children.values())


def test_the_least_lately_used_tenant_is_forgotten(monkeypatch):
    monkeypatch.setattr(texts, "_MAX_TENANTS", 2)
    cache = TextCache(recent_tokens=100)
    for tenant in ("a", "b", "a", "c"):
        said(cache, [40, 41, 42], tenant)
    assert list(cache._tenants) == ["a", "c"]


def test_an_ended_request_leaves_nothing_behind():
    cache = TextCache()
    begun(cache)
    cache.end("r")
    cache.end("never begun")
    assert not cache._requests


def test_a_request_that_does_not_speculate_and_a_cache_of_predictions_follow_nothing():
    cache = TextCache()
    begun(cache, speculation=Speculation(is_enabled=False))
    assert not cache._requests
    cache = TextCache(recent_tokens=100, has_own_texts=False)
    said(cache, [40, 41, 42, 43], "mine")
    history = begun(cache, (*PROMPT, *PROMPT), tenant="mine", prediction_ids=(1, 2))
    assert list(known(cache, history).odds) == [1]
    assert law(cache, [1, 2, 3, 1, 2], request_id="unknown") is None


matches = st.builds(Match, st.integers(1, 32), st.dictionaries(st.integers(0, 9), st.integers(1, 9), min_size=1))
told = st.lists(st.tuples(st.sampled_from(TextSource), matches, st.floats(0.001, 0.99)), min_size=1, max_size=4)


@given(told)
def test_a_mixture_is_a_law_and_its_chance_lies_between_its_parts(several):
    found = texts._mixture(several)
    assert sum(found.odds.values()) == pytest.approx(1.0)
    assert set(found.odds) == {token_id for _, match, _ in several for token_id in match.counts}
    chances = [chance for _, _, chance in several]
    assert min(chances) - 1e-9 <= found.chance <= max(chances) + 1e-9


def test_chances_come_to_what_is_observed_by_source_and_kind_of_match():
    agreement = Agreement()
    long, short, split = Match(20, {1: 1}), Match(2, {1: 1}), Match(20, {1: 1, 2: 1})
    before = agreement.chance(TextSource.RECENT, long)
    assert agreement.chance(TextSource.OWN, short) < agreement.chance(TextSource.OWN, long)
    assert agreement.chance(TextSource.OWN, split) < agreement.chance(TextSource.OWN, long)
    for _ in range(3000):
        agreement.observe(TextSource.OWN, long, 1)
        agreement.observe(TextSource.OWN, short, 3)
        agreement.observe(TextSource.OWN, split, 2)
    assert agreement.chance(TextSource.OWN, long) == 0.99
    assert agreement.chance(TextSource.OWN, short) < 0.01
    assert agreement.chance(TextSource.OWN, split) == pytest.approx(0.5, abs=0.01)
    assert agreement.chance(TextSource.RECENT, long) == before


def test_agreement_is_learnt_before_the_token_is_known():
    """A text that never repeats teaches nothing; were tokens added first, each would foretell itself."""
    cache = TextCache(min_tokens=1)
    history = begun(cache)
    history += range(10, 60)
    law(cache, history)
    assert not cache._agreement._rates
