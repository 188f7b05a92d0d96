"""Marginal allocation: near the best of all allocations where all can be tried, and never below plain decoding."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.tree import PLAIN, Expansion
from selector.allocation import Allocator, BatchLoad, _never_less
from selector.cost import KNOTS, NUM_REST, CostModel, Works
from selector.estimators import Estimates
from selector.menu import Menu, menu_of

MENU = Menu((PLAIN, Expansion(1, 1, 0), Expansion(0, 2, 1), Expansion(2, 1, 0), Expansion(1, 2, 1), Expansion(3, 1, 0)))


def costs(slopes: tuple[float, ...], pass_s: float, drawn_s: float = 1e-6, score_s: float = 1e-6) -> CostModel:
    """Return costs with these slopes between the knots, the last going on."""
    steps = [*slopes, *[slopes[-1]] * (len(KNOTS) - len(slopes))]
    return CostModel([1.0, *steps, 1e-6, drawn_s, 1e-6, score_s], [1e-6, pass_s, 1e-6, 1e-6])


def allocator(chances: list[float], model: CostModel, allowed: list[list[bool]] | None = None) -> Allocator:
    num_rows = len(chances)
    tokens = [[1 + sum(a ** min(level, 9) for level in range(1, one.max_depth + 1)) for one in MENU.entries] for a in chances]
    forked = np.array([one.branches for one in MENU.entries]) - 1
    estimates = Estimates.of(
        tokens=np.array(tokens) + 0.2 * forked * np.array(chances)[:, None],
        nodes=np.tile(MENU.num_nodes.astype(float), (num_rows, 1)),
        passes=np.tile(MENU.depths.astype(float), (num_rows, 1)),
        fed=np.tile(MENU.num_nodes * MENU.fed_share, (num_rows, 1)),
    )
    is_allowed = np.array(allowed) if allowed else np.ones((num_rows, len(MENU)), dtype=np.bool_)
    return Allocator(MENU, estimates, is_allowed, load_of(num_rows), model)


def load_of(num_rows: int) -> BatchLoad:
    zeros = [0.0] * num_rows
    return BatchLoad(Works(num_rows, num_rows, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), 0.0, zeros, [1.0] * num_rows, zeros, zeros, 1.0)


def best_of_all(one: Allocator, num_rows: int) -> float:
    return one._best_of(np.array(list(product(range(len(one._menu)), repeat=num_rows)))).rate


slopes = st.lists(st.floats(0.001, 0.5), min_size=1, max_size=4).map(lambda found: tuple(sorted(found)))


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=3), slopes, st.floats(0.001, 0.5))
@example([0.9, 0.9, 0.9], (0.001, 0.001, 0.4), 0.01)  # room for one node and no more: rows alike must not all take it
def test_it_is_near_the_best_and_never_below_plain(chances, knees, pass_s):
    one = allocator(chances, costs(knees, pass_s))
    plain = one.plain()
    found = one.best(plain)
    assert found.rate >= plain.rate
    assert found.rate >= 0.97 * best_of_all(one, len(chances))


def unlike_rows(chances: list[float], contexts: list[float], draws: list[float], num_others: int, model: CostModel) -> Allocator:
    """Return an allocator for sequences that differ, beside others that have chosen for themselves."""
    one, num_rows = allocator(chances, model), len(chances) + num_others
    base = load_of(num_rows).base._replace(num_drawn=sum(draws), num_keys=sum(contexts), num_scores=sum(contexts))
    load = replace(load_of(len(chances)), base=base, base_tokens=float(num_others))
    load = replace(load, context_B=contexts, draws_B=draws)
    return Allocator(MENU, one._estimates, one._is_allowed_BM, load, model)


rows = st.lists(st.tuples(st.floats(0.0, 0.8), st.floats(0.0, 4000.0), st.sampled_from([0.0, 1.0])), min_size=1, max_size=3)


@given(rows, st.integers(0, 3), slopes, st.floats(0.001, 0.5))
@example([(0.8, 0.0, 0.0)] * 3, 0, (0.001, 0.001, 2.0), 0.001)  # room for one node, which must not be left out
@example([(0.8, 0.0, 0.0), (0.8, 4000.0, 0.0)], 0, (0.001,), 0.001)  # nodes of one are cheap, for its context is short,
@example([(0.8, 0.0, 0.0), (0.8, 0.0, 1.0)], 0, (0.001,), 0.001)  # or because it is greedy
@example([(0.8, 0.0, 0.0)], 3, (0.001,), 0.001)  # what others bring counts
def test_no_drafter_brings_more_than_one_whose_every_token_comes_for_nothing(unlike, num_others, knees, pass_s):
    chances, contexts, draws = map(list, zip(*unlike, strict=True))
    model = costs(knees, pass_s, drawn_s=2.0, score_s=2.0)
    one = unlike_rows(chances, contexts, draws, num_others, model)
    perfect = unlike_rows([1.0] * len(chances), contexts, draws, num_others, model)
    assert best_of_all(one, len(chances)) <= 1.0001 * max(one.ceiling(), one.plain().rate)
    assert one.ceiling() == pytest.approx(perfect.ceiling())  # whatever is believed of it


def test_what_a_perfect_drafter_brings_is_reached_by_one_that_costs_nothing():
    """In a second and seven hundredths: six more tokens for two sequences. Where drafting is dear there is as much to win."""
    free = costs((0.01,), 1e-6)
    one, dear = allocator([1.0, 1.0], free), allocator([1.0, 1.0], CostModel([*free.prices.values()][:NUM_REST], [9.0] * 4))
    chains = one.of((MENU.index[Expansion(3, 1, 0)],) * 2)
    assert one.ceiling() == pytest.approx(chains.rate, rel=1e-3)
    assert dear.ceiling() == pytest.approx(one.ceiling(), rel=1e-3)


class SwitchesNobody(Allocator):
    def _switched(self, from_B, to_B):
        return from_B[None]


def test_rows_alike_share_what_there_is_room_for():
    """A knee at 8 tokens with 5 rows: three nodes fit, so three rows draft."""
    model = costs((0.001, 0.001, 0.001, 0.8), 0.01)
    found = allocator([0.6] * 5, model)
    best = found.best(found.plain())
    assert best.rate >= 0.97 * best_of_all(found, 5)
    assert 0 < np.count_nonzero(best.places) < 5
    found.__class__ = SwitchesNobody
    assert found.best(found.plain()).rate < 0.97 * best_of_all(found, 5)


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4))
def test_what_is_not_allowed_is_not_taken(open_entries):
    allowed = [[True, *one] for one in open_entries]
    one = allocator([0.95] * len(allowed), costs((0.001,), 0.001), allowed)
    places = one.best(one.plain()).places
    assert all(allowed[row][place] for row, place in enumerate(places))


def test_passes_are_paid_once():
    """A pass that does not pay for one row pays for four."""
    model = costs((0.01,), 0.4)
    alone, four = allocator([0.35], model), allocator([0.35] * 4, model)
    assert not any(alone.best(alone.plain()).places)
    crowd = CostModel([0.2, *[0.05] * len(KNOTS), *[1e-6] * 4], [1e-6, 0.05, 1e-6, 1e-6])
    few = allocator([0.35] * 4, crowd)
    assert four.best(four.plain()).rate >= four.plain().rate
    assert any(few.best(few.plain()).places) == (best_of_all(few, 4) > few.plain().rate)


def test_plain_decoding_is_every_place_s_first():
    one = allocator([0.2, 0.9], costs((0.1,), 0.1))
    plain, first = one.plain(), one._best_of(np.zeros((1, 2), dtype=np.int64))
    assert plain.places == (0, 0)
    assert (plain.tokens, plain.seconds) == pytest.approx((first.tokens, first.seconds))


@pytest.mark.parametrize("price", [1e-4, 0.05, 0.5])
def test_dearer_tokens_never_buy_more(price):
    cheap, dear = allocator([0.6, 0.8], costs((price,), 0.01)), allocator([0.6, 0.8], costs((2 * price,), 0.01))
    spent = [MENU.num_nodes[[*one.best(one.plain()).places]].sum() for one in (cheap, dear)]
    assert spent[0] >= spent[1]


def test_a_level_costs_the_pass_of_those_rounds_that_have_one():
    one = allocator([0.9, 0.9], costs((0.1,), 0.4))
    both = one.of((1, 1))
    one._load = replace(one._load, model_share=0.25)
    assert one.prices(both, 2).level == pytest.approx(0.25 * 0.4 * both.rate / 2, rel=1e-4)


def test_prices_are_what_a_node_and_a_level_cost_in_tokens_and_a_level_is_paid_together():
    one = allocator([0.9, 0.9], costs((0.1,), 0.4))
    both, single = one.of((1, 1)), one.of((1, 0))
    assert one.prices(both, 2).node == pytest.approx(0.1 * both.rate, rel=1e-4)
    assert one.prices(both, 2).level == pytest.approx(0.4 * both.rate / 2, rel=1e-4)
    assert one.prices(single, 1).level == pytest.approx(0.4 * single.rate, rel=1e-4)


def test_a_tree_s_nodes_cost_more_once_the_step_bends_and_never_less():
    """T(N) rises by .1 up to 4 packed tokens, by .02 up to 8, by .6 after that: a third node is bought with those behind it."""
    bending = CostModel([1.0, 0.1, 0.1, 0.02, 0.6, *[0.6] * 6, 1e-9, 1e-9, 1e-9, 1e-9], [1e-9, 0.01, 1e-9, 1e-9])
    one = by_chance([[0.95]], bending)
    alone = one.of((1,))
    prices = one.prices(alone, 1).nodes
    rises = np.diff([bending.tokens_s(1.0 + count) for count in range(len(prices) + 1)]) * alone.rate
    assert list(prices) == sorted(prices)
    assert sum(prices) == pytest.approx(sum(rises), rel=0.01)
    assert prices[-1] == pytest.approx(0.6 * alone.rate, rel=1e-3)
    assert BY_CHANCE.least_chance <= prices[0] < 0.2 * prices[-1]
    assert not one.prices(one.plain(), 0).nodes


def prices_in_a_crowd(num_rows: int) -> list[float]:
    """Return what nodes cost where a tree of a node each would just fill what is hidden."""
    hidden = 2.0 * num_rows
    knots = [0.01 if knot < hidden else 0.6 for knot in KNOTS]
    crowd = by_chance([[0.95]] * num_rows, CostModel([1.0, *knots, *[1e-9] * 4], [1e-9, 0.01, 1e-9, 1e-9]))
    chosen = crowd.of((1,) * num_rows)
    return [price / chosen.rate for price in crowd.prices(chosen, num_rows).nodes]


def test_of_many_trees_none_has_the_hidden_room_for_itself():
    """What the others have is spread: of sixteen trees a first node costs nearly what a fifth does, alone next to nothing."""
    (first, *_), (alone, *_) = prices_in_a_crowd(16), prices_in_a_crowd(1)
    assert first > 0.3 * prices_in_a_crowd(16)[4]
    assert alone < 0.1


def test_who_knows_what_others_have_would_have_it(monkeypatch):
    monkeypatch.setattr("selector.allocation.SPREAD", (0.0,))
    with pytest.raises(AssertionError):
        test_of_many_trees_none_has_the_hidden_room_for_itself()


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=9))
def test_what_is_bought_together_is_paid_together(prices):
    """None is below the one before, and the first so many cost no more than they did; all of them the same."""
    never_less = _never_less(np.array(prices))
    assert never_less == sorted(never_less)
    sums, wanted = np.cumsum(never_less), np.cumsum(prices)
    assert (sums <= wanted + 1e-9).all()
    assert sums[-1] == pytest.approx(wanted[-1])


def test_the_dearest_so_far_is_not_what_is_paid_together():
    prices = np.array([0.5, 0.1, 0.3])
    assert _never_less(prices) == pytest.approx([0.3] * 3)
    assert _never_less(prices) != np.maximum.accumulate(prices).tolist()


# Trees that differ by the least chance of their nodes.

BY_CHANCE = menu_of(Expansion(0, 4, 8, "noise_aware", 16), "coupled")


def by_chance(worth: list[list[float]], model: CostModel) -> Allocator:
    """Return an allocator over rows that have nodes of these chances, all on one level."""
    least = BY_CHANCE.least_chances[1:]
    admitted = [[[chance for chance in row if chance >= bound] for bound in least] for row in worth]
    tokens = np.array([[1.0, *(1.0 + sum(one) for one in row)] for row in admitted])
    nodes = np.array([[0.0, *(float(len(one)) for one in row)] for row in admitted])
    passes = np.tile(np.minimum(BY_CHANCE.depths, 1).astype(float), (len(worth), 1))
    estimates = Estimates.of(tokens, nodes, passes, np.zeros(nodes.shape))
    return Allocator(BY_CHANCE, estimates, np.ones(nodes.shape, dtype=np.bool_), load_of(len(worth)), model)


worths = st.lists(st.lists(st.floats(0.03, 1.0), max_size=6), min_size=1, max_size=3)


@given(worths, slopes, st.floats(0.001, 0.5))
@example([[0.95], [0.95], [0.95]], (0.001, 0.001, 0.6), 0.01)  # room for one node
def test_one_least_chance_for_all_who_draft_is_near_the_best(worth, knees, pass_s):
    one = by_chance(worth, costs(knees, pass_s))
    plain = one.plain()
    found = one.best(plain)
    assert found.rate >= plain.rate
    assert found.rate >= 0.93 * best_of_all(one, len(worth))


def test_who_has_nothing_likely_is_left_plain():
    """Each who drafts has its drafter fed, whatever grows."""
    costly = CostModel([1.0, *[0.05] * len(KNOTS), *[1e-6] * 4], [1e-6, 0.05, 0.2, 1e-6])
    found = by_chance([[0.9, 0.6], [], [0.04]], costly)
    places = found.best(found.plain()).places
    assert places[0] > 0 == places[1] == places[2]


class OldestFirst(Allocator):
    def _best_alike(self):
        prefixes = np.tri(len(self._rows), dtype=np.int64)[None] * np.arange(1, len(self._menu))[:, None, None]
        return self._best_of(prefixes.reshape(-1, len(self._rows)))


def test_who_gains_most_drafts_first():
    """Room for one node in a batch whose last sequence is the likeliest."""
    model = costs((0.001, 0.001, 0.6), 0.01)
    found = by_chance([[0.3], [0.3], [0.95]], model)
    assert found.best(found.plain()).places[:2] == (0, 0)
    found.__class__ = OldestFirst
    assert found.best(found.plain()).places[:2] != (0, 0)


def test_trees_that_end_by_chance_together_take_as_many_rounds_as_the_longest():
    """By chance of seeds: each goes on with one chance from level to level, that of its expected rounds."""
    rng = np.random.default_rng(0)
    one, odds = by_chance([[0.5]], costs((0.1,), 0.1)), np.array([0.3, 0.6, 0.85])
    passes = 1.0 + (odds[None, :, None] ** np.arange(1, 8)).sum(2)
    lengths = np.stack([np.minimum(rng.geometric(1.0 - q, 20000), 8) for q in odds])
    assert one._rounds_by_chance(passes)[0] == pytest.approx(lengths.max(0).mean(), rel=0.02)
    for alone in passes[0]:
        assert one._rounds_by_chance(np.array([[alone]]))[0] == pytest.approx(alone, rel=0.01)
    assert one._rounds_by_chance(np.zeros((1, 2)))[0] == 0.0
    at_once_or_never = Allocator._rounds(replaced_menu(one), np.array([[1, 1, 1]]), passes)[0]
    assert at_once_or_never != pytest.approx(lengths.max(0).mean(), rel=0.05)


def replaced_menu(one: Allocator) -> Allocator:
    """Return an allocator over a menu of which not all trees end by chance."""
    one._menu = Menu((PLAIN, *BY_CHANCE.entries[1:], Expansion(8, 1, 0)))
    return one
