"""Runs of cached text: taken where they are longer than the policy's trees, and kept out of what it learns."""

from collections.abc import Sequence
from functools import partial

import pytest

from engine.choice_cache import CachedChoice
from engine.core.policy import (
    BatchViews,
    DraftOutcome,
    ExpansionChoice,
    ExpansionPolicy,
    FixedExpansion,
    Reason,
    SequenceView,
    StepFeedback,
    StepWork,
)
from engine.core.tree import PLAIN, Expansion, GrowthCosts
from engine.core.types import Request, SamplingParams, Speculation
from engine.draft.text.long_chains import LongChainPolicy
from engine.draft.text.text_cache import TextCache
from tests.selector.machine import feedback
from tests.unit.draft.test_texts import row_of

TREE = Expansion(2, 2, 3)


class Sure(TextCache):
    """A cache that is sure of so many tokens of each request, each accepted with that chance after the one before it."""

    def __init__(self, lengths: dict[str, int], chance: float = 1.0) -> None:
        super().__init__()
        self._lengths = lengths
        self._chance = chance

    def chain_length(self, request_id: str, max_tokens: int, min_probability: float) -> int:
        likely = (length for length in range(max_tokens, 0, -1) if self._chance**length >= min_probability)
        return min(self._lengths[request_id], next(likely, 0))

    def can_start_chain(self, request_id: str) -> bool:
        return self._lengths[request_id] > 0


class Listening(FixedExpansion):
    """A fixed policy that remembers the feedback that it observed."""

    def __init__(self, node_cost: float = 0.0) -> None:
        super().__init__(TREE)
        self._node_cost = node_cost
        self.observed: list[StepFeedback] = []

    def choose(self, views: Sequence[SequenceView]) -> ExpansionChoice:
        return ExpansionChoice((TREE,) * len(views), step_s=0.5, growth_costs=GrowthCosts(self._node_cost))

    def observe(self, feedback: StepFeedback) -> None:
        self.observed.append(feedback)


def view(request_id: str, num_remaining: int = 100, **speculation) -> SequenceView:
    return SequenceView(request_id, 50, 10, num_remaining, 1, SamplingParams(), Speculation(**speculation), "traversal")


@pytest.mark.parametrize(
    ("length", "num_remaining", "expected"),
    [
        (5, 100, TREE),
        (6, 100, Expansion(6, 1, 0)),
        (11, 100, Expansion(8, 1, 0)),
        (40, 100, Expansion(16, 1, 0)),
        (40, 9, Expansion(8, 1, 0)),
    ],
)
def test_longest_sure_chain_replaces_shallower_tree(length, num_remaining, expected):
    choice = LongChainPolicy(Listening(), Sure({"r": length})).choose([view("r", num_remaining)])
    assert choice.expansions == (expected,)
    assert (choice.step_s is None) == (expected is not TREE)


@pytest.mark.parametrize(("least", "expected"), [(0.9, Expansion(8, 1, 0)), (0.6, None)])
def test_threshold_tree_is_as_deep_as_likely(least, expected):
    """Eight at .95 come all with a chance of .66: a tree that admits that goes as far itself, another ends at the second."""
    wish = Expansion(0, 4, 8, "noise_aware", 8, least)
    policy = LongChainPolicy(FixedExpansion(wish), Sure({"r": 9}, 0.95))
    assert policy.choose([view("r")]).expansions == (expected or wish,)


@pytest.mark.parametrize(
    ("own", "reported"),
    [
        (Reason.PLAIN_IS_BEST, Reason.COPIED_TEXT),
        (Reason.SPECULATION_PAYS, Reason.COPIED_TEXT),
        (Reason.PROBE, Reason.PROBE),
        (Reason.FALLBACK, Reason.FALLBACK),
    ],
)
def test_chains_keep_reasons_of_probes_and_failures(own, reported, monkeypatch):
    """The bug: a probe with a chain was reported as copied text, so that PlainComparison could replace it by plain decoding."""
    inner = Listening()
    monkeypatch.setattr(inner, "choose", lambda views: ExpansionChoice((TREE,) * len(views), own, 1.3, 0.5))
    choice = LongChainPolicy(inner, Sure({"r": 12})).choose([view("r")])
    assert (choice.reason, choice.speedup, choice.step_s) == (reported, 1.0, None)
    assert LongChainPolicy(inner, Sure({"r": 3})).choose([view("r")]).reason is own


def test_the_longest_is_bounded():
    assert LongChainPolicy(Listening(), Sure({"r": 40}), 12).choose([view("r")]).expansions == (Expansion(12, 1, 0),)


@pytest.mark.parametrize(
    ("node_cost", "expected"), [(0.0, Expansion(12, 1, 0)), (0.6, Expansion(8, 1, 0)), (0.7, Expansion(6, 1, 0)), (0.8, TREE)]
)
def test_chain_ends_where_nodes_cost_more(node_cost, expected):
    """At .95 a node, 12 come all with a chance of .54, 8 with .66, 6 with .74."""
    policy = LongChainPolicy(Listening(node_cost), Sure({"r": 40}, 0.95))
    assert policy.choose([view("r")]).expansions == (expected,)


class Pricing(Listening):
    """Wishes for a tree that ends by its nodes' chances, of which the cost is known for each."""

    wish = Expansion(0, 4, 8, "noise_aware", 8, least_chance=0.9)

    def __init__(self, nodes: tuple[float, ...]) -> None:
        super().__init__()
        self._nodes = nodes

    def choose(self, views):
        return ExpansionChoice((self.wish,) * len(views), growth_costs=GrowthCosts(nodes=self._nodes))


@pytest.mark.parametrize(("nodes", "expected"), [((0.01,) * 8, Pricing.wish), ((0.01, 0.9), Expansion(6, 1, 0))])
def test_chain_replaces_tree_that_ends_earlier(nodes, expected):
    """Six tokens of .95 each: a tree of cheap nodes has them all, one whose second costs .9 has two; its wish does not count."""
    assert LongChainPolicy(Pricing(nodes), Sure({"r": 6}, 0.95)).choose([view("r")]).expansions == (expected,)


@pytest.mark.parametrize(
    "speculation", [{"expansion": Expansion(3, 1, 0)}, {"is_enabled": False}, {"max_nodes": 5}], ids=lambda one: next(iter(one))
)
def test_requested_tree_is_not_replaced_by_chain(speculation):
    """The scheduler runs the request's own tree: were it taken for a chain, the policy would never observe it."""
    inner = Listening()
    policy = LongChainPolicy(inner, Sure({"own": 16}))
    choice = policy.choose([view("own", **speculation)])
    assert (choice.expansions, choice.step_s) == ((TREE,), 0.5)
    own = DraftOutcome("own", speculation.get("expansion", TREE), 3, 3, 1)
    policy.observe(feedback_of(own))
    assert [one.outcomes for one in inner.observed] == [(own,)]


def feedback_of(*outcomes: DraftOutcome) -> StepFeedback:
    return feedback(StepWork(2, 26, 26, 100, 1000, 5, 9, 16), outcomes, 0.1, 0.2)


def test_policy_observes_own_trees_and_unplaced_chains():
    inner = Listening()
    policy = LongChainPolicy(inner, Sure({"run": 16, "cut": 16, "none": 16, "tree": 0}))
    policy.choose([view("run"), view("cut"), view("none"), view("tree")])
    run, cut = DraftOutcome("run", Expansion(16, 1, 0), 16, 16, 16), DraftOutcome("cut", Expansion(3, 1, 0), 3, 3, 3)
    none, tree = DraftOutcome("none", PLAIN, 0, 0, 0), DraftOutcome("tree", TREE, 8, 5, 2)
    policy.observe(feedback_of(run, cut, none, tree))
    assert inner.observed[0].outcomes == (none, tree)
    policy.choose([view("tree")])
    policy.observe(feedback_of(tree))
    assert inner.observed[1].outcomes == (tree,)


def views_of(views: Sequence[SequenceView], composition: int | None, has_news: bool = True) -> BatchViews:
    """Return a step's views, and whether cached text may know what comes next."""
    found = BatchViews(partial(list, views), len(views), composition)
    found.has_news = has_news
    return found


def test_policy_does_not_observe_chain_outcomes():
    inner = Listening()
    policy = LongChainPolicy(CachedChoice(inner), Sure({"run": 16, "tree": 0}))
    run, tree = DraftOutcome("run", Expansion(16, 1, 0), 16, 16, 16), DraftOutcome("tree", TREE, 8, 5, 2)
    for views, outcomes in (("run", "tree"), (run, tree)), (("tree",), (tree,)), (("run", "tree"), (run, tree)):
        policy.choose(views_of([*map(view, views)], len(views)))
        policy.observe(feedback_of(*outcomes))
    assert [one.outcomes for one in inner.observed] == [(tree,)] * 3


class CountingRuns(Sure):
    """A cache that counts the queries for a run."""

    num_reads = 0

    def chain_length(self, request_id: str, max_tokens: int, min_probability: float) -> int:
        self.num_reads += 1
        return super().chain_length(request_id, max_tokens, min_probability)


def looks(policy: ExpansionPolicy, compositions: Sequence[int | None], is_read: bool = False) -> list[int]:
    """Return how often a policy's cached text is looked at in each of some steps, over one request that repeats nothing."""
    texts, history = CountingRuns({"r": 0}), [*range(5)]
    texts.begin(Request("r", tuple(history), SamplingParams(max_tokens=500)), history)
    running, looked = LongChainPolicy(CachedChoice(policy), texts), []
    for composition in compositions:
        history.append(len(history))
        has_news = texts.advance(["r"])
        if is_read:
            texts.distributions_after([(row_of("r", history), ())])
        before = texts.num_reads
        running.choose(views_of([view("r")], composition, has_news))
        looked.append(texts.num_reads - before)
    return looked


class Holds(FixedExpansion):
    """A policy whose choices hold for so many steps."""

    def __init__(self, num_steps: int, expansion: Expansion) -> None:
        super().__init__(expansion)
        self._choice = ExpansionChoice((expansion,), num_steps=num_steps)

    def choose(self, views: Sequence[SequenceView]) -> ExpansionChoice:
        return self._choice


@pytest.mark.parametrize("tree", [PLAIN, TREE])
@pytest.mark.parametrize("is_read", [False, True])
def test_unrepetitive_text_is_rarely_searched(tree, is_read):
    """Text without queries is not searched again until it repeats itself."""
    looked = looks(Holds(1000, tree), [7] * 40, is_read)
    assert looked == [1, *[0] * 39]
    assert looks(Holds(1000, tree), [7, 7, 8], is_read) == [1, 0, 1], "others run than before"
    assert looks(Holds(1000, tree), [None] * 3, is_read) == [1] * 3, "a prompt is fed"
    assert looks(Holds(1, tree), [7] * 3, is_read) == [1, 0, 0], "chosen anew, with no news of cached text"


SHALLOW = Expansion(1, 1, 0)


def first_chain(
    num_held: int,
    num_known: int,
    composition: int | None,
    wish: Expansion = PLAIN,
    is_read: bool = False,
    receives_news: bool = True,
) -> int:
    """Return the first step that runs on a text which repeats itself, of which so many tokens are new.

    With `is_read` each step also reads the distribution of cached text, as a drafter does.
    """
    prompt = tuple(range(100, 100 + num_known))
    texts, history = TextCache(), [*prompt]
    texts.begin(Request("r", prompt, SamplingParams(max_tokens=500)), history)
    running = LongChainPolicy(CachedChoice(Holds(num_held, wish)), texts)
    for step in range(200):
        history.append(step % 12)
        has_news = texts.advance(["r"]) and receives_news
        choice = running.choose(views_of([view("r")], composition, has_news))
        if choice.expansions[0] != wish:
            return step
        if is_read:
            texts.distributions_after([(row_of("r", history), ())])
    return 200


@pytest.mark.parametrize("num_known", range(4, 9))
@pytest.mark.parametrize("num_held", [4, 16, 33, 1000])
@pytest.mark.parametrize(
    ("wish", "is_read"), [(PLAIN, False), (SHALLOW, False), (SHALLOW, True)], ids=["plain", "model", "cache"]
)
def test_starting_repetition_is_found_without_delay(num_held, num_known, wish, is_read):
    seldom, always = (first_chain(num_held, num_known, composition, wish, is_read) for composition in (7, None))
    assert seldom == always < 100


def test_missed_news_of_runs_is_detected():
    assert max(first_chain(1000, num_known, 7, receives_news=False) for num_known in range(4, 9)) == 200
