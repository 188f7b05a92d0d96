"""The registry and the refusal of inexact pairs."""

import pytest

from engine.verify.errors import InexactPairError, UnknownVerifierError
from engine.verify.rules import _EXACT, VERIFIER_NAMES, TreeKind, create_verifier, require_exact


def test_the_registry_and_the_table_name_the_same_verifiers() -> None:
    assert VERIFIER_NAMES == ("traversal", "specinfer", "nss", "coupled")
    assert tuple(_EXACT) == VERIFIER_NAMES
    assert [create_verifier(name).name for name in VERIFIER_NAMES] == list(VERIFIER_NAMES)


@pytest.mark.parametrize("kind", [TreeKind.WITHOUT_REPLACEMENT, TreeKind.SET_PLUS_SAMPLE, TreeKind.DETERMINISTIC])
def test_an_inexact_pair_is_refused_by_both_names(kind: TreeKind) -> None:
    with pytest.raises(InexactPairError, match=f"'specinfer'.*'{kind.value}'.*coupled are"):
        require_exact(kind, "specinfer")


@pytest.mark.parametrize("name", VERIFIER_NAMES)
def test_delayed_trees_suit_every_verifier(name: str) -> None:
    require_exact(TreeKind.IID, name)
    require_exact(TreeKind.PATH, name)


def test_an_unknown_name_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(UnknownVerifierError, match="'block'; there are traversal, specinfer, nss, coupled"):
        create_verifier("block")
    with pytest.raises(UnknownVerifierError, match="'block'"):
        require_exact(TreeKind.IID, "block")
