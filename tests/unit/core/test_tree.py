"""Shape properties of expansions and token trees."""

from dataclasses import replace
from functools import cached_property

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.tree import FREE_GROWTH, PLAIN, ROOT, Expansion, GrowthCosts, TokenTree, parse_expansion
from tests.strategies import any_expansions, expansions, token_trees

# root - 1 -+- 2 - 5        node 4 was drawn first and twice
#           +- 4
#      - 3
BUSHY = ((-1, 0, 1, 0, 1, 2), (7, 8, 9, 9, 7, 7), ((1, 3), (4, 2, 4), (5,), (), (), ()))


def check_depths(tree: TokenTree) -> None:
    assert [len(tree.path(node)) - 1 for node in range(tree.num_nodes)] == list(tree.depths)


def check_paths(tree: TokenTree) -> None:
    for node in range(tree.num_nodes):
        path = tree.path(node)
        assert path[0] == ROOT
        assert path[-1] == node
        assert [tree.parents[child] for child in path[1:]] == list(path[:-1])


def check_mask(tree: TokenTree) -> None:
    for node in range(tree.num_nodes):
        assert set(np.flatnonzero(tree.ancestors_NN[node])) == set(tree.path(node))


def check_children(tree: TokenTree) -> None:
    for node, children in enumerate(tree.children):
        assert len(children) == len(set(children))
        assert all(tree.parents[child] == node for child in children)
        assert sorted(children, key=tree.draws[node].index) == list(children)
    assert sum(map(len, tree.children)) == tree.num_nodes - 1


def check_post_order(tree: TokenTree) -> None:
    rank = {node: i for i, node in enumerate(tree.post_order)}
    assert sorted(rank) == list(range(tree.num_nodes))
    assert all(rank[node] < rank[parent] for node, parent in enumerate(tree.parents) if node != ROOT)
    for children in tree.children:
        assert [rank[child] for child in children] == sorted(rank[child] for child in children)


CHECKS = (check_depths, check_paths, check_mask, check_children, check_post_order)


@given(token_trees(max_nodes=20))
def test_shape_distributions(tree):
    for check in CHECKS:
        check(tree)


@given(token_trees(max_nodes=20))
def test_node_index_is_at_least_depth(tree):
    """Compaction moves entries left only: on any path the node at depth d has index >= d."""
    assert all(node >= depth for node, depth in enumerate(tree.depths))


class DepthsTwoTooDeep(TokenTree, frozen=True):
    @cached_property
    def depths(self):
        return (0, *(depth + 2 for depth in super().depths[1:]))


class SeesItselfOnly(TokenTree, frozen=True):
    @cached_property
    def ancestors_NN(self):
        return np.eye(self.num_nodes, dtype=np.bool_)


class SeesAllBefore(TokenTree, frozen=True):
    @cached_property
    def ancestors_NN(self):
        return np.tri(self.num_nodes, dtype=np.bool_)


class PathWithoutRoot(TokenTree, frozen=True):
    def path(self, node):
        return super().path(node)[1:] or (node,)


class ChildrenAsOftenAsDrawn(TokenTree, frozen=True):
    @cached_property
    def children(self):
        return self.draws


class ChildrenByIndex(TokenTree, frozen=True):
    @cached_property
    def children(self):
        return tuple(tuple(sorted(set(drawn))) for drawn in self.draws)


class PreOrder(TokenTree, frozen=True):
    @cached_property
    def post_order(self):
        return tuple(range(self.num_nodes))


class SiblingsBackwards(TokenTree, frozen=True):
    @cached_property
    def post_order(self):
        return (3, *(node for node in super().post_order if node != 3))


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (DepthsTwoTooDeep, check_depths),
        (SeesItselfOnly, check_mask),
        (SeesAllBefore, check_mask),
        (PathWithoutRoot, check_paths),
        (ChildrenAsOftenAsDrawn, check_children),
        (ChildrenByIndex, check_children),
        (PreOrder, check_post_order),
        (SiblingsBackwards, check_post_order),
    ],
)
def test_shape_distributions_kill(mutant, check):
    check(TokenTree(*BUSHY))
    with pytest.raises(AssertionError):
        check(mutant(*BUSHY))


@pytest.mark.parametrize(
    ("parents", "draws"),
    [
        ((), ()),
        ((0,), ((),)),
        ((-1, 2, 0), ((2,), (), (1,))),
        ((-1, 1), ((), (1,))),
        ((-1, 0), ((), ())),
        ((-1, 0), ((1,), (1,))),
        ((-1, -1), ((), ())),
        ((-1, 0), ((1,),)),
        ((-1, 0, 0), ((1, 2), (), ())),  # twins: every node carries the same token
    ],
)
def test_malformed_trees_are_refused(parents, draws):
    with pytest.raises(ValueError, match="must"):
        TokenTree(parents, (5,) * len(parents), draws)


def test_single_is_a_root_alone():
    tree = TokenTree.single(9)
    assert (tree.num_nodes, tree.depths, tree.post_order, tree.token_ids) == (1, (0,), (0,), (9,))
    assert PLAIN.is_plain


@given(expansions())
def test_widths_add_up_to_the_drafted_tokens(expansion):
    widths = [expansion.width_at(depth) for depth in range(1, expansion.max_depth + 3)]
    assert sum(widths) == expansion.num_draft_tokens
    assert all(widths[: expansion.max_depth])
    assert not any(widths[expansion.max_depth :])
    assert expansion.width_at(0) == 1
    assert expansion.is_plain == (expansion.num_draft_tokens == 0)


def check_limited(limited, expansion: Expansion, max_depth: int, max_tokens: int) -> None:
    """Both limits are kept, nothing grows, and what could be kept is: the trunk, then depth, then branches."""
    result = limited(expansion, max_depth, max_tokens)
    assert result.max_depth <= max_depth
    assert result.num_draft_tokens <= max_tokens
    assert result.branches <= expansion.branches
    assert result.trunk == min(expansion.trunk, max_depth, max_tokens)
    assert result.depth == min(expansion.depth, max_depth - result.trunk, max_tokens - result.trunk)
    if result.depth and result.branches < expansion.branches:
        assert result.num_draft_tokens + result.depth > max_tokens


@given(expansions(6, 6, 6), st.integers(0, 14), st.integers(0, 40))
def test_limited_tree_is_largest_within_limits(expansion, max_depth, max_tokens):
    check_limited(Expansion.limited, expansion, max_depth, max_tokens)


@given(expansions(6, 6, 6))
def test_limits_that_do_not_bind_change_nothing(expansion):
    result = expansion.limited(expansion.max_depth, expansion.num_draft_tokens)
    assert result.num_draft_tokens == expansion.num_draft_tokens
    assert expansion.depth == 0 or result == expansion


@pytest.mark.parametrize(
    ("mutant", "arguments"),
    [
        (lambda e, _, max_tokens: e.limited(99, max_tokens), (Expansion(2, 2, 3), 4, 99)),
        (lambda e, max_depth, _: e.limited(max_depth, 99), (Expansion(2, 2, 3), 99, 6)),
        (lambda e, max_depth, max_tokens: e.limited(max_depth, max_tokens + 1), (Expansion(2, 3, 3), 9, 10)),
        (lambda e, max_depth, max_tokens: PLAIN, (Expansion(2, 3, 3), 9, 10)),
        (lambda e, d, n: Expansion(e.trunk, 1, e.depth).limited(d, n), (Expansion(1, 3, 2), 9, 9)),
        (lambda e, d, n: Expansion(0, e.branches, e.depth).limited(d, n), (Expansion(1, 3, 2), 9, 9)),
    ],
)
def test_limited_kills(mutant, arguments):
    check_limited(Expansion.limited, *arguments)
    with pytest.raises(AssertionError):
        check_limited(mutant, *arguments)


@pytest.mark.parametrize("fields", [(-1, 1, 0), (0, 0, 1), (0, 1, -1)])
def test_impossible_expansions_are_refused(fields):
    with pytest.raises(ValueError, match="expansion needs"):
        Expansion(*fields)


def test_an_expansion_is_written_with_dots():
    assert str(Expansion(2, 3, 4)) == "2.3.4"


@given(any_expansions(40, 6, 12))
def test_expansion_survives_text_round_trip(expansion):
    assert parse_expansion(str(expansion)) == expansion


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("noise_aware.16.8.4@0.2", Expansion(0, 4, 8, "noise_aware", 16, 0.2)),
        ("noise_aware.6@0.05", Expansion(0, 4, 8, "noise_aware", 6, 0.05)),
        ("noise_aware.6.2.1@0.000001", Expansion(0, 1, 2, "noise_aware", 6, 1e-6)),
    ],
)
def test_acceptance_threshold_follows_tree_in_text(text, read):
    assert parse_expansion(text) == read == parse_expansion(str(read))


WRONGLY_WRITTEN = ["noise_aware.8@", "noise_aware.8@1.0", "noise_aware.8@-0.1", "noise_aware.8@.2", "beam.8@0.2", "4.1.0@0.2"]


@pytest.mark.parametrize("text", [*WRONGLY_WRITTEN, "noise_aware.8@0.2@0.3", "noise_aware@0.2"])
def test_invalid_acceptance_threshold_is_refused(text):
    with pytest.raises(ValueError, match=r"an expansion is written|least chance"):
        parse_expansion(text)


NO_LEAST_CHANCES = [*(("noise_aware", least) for least in (1.0, 1e-7, -0.1, float("nan"))), ("beam", 0.2)]


@pytest.mark.parametrize(("tree", "least"), NO_LEAST_CHANCES)
def test_threshold_requires_known_chances(tree, least):
    with pytest.raises(ValueError, match="chance"):
        Expansion(0, 4, 8, tree, 16, least)


@given(any_expansions(40, 6, 12), st.integers(0, 14), st.integers(0, 50))
def test_limited_expansion_keeps_tree_and_threshold(expansion, max_depth, max_nodes):
    limited = expansion.limited(max_depth, max_nodes)
    assert limited.max_depth <= min(max_depth, expansion.max_depth)
    assert limited.num_draft_tokens <= min(max_nodes, expansion.num_draft_tokens)
    assert limited.is_plain or (limited.tree, limited.least_chance) == (expansion.tree, expansion.least_chance)
    assert limited.is_plain == (not max_depth or not max_nodes or expansion.is_plain)
    whole = expansion.limited(expansion.max_depth, expansion.num_draft_tokens)
    assert whole.num_draft_tokens == expansion.num_draft_tokens
    assert whole is whole.limited(expansion.max_depth, expansion.num_draft_tokens)


def test_limited_branches_without_depth_are_dropped():
    assert Expansion(4, 3, 0).limited(9, 9) == Expansion(4, 1, 0)
    assert Expansion(0, 3, 0).limited(9, 9) == PLAIN


@pytest.mark.parametrize(
    "wrong", [(1, 2, 3, "heap", 4), (0, 2, 0, "heap", 4), (0, 2, 3, "heap", 0), (2, 2, 3, "delayed", 9), (0, 1, 1, "oak", 3)]
)
def test_invalid_trees_are_refused(wrong):
    with pytest.raises(ValueError, match="tree"):
        Expansion(*wrong)


def test_node_costs_must_ascend():
    with pytest.raises(ValueError, match="ascending"):
        GrowthCosts(nodes=(0.2, 0.1))


def test_thresholds_follow_node_costs():
    tree = parse_expansion("noise_aware.3@0.2")
    assert GrowthCosts(node=0.4).least_chances(tree) == (0.2,) * 3
    assert GrowthCosts(node=0.4).least_chances(replace(tree, least_chance=0.0)) == (0.4,) * 3
    assert GrowthCosts(nodes=(0.1, 0.3)).least_chances(tree) == (0.1, 0.3, 0.3)
    assert GrowthCosts(nodes=(0.1, 0.2, 0.3, 0.4)).least_chances(tree) == (0.1, 0.2, 0.3)


TREE = Expansion(0, 4, 4, "noise_aware", 12)
COMPLETE_ABOVE = [  # what nodes a tree has, its expansion, its growth costs, and down to which chance it has all that there were
    ((0.9, 0.4), replace(TREE, least_chance=0.3), FREE_GROWTH, 0.3),
    ((0.9, 0.4), replace(TREE, least_chance=0.3), GrowthCosts(nodes=(0.0, 0.01, 0.05, 0.2)), 0.05),
    ((0.9, 0.4, 0.1), replace(TREE, least_chance=0.3, max_nodes=3), GrowthCosts(nodes=(0.0, 0.01, 0.05)), 0.1),  # it is full
    ((0.9, 0.4, 0.4), replace(TREE, least_chance=0.3, max_nodes=3), FREE_GROWTH, 0.3),
    ((), replace(TREE, least_chance=0.3), GrowthCosts(nodes=(0.07,)), 0.07),
]


@pytest.mark.parametrize(("chances", "expansion", "growth_costs", "least"), COMPLETE_ABOVE)
def test_complete_above_finds_the_lowest_chance(chances, expansion, growth_costs, least):
    assert growth_costs.complete_above(expansion, chances) == least
