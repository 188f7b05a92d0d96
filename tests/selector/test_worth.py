"""What noise-aware trees bring by the least chance of a node: what they thought their nodes worth, corrected by what came."""

import random

import numpy as np
import pytest

from engine.policy import DraftOutcome, NodeChances
from engine.tree import Expansion
from selector import worth
from selector.menu import menu_of
from selector.worth import WorthOfNodes

LARGEST = Expansion(0, 4, 8, "noise_aware", 64)
ENTRIES = menu_of(LARGEST, "coupled", LARGEST).entries[1:]
LEAST = [entry.least_chance for entry in ENTRIES]
WHOLE = Expansion(0, 4, 8, "noise_aware", 64)


def outcome(
    chances: list[float], depths: list[int], accepted: list[int], num_rounds: int, expansion: Expansion = WHOLE
) -> DraftOutcome:
    nodes = NodeChances(tuple(chances), tuple(depths), tuple(accepted), expansion.least_chance)
    return DraftOutcome("r", expansion, len(chances), num_rounds, len(accepted), nodes)


def taught(outcomes: list[DraftOutcome], together: int = 5) -> WorthOfNodes:
    """Return what knows these trees of one sequence, told some at a time."""
    found = WorthOfNodes(ENTRIES, 2)
    for first in range(0, len(outcomes), together):
        some = outcomes[first : first + together]
        found.observe(some, [0] * len(some), ["k"] * len(some))
    return found


def trees_of(odds: tuple[float, ...], num_trees: int, chance_of: float = 1.0, expansion: Expansion = WHOLE) -> list[DraftOutcome]:
    """Return chains whose tokens have chances of `odds`, of which `chance_of` come true, as far as the expansion admits them."""
    seed, found = random.Random(0), []
    for _ in range(num_trees):
        chances, alive, num_accepted, is_alive = list[float](), 1.0, 0, True
        for _ in range(8):
            own = seed.choice(odds)
            if alive * own < max(expansion.least_chance, 1e-9):
                break
            alive *= own
            chances.append(alive)
            is_alive = is_alive and seed.random() < own * chance_of
            num_accepted += is_alive
        depths = [*range(1, len(chances) + 1)]
        found.append(outcome(chances, depths, [*range(num_accepted)], min(8, len(chances) + 1), expansion))
    return found


def test_one_tree_says_what_every_dearer_one_would_have_been():
    """Nodes .9, .6 and .2 below one another, .08 beside the first, after two levels that were fed; always the same."""
    tree = outcome([0.9, 0.6, 0.2, 0.08], [1, 2, 3, 1], [0], 4)
    tokens, nodes, passes, fed = (found[0] for found in taught([tree] * 2000).expect([0], ["k"]))
    for place, least in enumerate(LEAST):
        kept = [(chance, depth) for chance, depth in [(0.9, 1), (0.6, 2), (0.2, 3), (0.08, 1)] if chance >= least]
        assert nodes[place] == pytest.approx(len(kept), abs=0.02)
        assert fed[place] == pytest.approx(len(kept), abs=0.02)
        assert passes[place] == pytest.approx(1 + max((depth for _, depth in kept), default=0), abs=0.02)
    assert tokens[0] == pytest.approx(1.9, abs=0.2)  # it always comes
    assert tokens[-1] == pytest.approx(2.0, abs=0.3)  # and nothing else does


def test_nodes_of_the_last_level_are_not_fed_and_take_no_round():
    tree = outcome([0.9, 0.6], [1, 2], [], 2)
    _, nodes, passes, fed = (found[0] for found in taught([tree] * 2000).expect([0], ["k"]))
    assert (nodes[-1], passes[-1], fed[-1]) == pytest.approx((2.0, 2.0, 1.0), abs=0.02)


@pytest.mark.parametrize("chance_of", [1.0, 0.6])
def test_what_is_expected_comes(chance_of):
    """Whether chances are what they say or too great, by every least chance that a tree might have had."""
    trees = trees_of((0.95, 0.6, 0.2), 3000, chance_of)
    tokens = taught(trees).expect([0], ["k"])[0][0]
    for place, least in enumerate(LEAST):
        grown = [tree.nodes for tree in trees if tree.nodes is not None]
        kept = [sum(nodes.chances[node] >= least for node in nodes.accepted) for nodes in grown]
        assert tokens[place] == pytest.approx(1.0 + np.mean(kept[-500:]), rel=0.2), least


def uncorrected(monkeypatch) -> None:
    monkeypatch.setattr(worth, "CAME_TOKENS", 1e9)


@pytest.mark.parametrize("mutate", [uncorrected])
def test_chances_that_are_too_great_kill_who_believes_them(mutate, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        test_what_is_expected_comes(0.6)


def untold(expansion: Expansion, chances: list[float], seat: int = 1, depth: int = 1) -> list[bool]:
    """Return of which least chances such trees of the sequence at 0 taught that sequence nothing, or at 1 its kind."""
    tree = outcome(chances, [depth] * len(chances), [], depth + 1, expansion)
    found = taught([tree] * 50)
    trees_K = found._kind_trees[found._kind("k")] if seat else found._trees[0]
    return [count == 0.0 for count in trees_K[1:].tolist()]


TOLD_TO = LEAST.index(0.48)
REST = [True] * (len(LEAST) - 1 - TOLD_TO)


@pytest.mark.parametrize("seat", [0, 1])
def test_a_tree_says_nothing_of_nodes_cheaper_than_it_was_allowed(seat):
    dear = Expansion(0, 4, 8, "noise_aware", 8, least_chance=0.48)
    assert untold(dear, [0.9], seat)[TOLD_TO:] == REST
    assert not all(untold(dear, [0.9], seat)[:TOLD_TO])
    assert not all(untold(WHOLE, [0.9], seat)[TOLD_TO:])


def test_a_full_tree_tells_its_kind_nothing_of_nodes_cheaper_than_its_own():
    full = Expansion(0, 4, 8, "noise_aware", 2)
    assert untold(full, [0.9, 0.5])[TOLD_TO:] == REST
    assert not all(untold(full, [0.9])[TOLD_TO:])


def test_a_tree_cut_in_depth_tells_its_kind_nothing_of_what_could_lie_below_its_last_level():
    shallow = Expansion(0, 4, 2, "noise_aware", 64)
    assert untold(shallow, [0.5], depth=2)[TOLD_TO:] == REST
    assert not all(untold(shallow, [0.5], depth=1)[TOLD_TO:])
    assert not all(untold(WHOLE, [0.5], depth=2)[TOLD_TO:])


def test_a_bounded_sequence_knows_what_it_may_have():
    """One node of .95 always comes: its bound does not change."""
    single = outcome([0.95], [1], [0], 1, Expansion(0, 4, 8, "noise_aware", 1))
    found = taught([single] * 200)
    tokens, nodes = (one[0] for one in found.expect([0], ["k"])[:2])
    assert tokens[0] == pytest.approx(1.95, abs=0.15)
    assert nodes[-1] < 0.7 * found.expect([1], ["k"])[1][0, -1]
    assert found.expect([1], ["k"])[1][0, -1] > 3.0


def test_a_new_sequence_is_expected_to_be_as_its_kind_is():
    found = taught(trees_of((0.95,), 300))
    tokens = [found.expect([seat], [kind])[0][0, -1] for seat, kind in ((0, "k"), (1, "k"), (1, "another"))]
    assert tokens[0] == pytest.approx(tokens[1], rel=0.15)
    assert tokens[1] > 1.5 * tokens[2]
    found.clear(0)
    assert found.expect([0], ["k"])[0][0, -1] == pytest.approx(tokens[1])


def test_a_sequence_is_told_from_its_kind_in_some_trees():
    found = taught(trees_of((0.95,), 300))
    found.observe(trees_of((0.05,), 12), [1] * 12, ["k"] * 12)
    tokens = found.expect([0, 1], ["k", "k"])[0][:, -1]
    assert tokens[1] < 0.5 * tokens[0]


def test_the_order_of_trees_that_are_told_together_does_not_matter():
    trees = trees_of((0.9, 0.3), 40)
    one, other = taught(trees, 40), taught(trees[::-1], 40)
    for mine, others in zip(one.expect([0], ["k"]), other.expect([0], ["k"]), strict=True):
        assert mine == pytest.approx(others, rel=1e-9)


def test_before_anything_has_grown_nodes_of_half_the_chance_are_twice_as_many():
    tokens, nodes, passes, fed = (found[0] for found in WorthOfNodes(ENTRIES, 1).expect([0], ["k"]))
    brought, grown = tokens - 1.0, nodes
    above, between, below = LEAST.index(0.48), LEAST.index(0.12), LEAST.index(0.03)
    assert brought[between] - brought[above] == pytest.approx(brought[below] - brought[between])  # of each quarter of the chance
    assert 4 * (grown[between] - grown[above]) == pytest.approx(grown[below] - grown[between])
    assert 2.0 < tokens[between] < 3.0
    assert passes[0] < 1.2 < 3.0 < passes[between] <= passes[-1] <= 8.0
    assert fed == pytest.approx(nodes)


def test_at_the_start_no_more_is_expected_than_there_is_room_for():
    small = menu_of(Expansion(0, 4, 2, "noise_aware", 3), "coupled", Expansion(0, 4, 2, "noise_aware", 3)).entries[1:]
    tokens, nodes, passes, _ = (found[0] for found in WorthOfNodes(small, 1).expect([0], ["k"]))
    assert tokens.max() <= 3.0
    assert nodes.max() <= 3.0
    assert passes.max() <= 2.0


def test_of_nodes_that_no_tree_tells_of_there_are_as_many_as_of_those_that_trees_tell_of():
    """Twice as many nodes as at the start, down to .3: twice as many below."""
    told = LEAST.index(0.3) + 1
    told_K = np.where(np.arange(len(LEAST)) < told, 200.0, 0.0)
    found = WorthOfNodes(ENTRIES, 1)
    kind, start_FK = found._kind("k"), found._start_FK
    found._kind_sums[kind], found._kind_trees[kind] = 2 * start_FK * told_K, told_K
    found._kind_begun[kind] *= worth.KIND_MEMORY**told_K
    assert found._means(kind)[:, told:] == pytest.approx(2 * start_FK[:, told:], rel=0.05)


def untold_as_at_the_start(monkeypatch) -> None:
    monkeypatch.setattr(WorthOfNodes, "_means", lambda self, kind: self._start_FK)


def test_who_leaves_the_rest_as_it_was_is_noticed(monkeypatch):
    untold_as_at_the_start(monkeypatch)
    with pytest.raises(AssertionError):
        test_of_nodes_that_no_tree_tells_of_there_are_as_many_as_of_those_that_trees_tell_of()


def test_least_chances_come_greatest_first():
    with pytest.raises(ValueError, match="greatest"):
        WorthOfNodes(ENTRIES[::-1], 1)
