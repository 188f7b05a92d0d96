"""Hypothesis strategies that several test modules share: expansions, token trees, sampling parameters."""

from dataclasses import replace

from hypothesis import strategies as st

from engine.core.tree import DELAYED_TREES, FREE_GROWTH, TREE_NAMES, Expansion, GrowthCosts, TokenTree
from engine.core.types import SamplingParams

VOCAB_SIZE = 61  # of the tiny models in engine.testing


def expansions(max_trunk: int = 4, max_branches: int = 4, max_depth: int = 4) -> st.SearchStrategy[Expansion]:
    """Every shape up to the given sizes, plain decoding and its odd spellings (branches without depth) included."""
    return st.builds(Expansion, st.integers(0, max_trunk), st.integers(1, max_branches), st.integers(0, max_depth))


def any_expansions(max_nodes: int = 8, max_branches: int = 3, max_depth: int = 4) -> st.SearchStrategy[Expansion]:
    """Delayed shapes and trees of every other name."""
    delayed = st.builds(
        Expansion, st.integers(0, 4), st.integers(1, max_branches), st.integers(0, max_depth), st.sampled_from(DELAYED_TREES)
    )
    names = st.sampled_from([name for name in TREE_NAMES if name not in DELAYED_TREES])
    sized = st.builds(
        Expansion, st.just(0), st.integers(1, max_branches), st.integers(1, max_depth), names, st.integers(1, max_nodes)
    )
    least = st.sampled_from([0.0, 0.05, 0.3, 0.9])
    noise_aware = st.builds(
        Expansion,
        *(st.just(0), st.integers(1, max_branches), st.integers(1, max_depth)),
        *(st.just("noise_aware"), st.integers(1, max_nodes)),
    )
    by_chance = st.builds(replace, noise_aware, least_chance=least)
    return delayed | sized | by_chance


def growth_costs() -> st.SearchStrategy[GrowthCosts]:
    """None, and any that omit part of a tree, or all but its first level. A node's cost may depend on the tree's size."""
    nodes = st.lists(st.floats(0.0, 1.0), max_size=6).map(lambda costs: tuple(sorted(costs)))
    return st.just(FREE_GROWTH) | st.builds(GrowthCosts, st.floats(0.0, 1.0), st.floats(0.0, 2.0), nodes)


@st.composite
def token_trees(draw: st.DrawFn, max_nodes: int = 12, vocab_size: int = VOCAB_SIZE, root_id: int | None = None) -> TokenTree:
    """Any tree: parents that precede, children drawn in any order and any number of times, tokens unlike their siblings'."""
    parents = [-1]
    for node in range(1, draw(st.integers(1, max_nodes))):
        parents.append(draw(st.integers(0, node - 1)))
    token_ids = [draw(st.integers(0, vocab_size - 1)) if root_id is None else root_id]
    taken: dict[int, set[int]] = {}
    for parent in parents[1:]:
        siblings = taken.setdefault(parent, set())
        token_id = draw(st.integers(0, vocab_size - 1))
        while token_id in siblings:
            token_id = (token_id + 1) % vocab_size
        siblings.add(token_id)
        token_ids.append(token_id)
    children = [[child for child, parent in enumerate(parents) if parent == node] for node in range(len(parents))]
    draws = [_draws(draw, kids) for kids in children]
    return TokenTree(tuple(parents), tuple(token_ids), tuple(draws))


def _draws(draw: st.DrawFn, children: list[int]) -> tuple[int, ...]:
    if not children:
        return ()
    again = draw(st.lists(st.sampled_from(children), max_size=2))
    return tuple(draw(st.permutations([*children, *again])))


def sampling_params(max_tokens: int = 12, vocab_size: int = VOCAB_SIZE) -> st.SearchStrategy[SamplingParams]:
    """Temperatures above 0 with every mixture of truncations, each off half the time."""
    return st.builds(
        SamplingParams,
        temperature=st.floats(0.25, 2.0),
        top_p=st.just(1.0) | st.floats(0.05, 0.99),
        top_k=st.just(0) | st.integers(1, vocab_size + 5),
        min_p=st.just(0.0) | st.floats(0.01, 0.9),
        max_tokens=st.integers(1, max_tokens),
    )
