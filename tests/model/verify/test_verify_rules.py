"""The registry, the refusal of inexact pairs, and the tree that a verifier gets."""

import contextlib
from typing import get_args

import pytest

from engine.types import VerifierName
from engine.verify.errors import InexactPairError, UnknownVerifierError
from engine.verify.rules import VERIFIER_NAMES, TreeKind, create_verifier, default_tree_kind, require_exact

NAMES = (
    *("nss", "naive", "naive_tree", "spectr", "specinfer", "khisti", "tournament"),
    *("rrsw", "block", "traversal", "gbv", "hu", "univer", "coupled"),
)


def test_every_name_creates_the_verifier_that_carries_it() -> None:
    assert VERIFIER_NAMES == NAMES
    assert [create_verifier(name).name for name in VERIFIER_NAMES] == list(VERIFIER_NAMES)


@pytest.mark.parametrize("kind", [TreeKind.WITHOUT_REPLACEMENT, TreeKind.SET_PLUS_SAMPLE, TreeKind.DETERMINISTIC])
def test_an_inexact_pair_is_refused_by_both_names(kind: TreeKind) -> None:
    with pytest.raises(InexactPairError, match=f"'specinfer'.*'{kind.value}'.*coupled are"):
        require_exact(kind, "specinfer")


@pytest.mark.parametrize("name", NAMES)
def test_delayed_trees_suit_every_verifier_of_draws(name: str) -> None:
    require_exact(TreeKind.PATH, name)
    if name in ("hu", "univer"):
        with pytest.raises(InexactPairError, match=f"'{name}'.*'iid'.*traversal.*coupled are"):
            require_exact(TreeKind.IID, name)
    else:
        require_exact(TreeKind.IID, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_verifier_named_alone_gets_a_tree_that_it_is_exact_on(name: str) -> None:
    require_exact(default_tree_kind(name), name)


def test_rules_of_a_path_get_a_path_and_rules_of_a_set_a_set() -> None:
    kinds = {name: default_tree_kind(name) for name in NAMES}
    assert {name for name, kind in kinds.items() if kind is TreeKind.PATH} == {"naive", "block"}
    assert {name for name, kind in kinds.items() if kind is TreeKind.SET_PLUS_SAMPLE} == {"hu", "univer"}
    assert {kind for name, kind in kinds.items() if name not in ("naive", "block", "hu", "univer")} == {TreeKind.IID}


def test_an_unknown_name_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(UnknownVerifierError, match=r"'sequoia'; there are nss, naive, .*, coupled"):
        create_verifier("sequoia")
    for ask in (lambda: require_exact(TreeKind.IID, "sequoia"), lambda: default_tree_kind("sequoia")):
        with pytest.raises(UnknownVerifierError, match="'sequoia'"):
            ask()


def test_the_wire_knows_exactly_the_verifiers_of_the_trees_that_are_grown() -> None:
    """Names of a request that lack a rule, or rules that no request can name, would both be lies."""
    exact = set()
    for name in VERIFIER_NAMES:
        with contextlib.suppress(InexactPairError):
            require_exact(TreeKind.IID, name)
            exact.add(name)
    assert set(get_args(VerifierName)) == exact
