"""Trees that find their own shape: each is drawn with the very probability that enumeration gives it, order of siblings included.

The mutants are mistakes of public code: siblings reordered, a draw dropped, distributions other than those drawn from.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from engine.core.rng_keys import Stream, stream_key
from engine.core.tree import FREE_GROWTH, ROOT, TREE_NAMES, Expansion, GrowthCosts, TokenTree, TreeKind, TreeName
from engine.core.types import SamplingParams
from engine.draft.drafter import GrowingTree
from engine.draft.trees import calibration
from engine.draft.trees import grow as growth
from engine.draft.trees import sampling as children
from engine.draft.trees.best_first import BestFirst
from engine.draft.trees.by_value import CalibratedHeap, GreedySample, Heap, Threshold
from engine.draft.trees.calibration import AgreementWeights, Calibrations, ProbAcceptance, RankAcceptance, RuleCalibration
from engine.draft.trees.grow import grow, growers_of, strategy_of
from engine.draft.trees.strategies import Delayed, Static
from engine.draft.trees.topology import Topology, best_topology
from engine.sampling.noise import gumbels
from engine.verify.verdict import Verdict
from tests.chi_square import FAILS_ABOVE, PASSES_BELOW, z_of_counts
from tests.enumeration import TinyModel, heap_trees
from tests.model.distributions import probs_of
from tests.model.passes import CPU
from tests.model.rows import GREEDY, SAMPLED, TableDrafter, decoding_row

# Distributions of the next token by last token. One token cannot follow 2; the distributions of 3 are nearly certain.
TABLE = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.5, 0.0], [0.94, 0.02, 0.02, 0.02]])
NUM_SEEDS = 5000

Shape = tuple[tuple[int, ...], ...]  # each node's children's tokens in sampling order, nodes by their path


class Table:
    """The table as an enumerated model: a context's distribution is its last token's."""

    vocab_size = 4

    def draft(self, context):
        distribution = TABLE[context[-1] if context else 0].double().numpy()
        return distribution / distribution.sum()


def shape(tree: TokenTree) -> Shape:
    """Return the drawn tree, independent of node numbers."""
    paths = {node: tuple(tree.token_ids[v] for v in tree.path(node)[1:]) for node in range(tree.num_nodes)}
    order = sorted(paths, key=lambda node: paths[node])
    return tuple((*paths[node], -1, *(tree.token_ids[child] for child in tree.draws[node])) for node in order)


def grown_trees(expansion: Expansion, verifier: str = "traversal", num_seeds: int = NUM_SEEDS):
    """Return the trees of many seeds after token 0, all grown in one batch."""
    rows = [decoding_row((1, 0), expansion, SAMPLED, verifier, seed, str(seed)) for seed in range(num_seeds)]
    return grow(growers_of(TableDrafter(TABLE.log()), 4, CPU), rows).forest.trees


def z_of_trees(expansion: Expansion, distribution: dict[Shape, float]) -> float:
    assert sum(distribution.values()) == pytest.approx(1.0, abs=1e-6)
    return z_of_counts(Counter(map(shape, grown_trees(expansion))), distribution)


def heap_probs(budget):
    distribution: Counter[Any] = Counter()
    for drawn in heap_trees(cast(TinyModel, Table()), budget):
        distribution.update({shape(drawn.tree): drawn.probability})
    return dict(distribution)


def drawn_by(decide):
    """Return the distribution of trees grown level by level.

    `decide(context, value)` returns the remaining mass above which siblings are drawn.
    """

    def families(context, value):
        goes_on = decide(context, value)
        distribution = Table().draft(context)
        possible = np.flatnonzero(distribution).tolist()
        for order in [one for size in range(len(possible) + 1) for one in permutations(possible, size)]:
            probability, left, stops = 1.0, 1.0, goes_on is None
            for token_id in order:
                stops = stops or not goes_on(left)
                probability *= 0.0 if stops else distribution[token_id] / left
                left -= distribution[token_id]
            is_over = stops or len(order) == len(possible) or not goes_on(left)
            if probability > 0 and is_over:
                yield order, probability

    def trees(frontier, draws, probability):
        if not frontier:
            yield draws, probability
            return
        (context, value), *rest = frontier
        for order, chance in families(context, value):
            below = [((*context, token_id), value * Table().draft(context)[token_id]) for token_id in order]
            yield from trees([*rest, *below], {**draws, context: order}, probability * chance)

    distribution: Counter[Any] = Counter()
    for draws, probability in trees([((), 1.0)], {}, 1.0):
        distribution[tuple((*context, -1, *draws[context]) for context in sorted(draws))] += probability
    return dict(distribution)


def threshold_probs(least, depth):
    """DySpec's threshold tree, where the budget of nodes is never reached."""
    return drawn_by(
        lambda context, value: (lambda left: value * left > least) if len(context) < depth and value > least else None
    )


def delayed_distinct_probs():
    """One trunk token, two different ones after it, one more after each."""
    distribution: Counter[Any] = Counter()
    for trunk in range(4):
        for first, second in permutations(np.flatnonzero(Table().draft((trunk,))).tolist(), 2):
            for a in range(4):
                for b in range(4):
                    q = Table().draft((trunk,))
                    p = Table().draft(())[trunk] * q[first] * q[second] / (1 - q[first])
                    p *= Table().draft((first,))[a] * Table().draft((second,))[b]
                    draws = {(): (trunk,), (trunk,): (first, second), (trunk, first): (a,), (trunk, second): (b,)}
                    draws |= {(trunk, first, a): (), (trunk, second, b): ()}
                    distribution[tuple((*context, -1, *draws[context]) for context in sorted(draws))] += p
    return {one: p for one, p in distribution.items() if p > 0}


HEAP = Expansion(0, 4, 9, "heap", 3)
DISTINCT = Expansion(1, 2, 2, "delayed_distinct")
THRESHOLD = Expansion(0, 4, 2, "threshold", 20)


def test_heap_trees_have_dyspecs_distribution():
    assert z_of_trees(HEAP, heap_probs(3)) < PASSES_BELOW


class HighThreshold(Threshold):
    """So high that the trees are few."""

    def __init__(self, tree):
        super().__init__(tree)
        self._threshold = 0.21


def test_threshold_trees_have_dyspecs_distribution(monkeypatch):
    monkeypatch.setattr(growth, "Threshold", HighThreshold)
    assert z_of_trees(THRESHOLD, threshold_probs(0.21, 2)) < PASSES_BELOW


def test_delayed_distinct_trees_are_draws_without_replacement():
    assert z_of_trees(DISTINCT, delayed_distinct_probs()) < PASSES_BELOW


def tampered(spoil, kind: TreeKind) -> Callable[..., list[children.ChildCandidates]]:
    rule = children._SAMPLING_RULES[kind]
    return lambda *args: [spoil(candidates) for candidates in rule(*args)]


def by_prob(candidates: children.ChildCandidates) -> children.ChildCandidates:
    order = sorted(range(len(candidates.probs)), key=lambda i: -candidates.probs[i])
    return children.ChildCandidates(tuple(candidates.token_ids[i] for i in order), tuple(candidates.probs[i] for i in order))


def by_token(candidates: children.ChildCandidates) -> children.ChildCandidates:
    order = sorted(range(len(candidates.probs)), key=lambda i: candidates.token_ids[i])
    return children.ChildCandidates(tuple(candidates.token_ids[i] for i in order), tuple(candidates.probs[i] for i in order))


def unlikely_dropped(candidates: children.ChildCandidates) -> children.ChildCandidates:
    kept = [i for i, odds in enumerate(candidates.probs) if odds > 0.1]
    return children.ChildCandidates(tuple(candidates.token_ids[i] for i in kept), tuple(candidates.probs[i] for i in kept))


@pytest.mark.parametrize("spoil", [by_prob, by_token, unlikely_dropped])
@pytest.mark.parametrize(("expansion", "distribution"), [(HEAP, heap_probs(3)), (DISTINCT, delayed_distinct_probs())])
def test_tree_distributions_detect_altered_draws(spoil, expansion, distribution, monkeypatch):
    monkeypatch.setitem(children._SAMPLING_RULES, expansion.kind, tampered(spoil, expansion.kind))
    unexpected = {shape(tree) for tree in grown_trees(expansion)} - {*distribution}
    assert unexpected or z_of_trees(expansion, distribution) > FAILS_ABOVE


SET_TREE = Expansion(0, 3, 3, "greedy_sample", 8)


def z_of_samples(trees):
    """Return how far the last children, given the fixed ones before them, are from draws off those; check the fixed ones."""
    observed: Counter[Any] = Counter()
    for tree in trees:
        for node, drawn in enumerate(tree.draws):
            if drawn:
                *fixed, sample = (tree.token_ids[child] for child in drawn)
                last = tree.token_ids[node]
                assert fixed == TABLE[last].argsort(descending=True, stable=True)[: len(fixed)].tolist()
                assert sample not in fixed
                observed[last, tuple(fixed), sample] += 1
    families: Counter[Any] = Counter()
    for (last, fixed, _), count in observed.items():
        families[last, fixed] += count
    total = sum(families.values())
    distribution: dict[Any, float] = {}
    for (last, fixed), count in families.items():
        rest = [0.0 if token_id in fixed else float(TABLE[last, token_id]) for token_id in range(4)]
        distribution |= {(last, fixed, token_id): count / total * p / sum(rest) for token_id, p in enumerate(rest) if p}
    return z_of_counts(observed, distribution)


def test_set_is_fixed_and_sample_excludes_it():
    trees = grown_trees(SET_TREE, verifier="univer", num_seeds=2000)
    assert max(tree.num_nodes for tree in trees) <= 9
    assert {len(tree.draws[ROOT]) for tree in trees} == {3}
    assert z_of_samples(trees) < PASSES_BELOW


def test_sample_outside_set_detects_full_distribution_draws(monkeypatch):
    monkeypatch.setattr(children._ResidualSampler, "take", lambda self, ids_P, is_taken_P=None: self.num_taken_P.add_(is_taken_P))
    with pytest.raises(AssertionError):
        z_of_samples(grown_trees(SET_TREE, verifier="univer", num_seeds=500))


def test_full_set_uses_its_last_as_sample():
    certain = torch.full((4, 4), float("-inf"))
    certain[:, 2] = 0.0
    row = decoding_row((0,), SET_TREE, SAMPLED, "univer")
    tree = grow(growers_of(TableDrafter(certain), 4, CPU), [row]).forest.trees[0]
    assert tree.num_nodes == 4  # one child a node, three levels
    two = torch.tensor([0.7, 0.3, 0.0, 0.0]).log().repeat(4, 1)
    tree = grow(growers_of(TableDrafter(two), 4, CPU), [row]).forest.trees[0]
    assert [tree.token_ids[child] for child in tree.draws[ROOT]] == [0, 1]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(TREE_NAMES[2:]),
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from(["traversal", "coupled", "greedy"]),
    st.integers(0, 10**6),
)
def test_no_tree_outgrows_its_limits(tree_name, max_nodes, depth, branches, verifier, seed):
    expansion = Expansion(0, branches, depth, tree_name, max_nodes)
    sampling = GREEDY if verifier == "greedy" else SAMPLED
    grown = grow(growers_of(TableDrafter(TABLE.log()), 4, CPU), [decoding_row((1, 0), expansion, sampling, verifier, seed)])
    tree = grown.forest.trees[0]
    assert 2 <= tree.num_nodes <= max_nodes + 1
    assert max(tree.depths) <= depth
    assert max(map(len, tree.draws)) <= branches
    assert all(tree.draws[node] == tree.children[node] for node in range(tree.num_nodes))
    assert all(node < tree.num_nodes for node in grown.fed[0])
    drawn = {row for row in grown.forest.probs_rows[0] if row is not None}
    assert drawn == set(range(len(grown.forest.draft_probs_RV)))


@pytest.mark.parametrize(
    ("tree_name", "verifier", "sampling", "strategy"),
    [
        ("delayed", "traversal", SAMPLED, Delayed),
        ("delayed_distinct", "coupled", SAMPLED, Delayed),
        ("static", "traversal", SAMPLED, Static),
        ("heap", "coupled", SAMPLED, Heap),
        ("threshold", "rrsw", SAMPLED, Threshold),
        ("calibrated", "traversal", SAMPLED, CalibratedHeap),
        ("greedy_sample", "univer", SAMPLED, GreedySample),
        ("greedy_sample", "univer", GREEDY, BestFirst),
        ("beam", "nss", SAMPLED, BestFirst),
        ("noise_aware", "coupled", SAMPLED, BestFirst),
    ],
)
def test_node_removing_tree_grows_only_without_draws(tree_name, verifier, sampling, strategy):
    expansion = Expansion(2, 2, 2, tree_name) if tree_name.startswith("delayed") else Expansion(0, 2, 3, tree_name, 8)
    assert type(strategy_of(decoding_row((0,), expansion, sampling, verifier), RuleCalibration())) is strategy


# What is drawn next is decided before it is drawn.


def places_drawn(strategy, probs: dict[tuple[int, ...], list[int]]) -> list[tuple[tuple[int, ...], int]]:
    """Grow a tree whose draws after a path are given; return which place was drawn from each time: (path, rank)."""
    drawn: list[tuple[tuple[int, ...], int]] = []
    tree = strategy.tree
    add = tree.add

    def noted(parent: int, token_id: int) -> int:
        drawn.append((tuple(tree.token_ids[v] for v in tree.path(parent)[1:]), len(tree.draws[parent])))
        return int(add(parent, token_id))

    tree.add = noted
    while frontier := strategy.frontier():
        for one in frontier:
            path = tuple(tree.token_ids[v] for v in tree.path(one.node)[1:])
            ids = probs.get(path, [0, 1, 2, 3])
            distribution = TABLE[path[-1] if path else 0]
            odds = tuple(float(distribution[token_id]) for token_id in ids)
            strategy.expand(one.node, children.ChildCandidates(tuple(ids), odds, (), float(distribution.square().sum())))
    return drawn


def decides_beforehand(strategy_type) -> None:
    """Change the token of one draw after another: the places drawn up to that one must be the same, its own included."""
    row = decoding_row((1, 0), Expansion(0, 4, 4, "heap", 8), SAMPLED, "traversal")
    base = {(): [1, 0, 3, 2], (1,): [3, 2, 0, 1], (0,): [2, 0, 1, 3]}
    before = places_drawn(strategy_type(GrowingTree(row)), base)
    assert len(before) == 8
    for step, (path, rank) in enumerate(before):
        ids = base.get(path, [0, 1, 2, 3])
        for other in range(rank + 1, 4):
            swapped = list(ids)
            swapped[rank], swapped[other] = swapped[other], swapped[rank]
            after = places_drawn(strategy_type(GrowingTree(row)), {**base, path: swapped})
            assert after[: step + 1] == before[: step + 1]


def calibrated(tree: GrowingTree) -> CalibratedHeap:
    return CalibratedHeap(tree, ProbAcceptance())


@pytest.mark.parametrize("strategy_type", [Heap, calibrated])
def test_next_draw_position_ignores_its_token(strategy_type):
    decides_beforehand(strategy_type)


class Anticipating(Heap):
    """The value of a place is the value of its next token: the value-dependent ranking of public code."""

    def _place_value(self, node, rank):
        odds = self._candidates[node].probs
        return self._values[node] * (odds[rank] if rank < len(odds) else 0.0)


def test_prior_decisions_detect_token_dependent_heap():
    with pytest.raises(AssertionError):
        decides_beforehand(Anticipating)


# Best first.


def brute_best(expansion, first):
    """Return the paths of the best nodes by the product of draft probabilities, over the whole tree."""
    values: dict[Any, float] = {(): 1.0}
    frontier: list[Any] = [()]
    for _ in range(expansion.depth):
        frontier = [(*path, token_id) for path in frontier for token_id in best_tokens(path, first, expansion.branches)]
        for path in frontier:
            distribution = TABLE[path[-2] if len(path) > 1 else first]
            values[path] = values[path[:-1]] * float(distribution[path[-1]])
    return sorted((path for path in values if path), key=lambda path: -values[path])[: expansion.max_nodes]


def best_tokens(path: tuple[int, ...], first: int, count: int) -> list[int]:
    distribution = TABLE[path[-1] if path else first]
    return [
        token_id for token_id in distribution.argsort(descending=True, stable=True)[:count].tolist() if distribution[token_id] > 0
    ]


@pytest.mark.parametrize("max_nodes", [1, 3, 6, 10])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_beam_is_close_to_the_best_tree(max_nodes, first):
    """Nearly: fed nodes that are dropped in the end take slots, so the deepest nodes are not searched."""
    expansion = Expansion(0, 4, 12, "beam", max_nodes)
    row = decoding_row((1, first), expansion, SAMPLED, "nss")
    tree = grow(growers_of(TableDrafter(TABLE.log()), 4, CPU), [row]).forest.trees[0]
    paths = {tuple(tree.token_ids[v] for v in tree.path(node)[1:]) for node in range(1, tree.num_nodes)}
    expected = brute_best(replace(expansion, depth=6), first)
    assert sum(map(value_of(first), paths)) >= 0.98 * sum(map(value_of(first), expected))


def value_of(first: int) -> Callable[[tuple[int, ...]], float]:
    return lambda path: float(np.prod([float(TABLE[a, b]) for a, b in zip((first, *path), path, strict=False)]))


def test_nodes_that_moved_are_fed_again():
    """A fed node's keys are stored in the slot of its former number. The drafter may use them only if the number is unchanged."""
    assert check_fed(lambda strategy: strategy.finish()) > 20


def check_fed(grown_of) -> int:
    """Grow beams over random distributions of twelve tokens. Return how many fed nodes were dropped or moved."""
    generator = torch.Generator().manual_seed(0)
    num_changed = 0
    for _ in range(200):
        probs = (2.0 * torch.randn((12, 12), generator=generator)).softmax(-1)
        strategy = strategy_of(decoding_row((1, 0), Expansion(0, 3, 6, "beam", 7), SAMPLED, "nss"), RuleCalibration())
        while frontier := strategy.frontier():
            for one in frontier:
                one.tree.fed.add(one.node)
                best = probs[one.tree.token_ids[one.node]].topk(3)
                strategy.expand(one.node, children.ChildCandidates(tuple(best.indices.tolist()), tuple(best.values.tolist())))
        grown, fed = grown_of(strategy), strategy.tree
        num_changed += len(fed.fed) - len(grown.fed)
        for node in grown.fed:
            assert grown.tree.path(node) == tuple(fed.path(node))
            assert [grown.tree.token_ids[v] for v in grown.tree.path(node)] == [fed.token_ids[v] for v in fed.path(node)]
    return num_changed


def test_fed_nodes_detect_forgotten_moves():
    def careless(strategy):
        grown = strategy.finish()
        return replace(grown, fed=frozenset(range(min(len(strategy.tree.fed), grown.tree.num_nodes))))

    with pytest.raises(AssertionError):
        check_fed(careless)


def test_noise_aware_children_use_their_position_noise():
    expansion = Expansion(0, 3, 3, "noise_aware", 6)
    rows = [decoding_row((1, 0), expansion, SAMPLED, "coupled", seed, str(seed)) for seed in range(40)]
    for row, tree in zip(rows, grow(growers_of(TableDrafter(TABLE.log()), 4, CPU), rows).forest.trees, strict=True):
        for node, drawn in enumerate(tree.draws):
            key = stream_key(row.seed, row.root_position + tree.depths[node] + 1, Stream.TOKEN)
            distribution = probs_of(TABLE[tree.token_ids[node]][None].log(), [SAMPLED])[0].double().log()
            scores = AgreementWeights().sharpness * distribution + gumbels([key], 4)[0]
            assert [tree.token_ids[child] for child in drawn] == scores.argsort(descending=True)[: len(drawn)].tolist()


def test_wide_gap_makes_trunk_narrow_gap_branches():
    odds = [0.4, 0.3, 0.3]
    wide, narrow = AgreementWeights().chances(odds, [12.0, 1.0, 0.5], 1.0), AgreementWeights().chances(odds, [0.1, 0.2, 0.3], 1.0)
    assert wide[0] > 0.99
    assert narrow[0] < 0.45
    assert narrow.sum() == pytest.approx(1.0)


# What does not pay is left out.

NOISE_AWARE = Expansion(0, 4, 4, "noise_aware", 12)
RULES = [pytest.param(SAMPLED, id="coupled"), pytest.param(GREEDY, id="greedy")]


def grown_at(
    growth_costs: GrowthCosts, sampling: SamplingParams, seed: int, expansion: Expansion = NOISE_AWARE
) -> tuple[BestFirst, int]:
    """Return a grown tree's strategy, and the rounds that it took."""
    row = structs.replace(decoding_row((1, 0), expansion, sampling, "coupled", seed), growth_costs=growth_costs)
    strategy = strategy_of(row, RuleCalibration())
    assert isinstance(strategy, BestFirst)
    return strategy, growth.grow_by([strategy], TableDrafter(TABLE.log()), [row], 4, CPU).num_rounds


def worths(strategy: BestFirst) -> dict[tuple[int, ...], float]:
    """Return the chance of each node that is kept."""
    found = {}
    for one in strategy._kept():
        path, at = [], one
        while at.parent is not None:
            path.append(at.token_id)
            at = at.parent
        found[tuple(path[::-1])] = one.value
    return found


def check_nodes_pay(sampling: SamplingParams) -> None:
    num_left_out = 0
    for seed in range(20):
        whole = worths(grown_at(FREE_GROWTH, sampling, seed)[0])
        for cost in (0.05, 0.2, 0.5):
            kept = worths(grown_at(GrowthCosts(node=cost), sampling, seed)[0])
            assert kept == worths(grown_at(FREE_GROWTH, sampling, seed, replace(NOISE_AWARE, least_chance=cost))[0])
            assert all(gain >= cost for gain in kept.values())
            assert {path for path, gain in whole.items() if gain >= cost} <= kept.keys()
            num_left_out += len(whole) - len(kept)
    assert num_left_out > 0


def check_nodes_pay_as_they_come(sampling: SamplingParams) -> None:
    """The likeliest nodes are kept as long as each is as likely as it costs: the first next to nothing, others more and more."""
    growth_costs = GrowthCosts(nodes=(0.0, 0.01, 0.05, 0.05, 0.2, 0.4))
    num_left_out = 0
    for seed in range(20):
        whole = sorted(worths(grown_at(FREE_GROWTH, sampling, seed)[0]).items(), key=lambda one: -one[1])
        kept = worths(grown_at(growth_costs, sampling, seed)[0])
        pays = [gain >= cost for (_, gain), cost in zip(whole, (*growth_costs.nodes, *[0.4] * len(whole)), strict=False)]
        assert sorted(kept.values(), reverse=True) == pytest.approx([gain for _, gain in whole][: [*pays, False].index(False)])
        num_left_out += len(whole) - len(kept)
    assert num_left_out > 0


def check_levels_pay(sampling: SamplingParams) -> None:
    for seed in range(20):
        rounds = [grown_at(GrowthCosts(level=cost), sampling, seed)[1] for cost in (0.0, 0.1, 0.3, 1.1)]
        assert rounds == sorted(rounds, reverse=True)
        assert rounds[0] > rounds[-1] == 1  # the first is the policy's choice


@pytest.mark.parametrize("sampling", RULES)
def test_nodes_and_levels_without_gain_are_omitted(sampling):
    check_nodes_pay(sampling)
    check_nodes_pay_as_they_come(sampling)
    check_levels_pay(sampling)


class Wasteful(BestFirst):
    def __init__(self, *args):
        super().__init__(*args)
        self._growth_costs, self._thresholds = FREE_GROWTH, FREE_GROWTH.least_chances(self._expansion)


@pytest.mark.parametrize("sampling", RULES)
@pytest.mark.parametrize("check", [check_nodes_pay, check_nodes_pay_as_they_come, check_levels_pay])
def test_free_growth_is_noticed(check, sampling, monkeypatch):
    monkeypatch.setattr(growth, "BestFirst", Wasteful)
    with pytest.raises(AssertionError):
        check(sampling)


def test_tree_reports_its_number_of_rounds():
    rows = [decoding_row((1, 0), replace(NOISE_AWARE, depth=depth), SAMPLED, "coupled", 0, str(depth)) for depth in (1, 3, 2)]
    grown = grow(growers_of(TableDrafter(TABLE.log()), 4, CPU), rows)
    assert grown.rounds == (1, 3, 2)
    assert grown.num_rounds == 3


def test_beam_trees_ignore_growth_costs():
    beam = replace(NOISE_AWARE, tree="beam")
    trees = [grown_at(growth_costs, SAMPLED, 0, beam)[0].finish().tree for growth_costs in (FREE_GROWTH, GrowthCosts(0.9, 9.0))]
    assert trees[0] == trees[1]


# What is learnt.


class Outcome(NamedTuple):
    """The offers of a node, the temperature (1 where noise is empty), and the place of the taken offer."""

    odds: list[float]
    noise: list[float]
    temperature: float
    place: int | None


def outcomes(
    distribution: float, noise: float, count: int, seed: int = 0, temperatures: Sequence[float] = (0.7, 1.0, 0.0)
) -> list[Outcome]:
    """Return what a target takes whose choices have these weights. Of temperature 0 are greedy rows, which have no noise."""
    rng, seen = np.random.default_rng(seed), []
    for index in range(count):
        unit = temperatures[index % len(temperatures)] or 1.0
        is_greedy = not temperatures[index % len(temperatures)]
        logits = rng.normal(size=rng.integers(2, 20)) * 3
        odds = np.exp(logits / unit - np.logaddexp.reduce(logits / unit))
        gumbels = rng.gumbel(size=len(odds)) * (not is_greedy)
        taken = int((unit * (distribution * np.log(odds) + noise * gumbels) + rng.gumbel(size=len(odds))).argmax())
        place = None if taken == len(odds) - 1 else taken  # the last index means: not among the best
        seen.append(Outcome(odds.tolist(), [] if is_greedy else gumbels.tolist(), unit, place))
    return seen


def learnt_of(seen: Sequence[Outcome]) -> AgreementWeights:
    agreement = AgreementWeights()
    for one in seen:
        agreement.observe(*one)
    return agreement


def weights(agreement: AgreementWeights) -> tuple[float, float]:
    return agreement.log_prob_weight, agreement.noise_weight


def check_weights(distribution: float, noise: float, as_learnt: Callable[[Outcome], Outcome] = lambda one: one) -> None:
    seen = outcomes(distribution, noise, 4000, temperatures=(0.7, 0.3, 1.0, 0.0))
    assert weights(learnt_of([*map(as_learnt, seen)])) == pytest.approx((distribution, noise), rel=0.25)


WEIGHTS = [(0.9, 0.3), (1.0, 1.0), (3.0, 0.5), (0.4, 0.2)]


@pytest.mark.parametrize(("distribution", "noise"), WEIGHTS)
def test_weights_are_found_again_whatever_the_temperature(distribution, noise):
    check_weights(distribution, noise)


@pytest.mark.parametrize(
    "as_learnt",
    [
        lambda one: one._replace(noise=[0.0] * len(one.noise)),
        lambda one: one._replace(noise=one.noise[::-1]),
        lambda one: one._replace(temperature=1.0),
        lambda one: one._replace(place=0),  # the drafter's best token is believed to be the one
    ],
)
def test_weights_detect_learning_from_wrong_data(as_learnt):
    with pytest.raises(AssertionError):
        check_weights(0.9, 0.3, as_learnt)


def test_a_greedy_row_teaches_nothing_of_noise():
    agreement = learnt_of(outcomes(2.0, 0.5, 1600, temperatures=(0.0,)))
    assert agreement.log_prob_weight == pytest.approx(2.0, rel=0.25)
    assert agreement.noise_weight == pytest.approx(AgreementWeights().noise_weight)


@pytest.mark.parametrize("noise", [0.0, 50.0])
def test_noise_is_never_all_and_never_nothing(noise):
    agreement = learnt_of(outcomes(0.5, noise, 4000, temperatures=(1.0,)))
    assert agreement.sharpness == pytest.approx(8.0 if noise == 0.0 else 0.25)


def likeliest(seen: Sequence[Outcome]) -> tuple[float, ...]:
    """Return the weights of the largest likelihood, those of later observations counting more."""
    found = np.array([0.9, 0.5])
    for _ in range(60):
        information, gradient = 1e-9 * np.eye(2), np.zeros(2)
        for age, (odds, drawn, unit, place) in enumerate(reversed(seen)):
            features = unit * np.stack([np.log(odds), drawn or [0.0] * len(odds)], -1)
            chances = np.exp(features @ found - np.logaddexp.reduce(features @ found))
            beside = features - chances @ features
            information += calibration._DECAY**age * (beside.T * chances) @ beside
            gradient += calibration._DECAY**age * beside[-1 if place is None else place]
        found = np.clip(found + np.linalg.solve(information, gradient), found / 2, found * 2)
    return tuple(found.tolist())


@pytest.mark.parametrize(("distribution", "noise"), [(0.9, 0.3), (1.0, 1.0), (1.4, 0.5)])
def test_stepwise_lessons_equal_one_large_lesson(distribution, noise):
    seen = outcomes(distribution, noise, 1600, seed=7)
    assert weights(learnt_of(seen)) == pytest.approx(likeliest(seen), rel=0.1)


def check_chances(agreement: AgreementWeights) -> None:
    """Chances are those of the model, and so are those of scores and their scale, by which the library ranks."""
    for odds, drawn, unit, _ in outcomes(0.9, 0.3, 60, seed=3):
        log_q, noise = unit * np.log(odds), unit * np.array(drawn or [0.0] * len(odds))
        model = np.exp(agreement.log_prob_weight * log_q + agreement.noise_weight * noise)
        assert agreement.chances(odds, drawn, unit) == pytest.approx(model / model.sum())
        scores = agreement.sharpness * np.log(odds) + noise / unit
        by_score = np.exp((scores - scores.max()) / agreement.score_scale(unit))
        assert by_score / by_score.sum() == pytest.approx(model / model.sum())


@pytest.mark.parametrize(("distribution", "noise"), [*WEIGHTS, (0.5, 0.0), (0.5, 50.0)])
def test_scores_rank_tokens_by_their_chances(distribution, noise):
    check_chances(learnt_of(outcomes(distribution, noise, 320)))


class Cold(AgreementWeights):
    def score_scale(self, temperature: float) -> float:
        return super().score_scale(1.0)


class Blunt(AgreementWeights):
    @property
    def sharpness(self) -> float:
        return 1.0


class Warm(AgreementWeights):
    def chances(self, odds, noise, temperature):
        return super().chances(odds, noise, 1.0)


@pytest.mark.parametrize("broken", [Cold, Blunt, Warm])
def test_chances_detect_other_scores(broken):
    agreement = broken()
    agreement.log_prob_weight, agreement.noise_weight = 0.9, 0.3
    with pytest.raises(AssertionError):
        check_chances(agreement)


def test_acceptance_by_odds_is_found_again():
    acceptance, rng = ProbAcceptance(), np.random.default_rng(0)
    for _ in range(4000):
        odds = float(rng.random())
        acceptance.observe(0, odds, bool(rng.random() < 0.3 + 0.5 * odds))
        acceptance.observe(1, odds, bool(rng.random() < 0.1))
    assert acceptance.chance(0, 0.42) == pytest.approx(0.51, abs=0.1)
    assert acceptance.chance(0, 0.9) == pytest.approx(0.75, abs=0.1)
    assert acceptance.chance(1, 0.6) == pytest.approx(0.1, abs=0.1)


def test_rank_acceptance_is_found_again():
    tree = TokenTree((-1, 0, 0, 0), (0, 1, 2, 3), ((1, 2, 3), (), (), ()))
    ranks, rng = RankAcceptance(), np.random.default_rng(0)
    for _ in range(4000):
        end = int(rng.choice(4, p=[0.3, 0.4, 0.2, 0.1]))  # node 0: none accepted
        ranks.observe(tree, [0] if end == 0 else [0, end])
    assert ranks.chances(3) == pytest.approx((0.4, 0.2, 0.1), abs=0.05)


def learnt_from(
    expansion: Expansion, accepts_first: bool, learn=growth.learn, sampling: SamplingParams = SAMPLED
) -> RuleCalibration:
    """Grow many trees whose first or last child is always accepted. Return the learnt calibration."""
    row = decoding_row((1, 0), expansion, sampling, "coupled")
    calibrations = Calibrations()
    for _ in range(600):
        grown = grow(growers_of(TableDrafter(TABLE.log()), 4, CPU), [row], calibrations)
        tree = grown.forest.trees[0]
        child = tree.children[ROOT][0 if accepts_first else -1]
        learn(calibrations, [row], grown, [Verdict((ROOT, child), 3)])
    return calibrations.of(row)


def check_learning(learn) -> None:
    """Chances of tokens that are always accepted rise, and of those never accepted fall."""
    for tree_name, trust in TRUST.items():
        expansion = Expansion(0, 3, 1, tree_name, 3)
        assert trust(learnt_from(expansion, True, learn)) > 2 * trust(learnt_from(expansion, False, learn))
    greedy = [learnt_from(Expansion(0, 3, 1, "noise_aware", 3), first, learn, GREEDY) for first in (True, False)]
    assert TRUST["noise_aware"](greedy[0]) > 2 * TRUST["noise_aware"](greedy[1])


TRUST: dict[TreeName, Callable[[RuleCalibration], float]] = {
    "static": lambda learnt: learnt.by_rank.chances(3)[0],
    "calibrated": lambda learnt: min(learnt.by_prob.chance(0, odds) for odds in (0.05, 0.15, 0.3, 0.5)),
    "noise_aware": lambda learnt: sum(weights(learnt.agreement)),
}


def test_learning_trees_use_observed_outcomes():
    check_learning(growth.learn)


class Attentive(AgreementWeights):
    """Notes at which temperatures it was taught."""

    def __init__(self) -> None:
        super().__init__()
        self.temperatures: set[float] = set()

    def observe(self, odds, noise, temperature, place):
        self.temperatures.add(temperature)
        super().observe(odds, noise, temperature, place)


@pytest.mark.parametrize(("temperature", "taught"), [(0.7, 0.7), (1.3, 1.3), (0.0, 1.0)])
def test_learning_uses_the_temperature_of_the_row(monkeypatch, temperature, taught):
    monkeypatch.setattr(calibration, "AgreementWeights", Attentive)
    learnt = learnt_from(
        Expansion(0, 3, 1, "noise_aware", 3), True, sampling=SamplingParams(temperature=temperature, max_tokens=8, seed=1)
    )
    assert isinstance(learnt.agreement, Attentive)
    assert learnt.agreement.temperatures == {taught}


def test_learning_detects_outcomes_of_other_rows():
    def inverted(calibrations, rows, grown, verdicts):
        children_of_root = grown.forest.trees[0].children[ROOT]
        child = children_of_root[-1 - children_of_root.index(verdicts[0].path[1])]
        growth.learn(calibrations, rows, grown, [Verdict((ROOT, child), 3)])

    for broken in (inverted, lambda *_: None):
        with pytest.raises(AssertionError):
            check_learning(broken)


# The shape of static trees.


def all_topologies(num_nodes: int, depth: int, branches: int) -> Iterator[Topology]:
    """Yield every shape of exactly that many nodes below the root."""

    def forests(nodes: int, depth: int, ranks: int) -> Iterator[tuple[Topology, ...]]:
        if not nodes:
            yield ()
        elif depth and ranks:
            for size in range(1, nodes + 1):
                for below in forests(size - 1, depth - 1, branches):
                    for beside in forests(nodes - size, depth, ranks - 1):
                        yield (Topology(below), *beside)

    yield from map(Topology, forests(num_nodes, depth, branches))


@pytest.mark.parametrize("acceptance", [(0.8, 0.1, 0.05), (0.4, 0.3, 0.2), (0.34, 0.33, 0.33), (0.05, 0.5, 0.2)])
@pytest.mark.parametrize("depth", [2, 4])
def test_dynamic_programme_finds_the_best_shape(acceptance, depth):
    found = best_topology(acceptance, 6, depth)
    best = max(shape.expected_tokens(acceptance) for size in range(7) for shape in all_topologies(size, depth, 3))
    assert found.expected_tokens(acceptance) == pytest.approx(best)
    assert found.num_nodes <= 7


def test_best_shape_detects_missing_siblings_or_depth():
    acceptance = (0.5, 0.3, 0.1)
    best = best_topology(acceptance, 6, 4).expected_tokens(acceptance)
    chain, star = best_topology(acceptance[:1], 6, 4), best_topology(acceptance, 6, 1)
    assert max(chain.expected_tokens(acceptance), star.expected_tokens(acceptance)) < best - 0.05


def test_a_static_tree_has_its_shape():
    topology = best_topology((0.5, 0.3, 0.1), 7, 3)
    row = decoding_row((1, 0), Expansion(0, 3, 3, "static", 7), SAMPLED, "traversal")
    strategy = Static(GrowingTree(row), topology)
    while frontier := strategy.frontier():
        for one in frontier:
            strategy.expand(one.node, children.ChildCandidates(tuple(range(one.num_draws)), (0.25,) * one.num_draws))

    def shape_below(node: int) -> Topology:
        return Topology(tuple(map(shape_below, strategy.finish().tree.children[node])))

    assert shape_below(ROOT) == topology
