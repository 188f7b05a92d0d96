"""The compiled part of choosing says what numpy says, up to rounding, whatever is learnt and whatever is to be chosen."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.policy import DraftOutcome, NodeChances, StepWork
from engine.tree import Expansion
from selector.allocation import Allocator, BatchLoad
from selector.cost import DRAFT_PRICES, NUM_REST, CostModel, StageSeconds, Works
from selector.estimators import Estimates
from selector.menu import Menu, menu_for_all, menu_of
from selector.native import library
from selector.native.allocators import CompiledAllocator
from selector.native.costs import CompiledCosts
from selector.native.worths import CompiledWorth
from selector.worth import WorthOfNodes

pytestmark = pytest.mark.skipif(library.library() is None, reason="the compiled part of choosing is not here")

LARGEST = Expansion(0, 4, 8, "noise_aware", 64)
BY_CHANCE = menu_of(LARGEST, "coupled", LARGEST)
MIXED = menu_for_all(Expansion(4, 1, 0), "coupled")
seeds = st.integers(0, 10**6).map(random.Random)


def step(seed: random.Random) -> tuple[StepWork, StageSeconds]:
    """Return a step that may have run: one in three drafts nothing, and one in ten takes far longer than it should."""
    rounds = seed.choice((0, seed.randint(1, 8), seed.randint(1, 8)))
    rows, passes = seed.randint(1, 32), seed.randint(0, rounds)
    keys, nodes = rows * seed.randint(1, 4000), seed.choice((1, rows, seed.randint(1, 700)))
    work = StepWork(rows, rows + nodes, seed.randint(0, rows), keys, 3 * keys, passes, seed.random() * 40 * rounds, rounds)
    slow = seed.choice((*[1.0] * 9, 40.0))
    return work, StageSeconds(seed.random() * 0.01 * rounds, seed.random() * 0.1 * slow)


def prices_of(seed: random.Random) -> tuple[list[float], list[float]]:
    """Return any prices, tokens and drafting dear in one and next to nothing in another."""

    def prices(count: int) -> list[float]:
        greatest = seed.choice((-1.0, -3.0))
        return [10.0 ** seed.uniform(-5.0, greatest) for _ in range(count)]

    return [0.1, *prices(NUM_REST - 1)], prices(len(DRAFT_PRICES))


@given(seeds, st.booleans())
def test_prices_are_learnt_alike(seed, has_profile):
    profile = prices_of(seed) if has_profile else ()
    one, other = CompiledCosts(*profile), CostModel(*profile)
    for _ in range(30):
        taught = step(seed)
        one.observe(*taught)
        other.observe(*taught)
        assert one.prices == pytest.approx(other.prices, rel=1e-9)
    assert one._covariance_KK == pytest.approx(other._covariance_KK, rel=1e-7, abs=1e-12)


def outcome(seed: random.Random, request_id: str) -> DraftOutcome:
    """Return a noise-aware tree, one in three cut in size or depth, some of whose nodes are alike in chance."""
    depth, size = seed.choice(((8, 64), (8, 64), (8, seed.randint(1, 6)), (seed.randint(1, 7), 64)))
    least = seed.choice((0.0, *BY_CHANCE.least_chances[1:].tolist()))
    expansion = seed.choice(BY_CHANCE.entries[1:]) if (depth, size) == (8, 64) else Expansion(0, 4, depth, "noise_aware", size)
    count = seed.randint(0, min(12, expansion.max_nodes))
    chances = tuple(seed.choice((seed.random(), 0.5, 0.3)) for _ in range(count))
    depths = tuple(seed.randint(1, expansion.max_depth) for _ in range(count))
    accepted = tuple(sorted(seed.sample(range(count), seed.randint(0, count))))
    nodes = NodeChances(chances, depths, accepted, least)
    return DraftOutcome(request_id, expansion, count, seed.randint(1, expansion.max_depth), len(accepted), nodes)


@given(seeds)
def test_trees_are_learnt_and_foretold_alike(seed):
    one, other = CompiledWorth(BY_CHANCE.entries[1:], 2), WorthOfNodes(BY_CHANCE.entries[1:], 2)
    kinds = ["greedy", "coupled warm", "greedy", "coupled cool", "greedy"]
    for found in (one, other):
        found.make_room(5)
    for _ in range(6):
        seats = [seed.randrange(4) for _ in range(seed.randint(1, 9))]
        outcomes = [outcome(seed, str(seat)) for seat in seats]
        for found in (one, other):
            found.observe(outcomes, seats, [kinds[seat] for seat in seats])
            if seats[0] == 0:
                found.clear(1)
        assert one.expect(range(5), kinds) == pytest.approx(other.expect(range(5), kinds), rel=1e-9)


def allocators(seed: random.Random, menu: Menu) -> Iterator[Allocator]:
    """Yield an allocator that is compiled, and one that is not, over the same batch, of any sizes and prices."""
    num_rows, num_others = seed.choice((1, 1, 2, 3, seed.randint(4, 32))), seed.choice((0, 0, seed.randint(1, 4)))
    rng = np.random.default_rng(seed.randint(0, 10**6))
    size = (num_rows, len(menu))
    some = rng.random(size) * (np.arange(len(menu)) > 0)
    nodes = some * menu.num_nodes
    passes = np.minimum(some * menu.depths, menu.depths) * (rng.random(size) < 0.9)
    estimates = Estimates.of(1.0 + some * menu.depths * rng.random((num_rows, 1)), nodes, passes, nodes * menu.fed_share)
    is_allowed = rng.random(size) < seed.choice((0.5, 1.0))
    is_allowed[:, 0] = True
    rounds = seed.choice((0, 3)) if num_others else 0
    all_rows = num_rows + num_others
    share = seed.choice((1.0, seed.random()))
    sizes = (all_rows, all_rows + 4.0 * num_others, all_rows * 0.5, all_rows * 300.0, 900.0)
    base = Works(*sizes, num_passes=share * rounds, num_draft_tokens=2.0 * rounds, num_rounds=rounds)
    load = BatchLoad(
        base,
        num_others * 1.5,
        context_B=rng.integers(1, 4000, num_rows).tolist(),
        unfed_B=rng.integers(1, 5, num_rows).tolist(),
        lag_B=rng.random(num_rows).tolist(),
        draws_B=rng.integers(0, 2, num_rows).tolist(),
        model_share=share,
    )
    costs = CompiledCosts(*prices_of(seed))
    yield CompiledAllocator(menu, estimates, is_allowed, load, costs)
    yield Allocator(menu, estimates, is_allowed, load, costs)


@pytest.mark.parametrize("menu", [BY_CHANCE, MIXED, menu_of(Expansion(4, 1, 0), "traversal")])
@given(seed=seeds)
def test_choices_are_priced_alike(menu, seed):
    one, other = allocators(seed, menu)
    num_rows = len(one._rows)
    places_CB = np.array([[seed.randrange(len(menu)) for _ in range(num_rows)] for _ in range(5)])
    for mine, its in zip(one._priced(places_CB), other._priced(places_CB), strict=True):
        assert mine == pytest.approx(its, rel=1e-9)
    assert one.ceiling() == pytest.approx(other.ceiling(), rel=1e-9)
    chosen = other.of(places_CB[0].tolist())
    for num_sharing in (1, num_rows):
        found, expected = one.prices(chosen, num_sharing), other.prices(chosen, num_sharing)
        assert (found.node, found.level) == pytest.approx((expected.node, expected.level), rel=1e-9)
        assert found.nodes == pytest.approx(expected.nodes, rel=1e-6)


@pytest.mark.parametrize("menu", [BY_CHANCE, MIXED])
@given(seed=seeds)
def test_trials_are_priced_alike(menu, seed):
    """One question of all sequences, some of one, one with nothing to try; each trial is a choice as any other."""
    one, other = allocators(seed, menu)
    rows, entries = range(len(one._rows)), range(1, len(menu))
    chosen = other.of([seed.randrange(len(menu)) for _ in rows])
    asked = [([*rows], seed.sample(entries, 3)), *(([row], seed.sample(entries, 2)) for row in rows), ([0], [])]
    seed.shuffle(asked)
    for mine, its in zip(one.trials(chosen, asked), other.trials(chosen, asked), strict=True):
        assert mine.tokens == pytest.approx(its.tokens, rel=1e-9)
        assert mine.seconds == pytest.approx(its.seconds, rel=1e-9)
        assert mine.losses_s == pytest.approx(its.losses_s, rel=1e-6, abs=1e-9)
        for place in range(len(its.entries)):
            tried = other.of(its.of(place).places)
            assert (tried.tokens, tried.seconds) == pytest.approx((its.tokens[place], its.seconds[place]), rel=1e-9)


@pytest.mark.parametrize("menu", [BY_CHANCE, MIXED])
@given(seed=seeds)
def test_the_best_is_found_alike(menu, seed):
    one, other = allocators(seed, menu)
    plain = other.plain()
    assert (one.plain().tokens, one.plain().seconds) == pytest.approx((plain.tokens, plain.seconds), rel=1e-9)
    mine, its = one.best(plain), other.best(plain)
    assert mine.rate == pytest.approx(its.rate, rel=1e-9)
    again = other.of(mine.places)
    assert (again.tokens, again.seconds) == pytest.approx((mine.tokens, mine.seconds), rel=1e-9)


@pytest.mark.parametrize("menu", [BY_CHANCE, MIXED])
def test_numbers_that_are_not_finite_are_noticed_and_read_nothing_else(menu):
    for place in range(4):
        one, _ = allocators(random.Random(1), menu)
        told_4BM = one._estimates.told_4BM.copy()
        told_4BM[place] = np.nan
        broken = CompiledAllocator(menu, Estimates(told_4BM), None, one._load, CompiledCosts())
        assert not broken.is_finite
        broken.best(broken.plain())


def test_numbers_of_other_sizes_are_refused():
    one, _ = allocators(random.Random(1), BY_CHANCE)
    narrow = Estimates(one._estimates.told_4BM[:, :, :-1])
    with pytest.raises(ValueError, match="permissions"):
        CompiledAllocator(BY_CHANCE, narrow, None, one._load, CompiledCosts())
