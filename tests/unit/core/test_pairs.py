"""The table of exact pairs: refusals, and what is paired with a name that comes alone."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engine.core.tree import PLAIN, TREE_NAMES, Expansion, TreeKind, TreeName
from engine.core.verifier_table import (
    VERIFIER_NAMES,
    InexactPairError,
    UnknownVerifierError,
    default_tree,
    fitted,
    is_exact,
    require_exact,
    verifier_for,
)

DELAYED = Expansion(2, 2, 3)


def sized(tree: TreeName, num_nodes: int = 12) -> Expansion:
    """Return a branching tree of that name."""
    return Expansion(2, 2, 5, tree) if tree.startswith("delayed") else Expansion(0, 3, 6, tree, num_nodes)


@pytest.mark.parametrize("tree", ["delayed_distinct", "static", "heap", "threshold", "greedy_sample", "beam", "noise_aware"])
def test_inexact_pair_is_refused_with_both_names(tree: TreeName) -> None:
    with pytest.raises(InexactPairError, match=f"'specinfer'.*'{tree}'.*coupled are"):
        require_exact(sized(tree), "specinfer")


@pytest.mark.parametrize("verifier", VERIFIER_NAMES)
def test_a_chain_suits_everyone(verifier: str) -> None:
    require_exact(Expansion(4, 1, 0), verifier)


def test_set_rules_are_refused_iid_branches() -> None:
    for verifier in ("hu", "univer"):
        with pytest.raises(InexactPairError, match=f"'{verifier}'.*'delayed'.*traversal.*coupled are"):
            require_exact(DELAYED, verifier)


@pytest.mark.parametrize("verifier", ["hu", "univer"])
def test_set_rules_suit_fixed_widths(verifier: str) -> None:
    """They were refused `delayed_distinct` and `static`, on which they are exact; trees by value stay refused."""
    suited = {tree for tree in TREE_NAMES if is_exact(sized(tree).kind, verifier)}
    assert suited == {"delayed_distinct", "static", "greedy_sample"}


def test_shared_noise_trees_need_coupled_verifier() -> None:
    assert [name for name in VERIFIER_NAMES if is_exact(TreeKind.SHARED_NOISE, name)] == ["coupled"]


@pytest.mark.parametrize("verifier", VERIFIER_NAMES)
def test_verifier_alone_gets_an_exact_tree(verifier: str) -> None:
    require_exact(sized(default_tree(verifier)), verifier)


@pytest.mark.parametrize("tree", TREE_NAMES)
@pytest.mark.parametrize("preferred", VERIFIER_NAMES)
def test_tree_alone_gets_an_exact_verifier(tree: TreeName, preferred: str) -> None:
    require_exact(sized(tree), verifier_for(sized(tree), preferred))
    if is_exact(sized(tree).kind, preferred):
        assert verifier_for(sized(tree), preferred) == preferred


EXPANSIONS = st.one_of(
    st.builds(
        Expansion, st.integers(0, 6), st.integers(1, 4), st.integers(0, 6), st.sampled_from(["delayed", "delayed_distinct"])
    ),
    st.builds(Expansion, st.just(0), st.integers(1, 4), st.integers(1, 9), st.sampled_from(TREE_NAMES[2:]), st.integers(1, 40)),
)


def fits(fit, *phases: Phase) -> None:
    @settings(phases=phases)
    @given(EXPANSIONS, st.sampled_from(VERIFIER_NAMES))
    def check(expansion: Expansion, verifier: str) -> None:
        fitting = fit(expansion, verifier)
        require_exact(fitting, verifier)
        assert fitting.num_draft_tokens <= expansion.num_draft_tokens
        assert fitting.max_depth <= expansion.max_depth
        assert fitting.is_plain == expansion.is_plain
        if expansion.num_draft_tokens <= 16 * max(1, expansion.max_depth):
            assert fitting.num_draft_tokens >= 2 / 3 * min(expansion.num_draft_tokens, 2 * expansion.max_depth)
        if not is_exact(expansion.kind, verifier) and expansion.num_draft_tokens >= 3 and expansion.max_depth > 1:
            assert fitting.branches > 1
        if is_exact(expansion.kind, verifier):
            assert fitting == expansion

    check()


def test_fitted_tree_is_exact_and_not_larger() -> None:
    fits(fitted, Phase.generate, Phase.shrink)


@pytest.mark.parametrize(
    "mutant",
    [
        lambda expansion, _: expansion,
        lambda expansion, _: PLAIN,
        lambda expansion, _: Expansion(4, 1, 0),
        lambda expansion, verifier: fitted(expansion, verifier).limited(1, 40),
    ],
)
def test_wrong_fits_are_detected(mutant) -> None:
    with pytest.raises((AssertionError, InexactPairError, BaseExceptionGroup)):
        fits(mutant, Phase.generate)


def test_unknown_verifier_error_lists_known_names() -> None:
    for call in (lambda: require_exact(DELAYED, "sequoia"), lambda: default_tree("sequoia")):
        with pytest.raises(UnknownVerifierError, match=r"'sequoia'; there are nss, naive, .*, coupled"):
            call()
