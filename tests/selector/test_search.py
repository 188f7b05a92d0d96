"""The search for a step: near the best of all allocations where all can be tried, and never below plain decoding."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.core.policy import StepWork
from engine.core.tree import PLAIN, Expansion
from selector import search as searching
from selector.acceptance import Estimates
from selector.cost import KNOTS, CostModel
from selector.menu import Menu, menu_of
from selector.search import BatchLoad, Search, Step, never_less

MENU = Menu((PLAIN, Expansion(1, 1, 0), Expansion(0, 2, 1), Expansion(2, 1, 0), Expansion(1, 2, 1), Expansion(3, 1, 0)))
BY_CHANCE = menu_of(Expansion(0, 4, 8, "noise_aware", 16), "coupled")


def costs(slopes: tuple[float, ...], pass_s: float, draft_token_s: float = 1e-6) -> CostModel:
    """Return costs with these slopes between the knots, the last going on."""
    steps = [*slopes, *[slopes[-1]] * (len(KNOTS) - len(slopes))]
    return CostModel([1.0, *steps, *[1e-6] * 5], [1e-6, pass_s, draft_token_s, 1e-6])


def load_of(num_rows: int, model_share: float = 1.0) -> BatchLoad:
    zeros = [0.0] * num_rows
    base = StepWork(num_rows, num_rows, 0, 0, 0, 0, 0.0, 0)
    return BatchLoad(base, 0.0, context=zeros, draws=zeros, model_share=model_share)


def search(
    chances: list[float],
    model: CostModel,
    allowed: list[list[bool]] | None = None,
    kind: type[Search] = Search,
    load: BatchLoad | None = None,
) -> Search:
    """Return a search for sequences whose drafted tokens are all accepted with one chance each; siblings add a little."""
    chains = [[1.0 + sum(a**level for level in range(1, one.max_depth + 1)) for one in MENU.entries] for a in chances]
    forked = np.array([one.branches for one in MENU.entries]) - 1
    tokens = np.array(chains) + 0.2 * forked * np.array(chances)[:, None]
    nodes, rounds = ([[float(one) for one in each]] * len(chances) for each in (MENU.num_nodes, MENU.depths))
    return kind(MENU, Estimates(tokens.tolist(), nodes, rounds), allowed, load or load_of(len(chances)), model)


def search_by_chance(chances: list[list[float]], model: CostModel, kind: type[Search] = Search) -> Search:
    """Return a search for rows that have nodes of these chances, all on one level."""
    least = BY_CHANCE.least_chances[1:]
    admitted = [[[chance for chance in row if chance >= bound] for bound in least] for row in chances]
    tokens = [[1.0, *(1.0 + sum(one) for one in row)] for row in admitted]
    nodes = [[0.0, *(float(len(one)) for one in row)] for row in admitted]
    rounds = [[float(min(depth, 1)) for depth in BY_CHANCE.depths]] * len(chances)
    return kind(BY_CHANCE, Estimates(tokens, nodes, rounds), None, load_of(len(chances)), model)


def step_of(one: Search, places: Sequence[int]) -> Step:
    """Return the step with these entries."""
    return one._step(places)


def best_of_all(one: Search, num_rows: int, menu: Menu = MENU) -> float:
    return max(step_of(one, places).rate for places in product(range(len(menu)), repeat=num_rows))


slopes = st.lists(st.floats(0.001, 0.5), min_size=1, max_size=4).map(lambda found: tuple(sorted(found)))


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=3), slopes, st.floats(0.001, 0.5))
@example([0.9, 0.9, 0.9], (0.001, 0.001, 0.4), 0.01)  # room for one node and no more: rows alike must not all take it
@example([0.0, 0.0, 1.0], (0.044, 0.055, 0.332), 0.083)  # drafting pays for the best of three alone
def test_best_step_is_near_the_optimum(chances, knees, pass_s):
    one = search(chances, costs(knees, pass_s))
    found = one.best()
    assert found.rate >= one.plain.rate
    assert found.rate >= 0.93 * best_of_all(one, len(chances))


worths = st.lists(st.lists(st.floats(0.03, 1.0), max_size=6), min_size=1, max_size=2)


@given(worths, slopes, st.floats(0.001, 0.5))
@example([[0.95], [0.95]], (0.001, 0.6), 0.01)  # room for one node
def test_one_threshold_is_near_the_optimum(chances, knees, pass_s):
    one = search_by_chance(chances, costs(knees, pass_s))
    found = one.best()
    assert found.rate >= one.plain.rate
    assert found.rate >= 0.93 * best_of_all(one, len(chances), BY_CHANCE)


class AllOrNone(Search):
    """Tries each entry for all sequences and for no fewer."""

    def _best_alike(self, start):
        steps = [self._step((entry,) * len(start.places)) for entry in range(len(self._menu))]
        return max(start, *steps, key=lambda one: one.rate)

    def _best_of_fewer(self, start):
        return start


def test_equal_rows_share_the_room():
    """A knee at 8 tokens with 5 rows: three nodes fit, so three rows draft."""
    model = costs((0.001, 0.001, 0.001, 0.8), 0.01)
    one, mutant = search([0.6] * 5, model), search([0.6] * 5, model, kind=AllOrNone)
    best, optimum = one.best(), best_of_all(one, 5)
    assert best.rate >= 0.97 * optimum
    assert 0 < np.count_nonzero(best.places) < 5
    assert mutant.best().rate < 0.97 * optimum


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4))
def test_only_allowed_entries_are_taken(open_entries):
    allowed = [[True, *one] for one in open_entries]
    places = search([0.95] * len(allowed), costs((0.001,), 0.001), allowed).best().places
    assert all(allowed[row][place] for row, place in enumerate(places))


def test_rows_with_other_menus_draft_too():
    """What is best for one is closed to the other, which has the next best."""
    chain, fork = MENU.index[Expansion(3, 1, 0)], MENU.index[Expansion(0, 2, 1)]
    allowed = [[place in (0, open_entry) for place in range(len(MENU))] for open_entry in (chain, fork)]
    assert search([0.95] * 2, costs((0.001,), 0.001), allowed).best().places == (chain, fork)
    assert search([0.95] * 2, costs((0.001,), 0.001)).best().places == (chain, chain)


def test_rounds_are_paid_for_once():
    """A round that does not pay for one row pays for four, of which each makes the step longer."""
    model = CostModel([0.2, *[0.001] * len(KNOTS), 0.5, *[1e-6] * 4], [1e-6, 0.3, 1e-6, 1e-6])
    assert not any(search([0.3], model).best().places)
    assert all(search([0.3] * 4, model).best().places)


@pytest.mark.parametrize(("longest_run_s", "drafts"), [(0.0, True), (1.0, True), (2.0, False), (8.0, False)])
def test_steps_in_a_row_share_a_call(longest_run_s: float, drafts: bool):
    """A tree that gains 8 % over single steps of 1.1 s, .1 of it for a call, loses to two steps or more in one call."""
    model = CostModel([1.0, *[1e-6] * 14, 0.1], [1e-6, 0.01, 1e-6, 1e-6])
    model.longest_runs_s = longest_run_s * 1.11, 0.0
    found = search([0.047], model, allowed=[[True, True, *[False] * 4]])
    assert (found.best().places != (0,)) == drafts
    assert found.plain.seconds == pytest.approx(1.1 - 0.1 * (1 - 1 / max(1, longest_run_s)), abs=1e-3)


@pytest.mark.parametrize(("drafts_run", "longest_s"), [(False, 2.5), (True, 0.0), (True, 2.5)])
def test_steps_with_drafts_share_calls_too(drafts_run: bool, longest_s: float):
    """If they run in a row as well, the same tree pays again: two of its steps fit where two plain ones do."""
    model = CostModel([1.0, *[1e-6] * 14, 0.1], [1e-6, 0.01, 1e-6, 1e-6])
    model.longest_runs_s = 2.5, longest_s
    load = replace(load_of(1), drafts_run=drafts_run)
    found = search([0.047], model, allowed=[[True, True, *[False] * 4]], load=load)
    assert (found.best().places != (0,)) == (drafts_run and longest_s > 0.0)


def test_plain_decoding_is_the_first_entry():
    one = search([0.2, 0.9], costs((0.1,), 0.1))
    assert one.plain == step_of(one, (0, 0))
    assert one.plain.tokens == 2.0


@pytest.mark.parametrize("cost", [1e-4, 0.05, 0.5])
def test_dearer_tokens_never_buy_more(cost):
    searches = [search([0.6, 0.8], costs((each,), 0.01)) for each in (cost, 2 * cost)]
    spent = [sum(MENU.num_nodes[place] for place in one.best().places) for one in searches]
    assert spent[0] >= spent[1]


def test_tokens_of_others_make_time_expensive():
    """What sequences that are not chosen for bring in a step is lost to a longer one."""
    model, alone = costs((0.2,), 0.2), load_of(1)
    beside = replace(alone, base=alone.base._replace(num_rows=4, num_tokens=4), base_tokens=12.0)
    assert any(search([0.7], model, load=alone).best().places)
    assert not any(search([0.7], model, load=beside).best().places)


def test_probed_step_differs_in_its_rows():
    one = search([0.5, 0.6, 0.7], costs((0.1,), 0.1))
    chosen = step_of(one, (1, 0, 3))
    tried = [one.with_tree(chosen, [1], entry) for entry in (2, 5)]
    assert [step.places for step in tried] == [(1, 2, 3), (1, 5, 3)]
    assert tried == [step_of(one, step.places) for step in tried]


def test_loss_is_seconds_minus_token_value():
    chosen = Step((0,), tokens=2.0, seconds=1.0)
    assert Step((1,), tokens=3.0, seconds=2.0).loss_s(chosen) == pytest.approx(0.5)
    assert chosen.loss_s(chosen) == 0.0


def test_growth_costs_are_in_tokens():
    """In tokens at the step's rate; a level is paid for together, and only rounds with a pass pay for one."""
    one = search([0.9, 0.9], costs((0.1,), 0.4))
    both, single = step_of(one, (1, 1)), step_of(one, (1, 0))
    assert one.growth_costs(both, 2).node == pytest.approx(0.1 * both.rate, rel=1e-4)
    assert one.growth_costs(both, 2).level == pytest.approx(0.4 * both.rate / 2, rel=1e-4)
    assert one.growth_costs(single, 1).level == pytest.approx(0.4 * single.rate, rel=1e-4)
    copied = search([0.9, 0.9], costs((0.1,), 0.4), load=load_of(2, model_share=0.25))
    both = step_of(copied, (1, 1))
    assert copied.growth_costs(both, 2).level == pytest.approx(0.25 * 0.4 * both.rate / 2, rel=1e-4)


def test_nodes_cost_more_beyond_the_bend():
    """T(N) rises by .1 up to 4 packed tokens, by .02 up to 8, by .6 after that: a third node is bought with those behind it."""
    bending = CostModel([1.0, 0.1, 0.1, 0.02, 0.6, *[0.6] * 6, *[1e-9] * 5], [1e-9, 0.01, 1e-9, 1e-9])
    one = search_by_chance([[0.95]], bending)
    alone = step_of(one, (1,))
    node_costs = one.growth_costs(alone, 1).nodes
    rises = np.diff([bending.tokens_s(1.0 + count) for count in range(len(node_costs) + 1)]) * alone.rate
    assert list(node_costs) == sorted(node_costs)
    assert sum(node_costs) == pytest.approx(sum(rises), rel=0.01)
    assert node_costs[-1] == pytest.approx(0.6 * alone.rate, rel=1e-3)
    assert BY_CHANCE.least_chance <= node_costs[0] < 0.2 * node_costs[-1]
    assert not one.growth_costs(one.plain, 0).nodes


def node_costs_in_a_crowd(num_rows: int) -> list[float]:
    """Return what nodes cost where a tree of a node each would just fill what is hidden."""
    knots = tuple(0.01 if knot < 2.0 * num_rows else 0.6 for knot in KNOTS)
    crowd = search_by_chance([[0.95]] * num_rows, costs(knots, 0.01))
    chosen = step_of(crowd, (1,) * num_rows)
    return [cost / chosen.rate for cost in crowd.growth_costs(chosen, num_rows).nodes]


def check_crowd() -> None:
    """Of sixteen trees a first node costs nearly what a fifth does, alone next to nothing."""
    crowd, (alone, *_) = node_costs_in_a_crowd(16), node_costs_in_a_crowd(1)
    assert crowd[0] > 0.3 * crowd[4]
    assert alone < 0.1


def test_hidden_room_is_shared_by_trees():
    check_crowd()


def test_unspread_crowds_are_detected(monkeypatch):
    monkeypatch.setattr(searching, "_SPREAD", (0.0,))
    with pytest.raises(AssertionError):
        check_crowd()


def check_never_less(node_costs: list[float], made: list[float]) -> None:
    """None is below the one before; the first so many cost no more than they did, and all of them the same."""
    assert made == sorted(made)
    assert (np.cumsum(made) <= np.cumsum(node_costs) + 1e-9).all()
    assert sum(made) == pytest.approx(sum(node_costs))


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=9))
def test_costs_of_a_bundle_are_kept(node_costs):
    check_never_less(node_costs, never_less(node_costs))


def test_dearest_so_far_is_no_bundle():
    node_costs = [0.5, 0.1, 0.3]
    assert never_less(node_costs) == pytest.approx([0.3] * 3)
    with pytest.raises(AssertionError):
        check_never_less(node_costs, np.maximum.accumulate(node_costs).tolist())


def test_rows_without_likely_nodes_stay_plain():
    """Each row that drafts has its drafter fed, whatever grows."""
    costly, chances = costs((0.05,), 0.05, draft_token_s=0.1), [[0.9, 0.6], [], [0.04]]
    best = search_by_chance(chances, costly).best()
    assert best.places[0] > 0 == best.places[1] == best.places[2]
    assert search_by_chance(chances, costly, AllOrNone).best().rate < best.rate


class OldestFirst(Search):
    """Has the first sequences draft where not all do."""

    def _best_alike(self, start):
        counts = range(1, 1 + len(start.places))
        steps = [self.with_tree(start, range(count), entry) for count in counts for entry in self._menu.drafting]
        return max(start, *steps, key=lambda one: one.rate)

    def _best_of_fewer(self, start):
        return start


@pytest.mark.parametrize(("kind", "is_right"), [(Search, True), (OldestFirst, False)])
def test_likeliest_row_drafts_first(kind, is_right):
    """Room for one node in a batch whose last sequence is the likeliest."""
    best = search_by_chance([[0.3], [0.3], [0.95]], costs((0.001, 0.001, 0.6), 0.01), kind).best()
    assert (best.places[:2] == (0, 0) and best.places[2] > 0) == is_right


def test_step_grows_until_its_longest_tree():
    """By chance of seeds: each tree goes on to its last level or ends after the first."""
    rng, place = np.random.default_rng(0), len(BY_CHANCE) - 1
    goes_on = np.array([0.3, 0.6, 0.1])
    depth = int(BY_CHANCE.depths[place])
    lengths = np.where(rng.uniform(size=(20000, 3)) < goes_on, depth, 1)
    each = [1.0 + chance * (depth - 1) for chance in goes_on.tolist()]
    alone, together = (seconds_of_rounds(place, rounds) for rounds in ([0.0] * 3, each))
    assert together - alone == pytest.approx(0.5 * lengths.max(1).mean(), rel=0.02)
    assert lengths.max(1).mean() > 1.1 * lengths.mean(0).max(), "the longest expectation falls short"


def seconds_of_rounds(place: int, rounds: list[float]) -> float:
    """Return the seconds of a step of rows with this entry that takes each so many rounds, half a second each."""
    estimates = Estimates(*([[value] * len(BY_CHANCE) for value in of] for of in ([1.0] * 3, [0.0] * 3, rounds)))
    return Search(BY_CHANCE, estimates, None, load_of(3), costs((0.1,), 0.5))._step((place,) * 3).seconds
