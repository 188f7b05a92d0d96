"""Menus: plain decoding first, then ever deeper trees of one family that the verifier is exact on, none beyond the largest."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.tree import PLAIN, Expansion, parse_expansion
from engine.core.types import Speculation
from engine.core.verifier_table import VERIFIER_NAMES, is_exact
from selector.menu import Menu, fed_share, menu_for_all, menu_of
from tests.selector.machine import Text, flat
from tests.strategies import any_expansions

SHAPES = any_expansions(max_nodes=24).filter(lambda one: not one.is_plain)


@given(SHAPES, st.sampled_from(VERIFIER_NAMES))
def test_entries_are_exact_and_by_depth(expansion, verifier):
    menu = menu_of(expansion, verifier)
    assert menu.entries[0] == PLAIN
    assert len(set(menu.entries)) == len(menu)
    assert list(menu.depths) == sorted(menu.depths)
    if is_exact(expansion.kind, verifier):
        assert all(is_exact(one.kind, verifier) for one in menu.entries[1:])


@given(SHAPES)
def test_nothing_is_larger_than_the_largest(largest):
    menu = menu_of(largest, "coupled", largest)
    for entry in menu.entries:
        assert entry.max_depth <= largest.max_depth
        assert entry.num_draft_tokens <= max(largest.num_draft_tokens, largest.max_depth)


@pytest.mark.parametrize(
    ("expansion", "verifier", "trees"),
    [
        ("4.1.0", "traversal", {"delayed", "delayed_distinct"}),  # chains are delayed trees; branches start differently
        ("4.1.0", "specinfer", {"delayed"}),
        ("2.2.2", "traversal", {"delayed"}),
        ("4.1.0", "univer", {"delayed"}),  # exact on chains, and on no tree that branches by draws
        ("heap.16", "traversal", {"delayed", "heap"}),  # plain decoding is a delayed tree
    ],
)
def test_the_family_is_the_configured_one(expansion, verifier, trees):
    menu = menu_of(parse_expansion(expansion), verifier)
    assert {entry.tree for entry in menu.entries} == trees


def test_default_menu_is_the_paper_s():
    menu = menu_of(Expansion(4, 1, 0), "traversal")
    chains = [entry for entry in menu.entries if entry.branches == 1]
    assert [entry.max_depth for entry in chains] == list(range(9))
    assert {entry.branches for entry in menu.entries} == {1, 2, 3, 4}
    assert 50 < len(menu) < 128


def test_noise_aware_entries_vary_by_threshold():
    largest = Expansion(0, 2, 8, "noise_aware", 20)
    entries = menu_of(largest, "coupled", largest).entries[1:]
    assert {replace(entry, max_nodes=20, least_chance=0.0) for entry in entries} == {largest}
    chances, sizes = [entry.least_chance for entry in entries], [entry.max_nodes for entry in entries]
    assert chances == sorted(chances, reverse=True)
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (8, 20)
    assert all(size == 20 or size * chance >= 1.0 for size, chance in zip(sizes, chances, strict=True))


@pytest.mark.parametrize(
    ("tree", "room"), [("noise_aware.16", (1, 1)), ("heap.16", (16, 8)), ("4.1.0", (4, 4)), ("0.1.0", (0, 0))]
)
def test_noise_aware_trees_fit_any_room(tree, room):
    menu = menu_of(parse_expansion(tree), "traversal") if tree == "4.1.0" else menu_of(parse_expansion(tree), "coupled")
    place = max(range(len(menu)), key=lambda one: (str(menu.entries[one]) == tree, menu.num_nodes[one] == 16, menu.depths[one]))
    assert menu.least_room[place if tree != "0.1.0" else 0] == room


def test_own_shaped_trees_come_in_sizes():
    largest = Expansion(0, 2, 8, "beam", 64)
    entries = menu_of(largest, "coupled").entries[1:]
    assert {entry.depth for entry in entries} == {1, 2, 3, 4, 6, 8}
    assert {entry.max_nodes for entry in entries if entry.depth == 3} == {3, 4, 6, 8, 12, 14}  # 2 + 4 + 8 nodes fit
    assert largest in entries


@pytest.mark.parametrize("largest", [None, Expansion(2, 2, 2), Expansion(3, 1, 0)])
def test_rows_that_rank_have_noise_aware_trees(largest):
    family = menu_of(Expansion(4, 1, 0), "traversal", largest)
    added = set(menu_for_all(Expansion(4, 1, 0), "traversal", largest).entries) - set(family.entries)
    assert {entry.tree for entry in added} == {"noise_aware"}
    assert max(entry.max_depth for entry in added) <= family.deepest
    assert max(entry.num_draft_tokens for entry in added) == (64 if largest is None else largest.num_draft_tokens)


def test_other_rows_have_chains():
    family = menu_of(parse_expansion("noise_aware.8"), "coupled")
    added = set(menu_for_all(parse_expansion("noise_aware.8"), "coupled").entries) - set(family.entries)
    assert added == {Expansion(length, 1, 0) for length in range(1, 9)}


def test_plain_largest_leaves_plain_decoding():
    assert menu_for_all(Expansion(4, 1, 0), "traversal", PLAIN).entries == (PLAIN,)


@pytest.mark.parametrize(("tree", "num_fed"), [("0.1.0", 0), ("4.1.0", 3), ("2.2.3", 6), ("0.4.1", 0), ("heap.16", 14)])
def test_all_but_the_last_level_is_fed(tree, num_fed):
    expansion = parse_expansion(tree)
    assert fed_share(expansion) * expansion.num_draft_tokens == pytest.approx(num_fed)


@pytest.mark.parametrize("entries", [(), (Expansion(1, 1, 0),), (PLAIN, PLAIN), (PLAIN, Expansion(2, 1, 0), Expansion(1, 1, 0))])
def test_invalid_menus_are_refused(entries):
    with pytest.raises(ValueError, match="menu"):
        Menu(entries)


ALL = menu_for_all(Expansion(4, 1, 0), "traversal")


def allowed(*texts: Text) -> list[set[Expansion]]:
    """Return what each of some sequences may have."""
    menu, allowed_BM = ALL.allowed_for([text.view(str(row)) for row, text in enumerate(texts)])
    if allowed_BM is None:
        return [set(menu.entries)] * len(texts)
    return [{entry for entry, is_open in zip(menu.entries, row, strict=True) if is_open} for row in allowed_BM]


RANKS, DRAWS = Text(flat(0.5), temperature=0.0), Text(flat(0.5))


def test_alike_rows_have_all_of_theirs():
    assert ALL.allowed_for([DRAWS.view("0"), DRAWS.view("1")])[1] is None
    assert {entry.is_delayed for entry in allowed(DRAWS)[0]} == {True}
    assert {entry.tree for entry in allowed(RANKS)[0] if not entry.is_plain} == {"noise_aware"}


def test_rows_have_the_same_beside_others():
    assert allowed(RANKS, DRAWS) == [*allowed(RANKS), *allowed(DRAWS)]


@pytest.mark.parametrize("text", [RANKS, DRAWS], ids=["ranks", "draws"])
@pytest.mark.parametrize("change", [{"speculation": Speculation(max_nodes=0)}, {"num_prompt": 5}, {"max_tokens": 1}], ids=str)
def test_rows_without_room_have_plain_decoding(text, change):
    assert allowed(replace(text, **change), text) == [{PLAIN}, *allowed(text)]


@given(st.integers(0, 70), st.integers(1, 12))
def test_trees_chosen_whole_fit_their_bounds(most_nodes, num_remaining):
    bounded = replace(DRAWS, speculation=Speculation(max_nodes=most_nodes), max_tokens=num_remaining)
    fits = {one for one in allowed(DRAWS)[0] if one.num_draft_tokens <= most_nodes and one.max_depth < num_remaining}
    assert allowed(bounded)[0] == fits
