"""The sources of a request's drafts: its own text, its prediction, its tenant's outputs; how they are mixed and trusted."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from engine.core.enums import DraftSource, Origin
from engine.core.step_plan import Row
from engine.core.tree import PLAIN
from engine.core.types import Request, SamplingParams, Speculation
from engine.draft.text import text_cache as texts
from engine.draft.text.agreement import Agreement, TextSource
from engine.draft.text.matching import CachedDistribution, NativeMatcher, PythonMatcher, PythonTexts, mixture
from engine.draft.text.recent_texts import RecentLimits, RecentTexts
from engine.draft.text.suffix_counts import Match
from engine.draft.text.text_cache import TextCache
from engine.draft.text.text_index import TextIndex
from tests.needs import needs_library
from tests.unit.draft.test_context_tree import counted

PROMPT = (5, 6, 7)


@pytest.fixture(autouse=True, scope="module", params=[pytest.param(NativeMatcher, marks=needs_library), PythonMatcher])
def matcher(request):
    """Run every test with each matcher."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "matcher_of", request.param)
        yield request.param


def test_origins_beside_model_keep_predicted_tokens():
    distribution = CachedDistribution({5: 0.5, 7: 0.5}, 0.5, frozenset({5}))
    assert distribution.origins_beside([False, False]) == {5: Origin(DraftSource.PREDICTION, False)}
    assert distribution.origins_beside([True, True]) == distribution.origins
    assert distribution.origins == {5: Origin(DraftSource.PREDICTION, True), 7: Origin(DraftSource.CACHE, True)}


def row_of(request_id: str, history: Sequence[int]) -> Row:
    """Return the row that a request has while its text is `history`."""
    root = len(history) - 1
    return Row(request_id, root, (history[-1],), 0, True, root, (), PLAIN, (), SamplingParams(), "nss", 0, history, len(history))


def distribution(
    cache: TextCache, history: Sequence[int], path: Sequence[int] = (), request_id: str = "r"
) -> CachedDistribution | None:
    """Return the distribution after a step in which the history was committed."""
    cache.advance([request_id])
    return cache.distributions_after([(row_of(request_id, history), path)])[0]


def begun(cache: TextCache, prompt: Sequence[int] = PROMPT, request_id: str = "r", **fields) -> list[int]:
    """Begin a request and return its history."""
    history = list(prompt)
    cache.begin(Request(request_id, tuple(prompt), **fields), history)
    return history


def known(cache: TextCache, *args: Any, **kwargs: Any) -> CachedDistribution:
    """Return the distribution, which must exist."""
    found = distribution(cache, *args, **kwargs)
    assert found is not None
    return found


def predicted(cache: TextCache, most_tokens: int, least_chance: float = 0.5) -> int:
    """Return how long a run the cache promises after a step."""
    cache.advance(["r"])
    return cache.chain_length("r", most_tokens, least_chance)


def run_request(cache: TextCache, output: Sequence[int], tenant: str, request_id: str = "earlier") -> None:
    """Run a whole request of a tenant."""
    history = begun(cache, request_id=request_id, tenant=tenant)
    history += output
    cache.end(request_id)


def test_the_distribution_is_the_share_of_continuations():
    assert known(TextCache(), [0, 1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 1, 2]).probs == pytest.approx({3: 2 / 3, 4: 1 / 3})


def test_the_longest_match_decides():
    assert known(TextCache(), [1, 2, 0, 1, 2, 3, 1, 2, 0, 1, 2]).probs == {3: 1.0}


def test_matches_below_minimum_are_ignored():
    assert distribution(TextCache(min_tokens=3), [1, 2, 0, 9, 1, 2]) is None
    assert distribution(TextCache(min_tokens=2), [1, 2, 0, 9, 1, 2]) is not None


def test_distribution_follows_text_and_path():
    cache = TextCache()
    history = begun(cache)
    assert distribution(cache, history) is None
    history += [8, 9, 5, 6]
    assert list(known(cache, history).probs) == [7]
    assert list(known(cache, history, (7,)).probs) == [8]
    assert distribution(cache, history, (1,)) is None


def test_prediction_is_used_and_found_again():
    cache = TextCache()
    history = begun(cache, prediction_ids=(20, 21, 22, 23, 24))
    assert list(known(cache, history).probs) == [20]
    assert known(cache, history).origins == {20: Origin(DraftSource.PREDICTION, True)}
    history += [20, 99]
    assert distribution(cache, history) is None
    history += [22]
    assert list(known(cache, history).probs) == [23]
    assert predicted(cache, 8) <= 2


def test_correct_prediction_is_drafted_in_long_runs():
    """The longer the match, the longer the run, up to the requested length."""
    cache = TextCache()
    history = begun(cache, prediction_ids=tuple(range(100, 180)))
    runs = []
    for token_id in range(100, 140):
        runs.append(predicted(cache, 16))
        history.append(token_id)
    assert runs[0] <= 4
    assert runs[-1] == 16
    assert predicted(cache, 6) == 6
    history += [3, 1, 4]
    assert predicted(cache, 16) == 0


def sureness(**sampling) -> tuple[bool, int]:
    """Return whether the token after two predicted ones is sure, and how long a run goes on, under these parameters."""
    cache, params = TextCache(), SamplingParams(**sampling)
    history = begun(cache, range(60, 110), prediction_ids=(20, 21, 22, *range(30, 60)), sampling=params)
    history += [20, 21]
    length = predicted(cache, 8, 0.1)
    (found,) = cache.distributions_after([(structs.replace(row_of("r", history), sampling=params, num_prompt_tokens=50), ())])
    assert found is not None
    return found.is_sure, length


def test_forbidden_or_penalised_tokens_are_not_sure():
    """The bug: text was sure before the request's own edits, so no model was queried, and a forbidden token ended the tree."""
    assert sureness() == sureness(logit_bias=((9, -100.0),)) == sureness(min_tokens=9, stop_token_ids=(9,)) == (True, 8)
    assert sureness(logit_bias=((22, -100.0),)) == sureness(repetition_penalty=1.1) == (False, 0)
    assert sureness(allowed_token_ids=tuple(range(20, 32))) == (True, 3)
    assert sureness(min_tokens=5, stop_token_ids=(30, 31)) == (True, 1)
    assert sureness(min_tokens=4, stop_token_ids=(31,)) == (True, 8)


def test_sureness_kills_a_judgement_before_the_edits(monkeypatch):
    monkeypatch.setattr(texts, "may_suppress", lambda sampling, token_ids, num_generated: False)
    with pytest.raises(AssertionError):
        test_forbidden_or_penalised_tokens_are_not_sure()


def test_run_ends_where_it_does_not_pay():
    cache = TextCache()
    begun(cache, range(50), prediction_ids=range(100, 150))
    lengths = [predicted(cache, 40, least_chance) for least_chance in (0.01, 0.3, 0.5, 0.8, 0.95, 0.99)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[2] > lengths[-1] == 0


def test_shared_texts_are_indexed_in_steps(monkeypatch):
    """128 choices of a long prompt with a prediction stopped every step until each had an index of its own of both."""
    monkeypatch.setattr(texts, "MAX_INDEXED_PER_STEP", 100)
    cache, prompt, prediction = TextCache(), tuple(range(1000)), tuple(range(1000, 1500))
    for number in range(128):
        begun(cache, prompt, str(number), prediction_ids=prediction)
    steps = [num_unindexed(cache)]
    while steps[-1]:
        cache.advance(map(str, range(128)))
        steps.append(num_unindexed(cache))
    assert steps == [*range(1500, -1, -100)]
    assert distribution(cache, prompt[:500], request_id="7") is not None


def num_unindexed(cache: TextCache) -> int:
    """Return how many tokens of prompts and predictions are not indexed."""
    return sum(len(text.token_ids) for one in indexes_of(cache) for text in one._pending) - sum(
        one._num_indexed for one in indexes_of(cache)
    )


def indexes_of(cache: TextCache) -> list[TextIndex]:
    """Return the indexes of prompts and predictions, each once."""
    found = (index for one in cache._tracked.values() for index in one.indexes if index is not None)
    return list({id(index): index for index in found}.values())


def test_sibling_choices_share_only_the_prompt():
    cache = TextCache()
    mine, others = begun(cache, request_id="0"), begun(cache, request_id="1")
    mine += [8, 9, 5, 6, 7, 8]
    assert list(known(cache, mine, request_id="0").probs) == [9]
    others += [8]
    assert distribution(cache, others, request_id="1") is None


def test_outputs_are_drafted_from_for_their_tenant():
    cache = TextCache(recent=RecentLimits(100))
    run_request(cache, [40, 41, 42, 43], "mine")
    history = begun(cache, tenant="mine", request_id="later")
    history += [41, 42]
    assert list(known(cache, history, request_id="later").probs) == [43]
    assert known(cache, history, request_id="later").origins == {43: Origin(DraftSource.CACHE, True)}


@given(st.sampled_from(["", "mine", "other"]), st.sampled_from(["", "mine", "other"]))
def test_tenants_never_draft_from_each_other(earlier, later):
    check_isolation(TextCache(recent=RecentLimits(100)), earlier, later)


def check_isolation(cache: TextCache, earlier: str, later: str) -> None:
    run_request(cache, [40, 41, 42, 43], earlier)
    history = begun(cache, tenant=later, request_id="later")
    history += [41, 42]
    assert (distribution(cache, history, request_id="later") is not None) == (earlier == later != "")


def test_isolation_kills_one_store_for_all(monkeypatch):
    own, add = RecentTexts.trees_of, RecentTexts.add
    monkeypatch.setattr(RecentTexts, "trees_of", lambda recent, tenant: own(recent, "everybody"))
    monkeypatch.setattr(RecentTexts, "add", lambda recent, tenant, prompt, output: add(recent, "everybody", prompt, output))
    with pytest.raises(AssertionError):
        check_isolation(TextCache(recent=RecentLimits(100)), "mine", "other")


def test_an_ended_request_leaves_nothing_behind():
    cache = TextCache()
    begun(cache)
    cache.end("r")
    cache.end("never begun")
    assert not cache._tracked


def test_unspeculative_requests_are_not_tracked():
    cache = TextCache()
    begun(cache, speculation=Speculation(is_enabled=False))
    assert not cache._tracked
    cache = TextCache(recent=RecentLimits(100), has_own_texts=False)
    run_request(cache, [40, 41, 42, 43], "mine")
    history = begun(cache, (*PROMPT, *PROMPT), tenant="mine", prediction_ids=(1, 2))
    assert list(known(cache, history).probs) == [1]
    assert distribution(cache, [1, 2, 3, 1, 2], request_id="unknown") is None


matches = st.builds(Match, st.integers(1, 32), st.dictionaries(st.integers(0, 9), st.integers(1, 9), min_size=1))
mixtures = st.lists(st.tuples(st.sampled_from(TextSource), matches, st.floats(0.001, 0.99)), min_size=1, max_size=4)


@given(mixtures)
def test_mixture_is_normalised_with_bounded_confidence(several):
    found = mixture(several)
    assert sum(found.probs.values()) == pytest.approx(1.0)
    assert set(found.probs) == {token_id for _, match, _ in several for token_id in match.counts}
    chances = [chance for _, _, chance in several]
    assert min(chances) - 1e-9 <= found.confidence <= max(chances) + 1e-9


def test_confidence_converges_per_source_and_match():
    agreement = Agreement()
    long, short, split = Match(20, {1: 1}), Match(2, {1: 1}), Match(20, {1: 1, 2: 1})
    before = agreement.confidence(TextSource.RECENT, long)
    assert agreement.confidence(TextSource.OWN, short) < agreement.confidence(TextSource.OWN, long)
    assert agreement.confidence(TextSource.OWN, split) < agreement.confidence(TextSource.OWN, long)
    for _ in range(3000):
        agreement.observe(TextSource.OWN, long, 1)
        agreement.observe(TextSource.OWN, short, 3)
        agreement.observe(TextSource.OWN, split, 2)
    assert agreement.confidence(TextSource.OWN, long) == 0.99
    assert agreement.confidence(TextSource.OWN, short) < 0.01
    assert agreement.confidence(TextSource.OWN, split) == pytest.approx(0.5, abs=0.01)
    assert agreement.confidence(TextSource.RECENT, long) == before


def test_agreement_is_learnt_before_token_is_added():
    """A text that never repeats teaches nothing; were tokens added first, each would predict itself."""
    cache = TextCache(min_tokens=1)
    history = begun(cache)
    history += range(10, 60)
    distribution(cache, history)
    assert not rates_of(cache)


def rates_of(cache: TextCache) -> dict[Any, Any]:
    """Return what a cache has learnt: agreed and observed by source, class of lengths and class of shares."""
    if isinstance(cache._matcher, PythonMatcher):
        return cache._matcher.agreement._rates
    assert isinstance(cache._matcher, NativeMatcher)
    pairs = zip(*[iter(cache._matcher.rates)] * 2, strict=True)
    classes = product(TextSource, range(10), range(5))
    return {one: pair for one, pair in zip(classes, pairs, strict=True) if pair[1]}


def rates_of_a_text(is_read: bool) -> dict[Any, Any]:
    """Return what a text that repeats itself has taught; with `is_read` its distribution and runs are queried in each step."""
    cache = TextCache(min_tokens=1)
    history = begun(cache)
    for token_id in (8, 9, 5, 6, 7, 8, 9, 9, 5, 6, 7, 7, 8, 9, 5):
        history.append(token_id)
        cache.advance(["r"])
        if is_read:
            cache.distributions_after([(row_of("r", history), ())])
            cache.chain_length("r", 4, 0.5)
    cache.distributions_after([(row_of("r", history), ())])  # a sequence that queried the cache is followed to its end
    cache.advance(["r"])
    return rates_of(cache)


def steps_that_follow(is_read: bool) -> list[int]:
    """Return after how many tokens each a text of 13 was followed."""
    cache = TextCache()
    history = begun(cache)
    followed = []
    for token_id in range(13):
        history.append(token_id)
        cache.advance(["r"])
        followed.append(cache._tracked["r"].num_unlearned == 0)
        if is_read:
            cache.distributions_after([(row_of("r", history), ())])
    ends = [place for place, is_followed in enumerate(followed) if is_followed]
    return [end - begin for begin, end in pairwise([-1, *ends])]


def test_unused_text_is_followed_in_groups():
    """A request that begins may draft at once. The token after a group is learned too, so that every match is observed."""
    assert steps_that_follow(is_read=True) == [1] * 13
    assert steps_that_follow(is_read=False) == [1, 8, 1]


def test_long_unused_text_is_followed_in_parts():
    """The bug to prevent: a query after a long text without queries would make the next step learn all of it."""
    cache = TextCache()
    history = begun(cache)
    cache.advance(["r"])
    history += range(100, 100 + 2 * texts.MAX_INDEXED_PER_STEP)
    cache.distributions_after([(row_of("r", history), ())])
    unlearned = []
    for _ in range(3):
        cache.advance(["r"])
        unlearned.append(cache._tracked["r"].num_unlearned)
    assert unlearned == [texts.MAX_INDEXED_PER_STEP, 0, 0]


def test_run_length_updates_as_text_is_followed():
    cache = TextCache()
    history = begun(cache)
    runs = []
    for token_id in PROMPT * 20:
        history.append(token_id)
        cache.advance(["r"])
        is_followed = not cache._tracked["r"].num_unlearned
        runs.append(cache.chain_length("r", 4, 0.5))
        assert is_followed or not runs[-1]
    first = next(place for place, length in enumerate(runs) if length)
    assert all(runs[first:])


def test_learning_does_not_depend_on_reads():
    assert rates_of_a_text(is_read=True) == rates_of_a_text(is_read=False) != {}


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=8)
Steps = Sequence[tuple[Sequence[int], bool]]  # tokens committed in each, and whether the cache is queried after them


@given(tokens, st.lists(st.tuples(tokens, st.booleans()), max_size=12), st.integers(1, 3))
def test_learnt_rates_equal_exhaustive_search(prompt, steps, least):
    check_teaching(prompt, steps, least)


def check_teaching(prompt: Sequence[int], steps: Steps, least: int) -> None:
    """Tokens may be committed in any groups, with queries between them."""
    cache, expected = TextCache(least), Agreement()
    history = begun(cache, prompt)
    cache.advance(["r"])
    for token_ids, is_read in [*steps, ([], True)]:
        history += token_ids
        cache.advance(["r"])
        if is_read:
            cache.distributions_after([(row_of("r", history), ())])
            cache.chain_length("r", 4, 0.5)
    cache.advance(["r"])
    for position in range(len(prompt), len(history)):
        match = counted([([], history[:position])], history[:position])
        if match is not None and match.length >= least:
            expected.observe(TextSource.OWN, match, history[position])
    assert rates_of(cache) == expected._rates


_learn = PythonTexts.learn


def learns_after_the_token(own: PythonTexts, history: Sequence[int], first: int, end: int) -> bool:
    """Let each token predict itself."""
    assert own.output is not None
    own.output.extend(history[first:end])
    return _learn(replace(own, output=None), history, first, end)


@pytest.mark.parametrize(
    "mutant",
    [
        learns_after_the_token,
        lambda own, history, first, end: _learn(replace(own, prompt=None), history, first, end),
        lambda own, history, first, end: _learn(own, history, min(first + 1, end), end),
    ],
)
def test_teaching_kills(mutant, monkeypatch):
    monkeypatch.setattr(texts, "matcher_of", PythonMatcher)
    steps: Steps = [([0], False), ([0], True), ([1, 0, 1], True), ([0], False)]
    check_teaching([0, 1], steps, 1)
    monkeypatch.setattr(PythonTexts, "learn", mutant)
    with pytest.raises(AssertionError):
        check_teaching([0, 1], steps, 1)
