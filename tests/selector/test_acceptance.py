"""Counted acceptance: what it expects is what comes, for every shape; new sequences begin as their kind is."""

import random
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from engine.core.policy import DraftOutcome, NodeChances
from engine.core.tree import PLAIN, Expansion
from engine.core.types import SamplingParams
from selector.acceptance import CountedAcceptance, best_reach, kind_of
from selector.menu import Menu, menu_for_all, menu_of
from tests.selector.machine import Chances, Text, flat

MENU = menu_of(Expansion(4, 1, 0), "traversal", Expansion(4, 3, 4))
TREE, FORK = Expansion(2, 2, 2, "delayed_distinct"), Expansion(0, 3, 1, "delayed_distinct")


def taught(expansions: list[Expansion], chances: Chances, num_steps: int = 400, offers: float = 1.0, menu: Menu = MENU):
    """Return an estimator that has seen one sequence's trees, and the sequence."""
    estimator, text, chance = CountedAcceptance(menu), Text(chances, offers), random.Random(0)
    for step in range(num_steps):
        estimator.estimate([text.view("r")])
        expansion = expansions[step % len(expansions)]
        nodes, drafted, accepted = text.draft(expansion, chance)
        estimator.observe([DraftOutcome("r", expansion, nodes, drafted, accepted)])
        text.num_generated += accepted + 1
    return estimator, text


def expected(estimator: CountedAcceptance, text: Text, expansion: Expansion, name: str = "r", menu: Menu = MENU) -> float:
    return estimator.estimate([text.view(name)]).tokens[0][menu.index[expansion]]


@pytest.mark.parametrize("chance", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("tried", [[Expansion(4, 1, 0)], [TREE], [FORK, Expansion(3, 1, 0)]], ids=["chain", "tree", "mixed"])
def test_every_entry_is_predicted_from_few(tried, chance):
    estimator, text = taught(tried, flat(chance))
    for entry in MENU.entries:
        assert expected(estimator, text, entry) == pytest.approx(text.expected_tokens(entry), rel=0.2), entry


@pytest.mark.parametrize("tried", [Expansion(3, 1, 0), FORK], ids=["chain", "fork"])
@pytest.mark.parametrize("chance", [0.3, 0.6])
def test_later_siblings_are_accepted_less(tried, chance):
    """Siblings counted as independent: wide forks were expected to bring up to 12 % more than they do, and were chosen."""
    estimator, text = taught([tried], flat(chance), num_steps=2000)
    one, three = (expected(estimator, text, entry, "new") - 1.0 for entry in (Expansion(1, 1, 0), FORK))
    assert one == pytest.approx(chance, rel=0.15)
    assert three == pytest.approx(1.0 - (1.0 - chance) ** 1.55, rel=0.12)


def test_depths_are_distinguished():
    estimator, text = taught([Expansion(4, 1, 0)], lambda depth, num_generated: 0.9 if depth <= 2 else 0.1)
    assert expected(estimator, text, Expansion(2, 1, 0)) == pytest.approx(2.71, rel=0.1)
    assert expected(estimator, text, Expansion(4, 1, 0)) == pytest.approx(2.80, rel=0.1)


def test_missing_drafts_are_predicted():
    estimator, text = taught([Expansion(4, 1, 0)], flat(0.9), offers=0.25)
    estimates = estimator.estimate([text.view("r")])
    place = MENU.index[Expansion(4, 1, 0)]
    assert estimates.nodes[0][place] == pytest.approx(1.0, rel=0.3)
    assert estimates.rounds[0][place] < 2.0
    assert estimates.tokens[0][place] == pytest.approx(text.expected_tokens(Expansion(4, 1, 0)), rel=0.2)


def test_plain_decoding_brings_one_token():
    estimates = CountedAcceptance(MENU).estimate([Text(flat(0.5)).view("r")])
    assert (estimates.tokens[0][0], estimates.nodes[0][0], estimates.rounds[0][0]) == (1.0, 0.0, 0.0)
    assert min(estimates.tokens[0][1:]) > 1.0


def test_new_sequence_begins_as_its_kind():
    estimator, text = taught([Expansion(4, 1, 0)], flat(0.95))
    alike, unlike = Text(flat(0.95)), Text(flat(0.95), temperature=0.0)
    assert expected(estimator, alike, Expansion(4, 1, 0), "new") > 3.5
    assert expected(estimator, unlike, Expansion(4, 1, 0), "other") < 2.5
    views = [text.view("r"), alike.view("new"), unlike.view("other")]
    rows = estimator.estimate(views).tokens
    assert np.shape(rows) == (3, len(MENU))
    assert np.array_equal(rows, np.concatenate([estimator.estimate([view]).tokens for view in views]))


def test_restarted_id_has_no_history():
    estimator, _ = taught([Expansion(4, 1, 0)], lambda depth, num_generated: 0.95 if num_generated < 900 else 0.0)
    assert expected(estimator, Text(flat(0.0), num_generated=9), Expansion(4, 1, 0)) < 1.5
    assert expected(estimator, Text(flat(0.0)), Expansion(4, 1, 0)) > 2.0, "as its kind, no longer as that sequence"


ALL = menu_for_all(Expansion(4, 1, 0), "traversal")


@pytest.mark.parametrize("has_delayed", [False, True])
def test_part_of_menu_has_whole_numbers(has_delayed):
    """With trees of both kinds behind it; estimates of a part change after something was learnt."""
    tried = [entry for entry in ALL.entries if entry.num_draft_tokens in (3, 8)]
    part = Menu(tuple(one for one in ALL.entries[::2] if has_delayed or one.is_plain or not one.is_delayed))
    places = [ALL.index[entry] for entry in part.entries]
    estimator, text = CountedAcceptance(ALL), Text(flat(0.7))
    chance = random.Random(0)
    for expansion in tried:
        views = [text.view("r"), Text(flat(0.7), temperature=0.0).view("other")]
        whole, some = estimator.estimate(views), estimator.estimate(views, part)
        assert np.array(some) == pytest.approx(np.array(whole)[..., places]), expansion
        nodes, drafted, accepted = text.draft(expansion, chance)
        estimator.observe([DraftOutcome("r", expansion, nodes, drafted, accepted)])
        text.num_generated += accepted + 1


def test_unknown_and_plain_rows_change_nothing():
    estimator, text = taught([Expansion(4, 1, 0)], flat(0.5), 50)
    before = estimator.estimate([text.view("r")]).tokens
    estimator.observe([DraftOutcome("stranger", Expansion(4, 1, 0), 4, 4, 4), DraftOutcome("r", PLAIN, 0, 0, 0)])
    assert np.array_equal(estimator.estimate([text.view("r")]).tokens, before)


def best_tokens(expansion: Expansion, chance: float) -> float:
    return 1.0 + sum(best_reach(expansion, chance))


@cache
def best_tree(expansion: Expansion, chance: float) -> frozenset[tuple[int, ...]]:
    """Return the nodes of the best tree of that size, each by its ranks from the root on, if all are accepted with one chance."""
    ranks = range(expansion.branches)
    paths = [path for depth in range(1, expansion.max_depth + 1) for path in product(ranks, repeat=depth)]
    values = {path: chance ** len(path) * (1.0 - chance) ** sum(path) for path in paths}
    return frozenset(sorted(paths, key=lambda path: (-round(values[path], 12), len(path), path))[: expansion.max_nodes])


def path_of_best_tree(expansion: Expansion, chance: float, seed: random.Random) -> int:
    """Return how deep such a tree's path comes: the first child that is accepted, and on from there."""
    nodes, path = best_tree(expansion, chance), tuple[int, ...]()
    while True:
        children = (child for rank in range(expansion.branches) if (child := (*path, rank)) in nodes)
        accepted = next((child for child in children if seed.random() < chance), None)
        if accepted is None:
            return len(path)
        path = accepted


@pytest.mark.parametrize("chance", [0.1, 0.6, 0.9])
def test_own_shaped_trees_follow_from_one_size(chance):
    largest = Expansion(0, 3, 6, "heap", 16)
    menu = menu_of(largest, "traversal", largest)
    estimator, view, seed = CountedAcceptance(menu), Text(flat(0.0), num_generated=5).view("r"), random.Random(0)
    tried = replace(largest, max_nodes=8)
    for _ in range(600):
        estimator.estimate([view])
        estimator.observe([DraftOutcome("r", tried, 8, tried.max_depth, path_of_best_tree(tried, chance, seed))])
    tokens = estimator.estimate([view]).tokens[0]
    for depth in set(menu.depths):
        of_depth = [one for one, level in zip(tokens, menu.depths, strict=True) if level == depth]
        assert (np.diff(of_depth) >= -0.1).all(), "hardly less with more nodes"
    for place, entry in enumerate(menu.entries[1:], start=1):
        assert tokens[place] == pytest.approx(best_tokens(entry, chance), rel=0.25), entry


@pytest.mark.parametrize(("drafted_depth", "passes"), [(6, 6.0), (3, 3.0)])
def test_own_shaped_trees_take_rounds_as_before(drafted_depth, passes):
    largest = Expansion(0, 3, 6, "heap", 16)
    menu = menu_of(largest, "traversal", largest)
    estimator, view = CountedAcceptance(menu), Text(flat(0.0), num_generated=5).view("r")
    for _ in range(600):
        estimator.estimate([view])
        estimator.observe([DraftOutcome("r", largest, 16, drafted_depth, 2)])
    assert estimator.estimate([view]).rounds[0][menu.index[largest]] == pytest.approx(passes, rel=0.1)


def tokens_after_trimming(menu: Menu, size: int) -> float:
    """Return what the largest tree is expected to bring after trees cut to a size that is on no menu brought all they could."""
    estimator, view = CountedAcceptance(menu), Text(flat(0.0), num_generated=5).view("r")
    trimmed = replace(menu.entries[-1], max_nodes=size)
    assert trimmed not in menu.index
    for _ in range(200):
        estimator.estimate([view])
        estimator.observe([DraftOutcome("r", trimmed, size, trimmed.max_depth, trimmed.max_depth)])
    return estimator.estimate([view]).tokens[0][-1]


@pytest.mark.parametrize("size", [5, 11, 200])
def test_trees_cut_for_room_teach_too(size):
    largest = Expansion(0, 3, 6, "heap", 64)
    menu = menu_of(largest, "traversal", largest)
    unknown = CountedAcceptance(menu).estimate([Text(flat(0.0)).view("r")]).tokens[0][-1]
    assert tokens_after_trimming(menu, size) > 1.3 * unknown


def test_best_tokens_of_countable_shapes():
    assert best_tokens(Expansion(0, 1, 4, "heap", 4), 0.5) == pytest.approx(1.9375)
    assert best_tokens(Expansion(0, 2, 1, "heap", 2), 0.5) == pytest.approx(1.75)
    assert best_tokens(Expansion(0, 4, 8, "heap", 16), 0.0) == pytest.approx(1.0)


def test_kinds_separate_distributions():
    views = [Text(flat(0.5), temperature=temperature).view("r") for temperature in (0.0, 0.6, 1.0, 1.5)]
    assert len({kind_of(view.sampling, "traversal") for view in views}) == 4, "texts at .6 are accepted more than those at 1"
    assert kind_of(SamplingParams(0.7), "traversal") == kind_of(SamplingParams(0.6), "traversal")
    assert kind_of(SamplingParams(1e3), "traversal") == kind_of(SamplingParams(1e9), "traversal"), "kinds are few"
    assert kind_of(views[0].sampling, "traversal") == kind_of(views[0].sampling, "coupled")
    assert kind_of(views[1].sampling, "traversal") != kind_of(views[1].sampling, "coupled")


def test_often_empty_trees_bring_less():
    """Half of the trees are left empty; four in five of the others have their one node accepted."""
    wished = Expansion(0, 3, 6, "beam", 12)
    menu = menu_of(wished, "coupled", wished)
    estimator, view = CountedAcceptance(menu), Text(flat(0.0), num_generated=5).view("r")
    for step in range(800):
        estimator.estimate([view])
        estimator.observe([DraftOutcome("r", wished, step % 2, 1, int(step % 2 and step % 10 != 1))])
    assert estimator.estimate([view]).tokens[0][menu.index[wished]] == pytest.approx(1.4, abs=0.15)


def test_new_sequences_know_a_useless_drafter():
    """Whatever looks best is tried, and nothing is accepted."""
    largest = Expansion(0, 3, 6, "beam", 64)
    menu = menu_of(largest, "coupled", largest)
    estimator, view = CountedAcceptance(menu), Text(flat(0.0), num_generated=5).view("r")
    for _ in range(150):
        best = menu.entries[int(np.argmax(estimator.estimate([view]).tokens))]
        estimator.observe([DraftOutcome("r", best, best.max_nodes, best.max_depth, 0)])
    assert max(estimator.estimate([Text(flat(0.0)).view("another")]).tokens[0]) < 1.5


def tokens_of_deep_trees(paths: list[int]) -> list[float]:
    """Return what a deep tree was expected to bring after each of these paths through a tree of two levels."""
    shallow, deep = Expansion(0, 4, 2, "beam", 6), Expansion(0, 4, 8, "beam", 16)
    menu = menu_of(deep, "coupled")
    estimator, view = CountedAcceptance(menu), Text(flat(0.0), num_generated=5).view("r")
    estimates = []
    for path in paths:
        estimates.append(estimator.estimate([view]).tokens[0][menu.index[deep]])
        estimator.observe([DraftOutcome("r", shallow, 6, 2, path)])
    return estimates


def test_whole_short_paths_promise_deep_ones():
    """What is seen is cut off at two; a mean of what came would not go beyond 2.5."""
    estimates = tokens_of_deep_trees([2] * 12)
    assert estimates[0] < 3.5 < estimates[6]
    assert estimates[11] > 4.0
    assert tokens_of_deep_trees([0] * 12)[11] < 1.8


FOUR_DEEP = Expansion(0, 4, 4, "beam", 8)
OF_FOUR_DEEP = menu_of(FOUR_DEEP, "coupled")


def estimate_after(estimator: CountedAcceptance, name: str, paths: list[int]) -> float:
    """Return what a tree of four levels is expected to bring a sequence after these paths through such trees."""
    view = Text(flat(0.0), num_generated=5).view(name)
    for path in paths:
        estimator.estimate([view])
        estimator.observe([DraftOutcome(name, FOUR_DEEP, 8, 4, path)])
    return estimator.estimate([view]).tokens[0][OF_FOUR_DEEP.index[FOUR_DEEP]]


@pytest.mark.parametrize(("usual", "other"), [(0, 4), (4, 0)])
def test_unseen_regime_is_still_learnt(usual, other):
    """After 5,000 trees of one regime, a sequence of the other is recognised in a few."""
    estimator = CountedAcceptance(OF_FOUR_DEEP)
    for number in range(100):
        estimate_after(estimator, f"r{number}", [usual] * 50)
    assert abs(estimate_after(estimator, "another", [other] * 5) - (1 + other)) < 1.3


def test_sequences_that_are_gone_are_forgotten():
    estimator = CountedAcceptance(MENU)
    for number in range(100):
        estimator.estimate([Text(flat(0.5), num_generated=5).view(f"r{number}")])
    assert len(estimator._own) < 20


def nodes_with(chances: tuple[float, ...], least: float) -> NodeChances:
    return NodeChances(chances, tuple(range(1, len(chances) + 1)), (), least)


def test_noise_aware_trees_teach_other_menus_nothing():
    """A request sets a noise-aware tree itself where the menu has none with a threshold."""
    estimator, view = CountedAcceptance(MENU), Text(flat(0.5)).view("r")
    before = estimator.estimate([view])
    estimator.observe([DraftOutcome("r", Expansion(0, 4, 8, "noise_aware", 8), 2, 2, 0, nodes_with((0.9, 0.8), 0.1))])
    assert estimator.estimate([view]) == before


@pytest.mark.parametrize("num_together", [1, 12])
def test_trees_observed_together_count_alike(num_together):
    """Trees of one node of .9 until the last twelve, then of two: 12 of 25 effective trees, or a little less one by one."""
    menu = menu_of(Expansion(0, 4, 8, "noise_aware", 32), "coupled")
    estimator, view = CountedAcceptance(menu), Text(flat(0.0), num_generated=5, temperature=0.0).view("r")
    outcomes = [DraftOutcome("r", menu.entries[-1], 1, 2, 0, nodes_with((0.9,) * count, 0.03)) for count in [1] * 120 + [2] * 12]
    for first in range(0, len(outcomes), num_together):
        estimator.estimate([view])
        estimator.observe(outcomes[first : first + num_together])
    assert estimator.estimate([view]).nodes[0][1] == pytest.approx(1.4, abs=0.08)


def test_tree_has_no_evidence_below_its_bound():
    menu = menu_of(Expansion(0, 4, 8, "noise_aware", 32), "coupled")
    estimator, view = CountedAcceptance(menu), Text(flat(0.0), num_generated=5, temperature=0.0).view("r")
    before = estimator.estimate([view])
    for _ in range(50):
        outcome = DraftOutcome("r", menu.entries[-1], 2, 3, 0, nodes_with((0.95, 0.8), 0.6))
        estimator.estimate([view])
        estimator.observe([outcome])
    after = estimator.estimate([view])
    at = [round(one, 2) for one in menu.least_chances].index(0.6)
    assert after.nodes[0][at] == pytest.approx(2.0, rel=0.1)
    assert after.nodes[0][-1] > after.nodes[0][at] + 1.0, "unlikelier nodes are still expected as before"
    assert before.nodes[0][at] != pytest.approx(2.0, rel=0.1)
