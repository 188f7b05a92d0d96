"""The registry of verifiers."""

import pytest

from engine.core.verifier_table import VERIFIER_NAMES, UnknownVerifierError
from engine.verify.registry import create_verifier


def test_every_name_creates_the_verifier_that_carries_it() -> None:
    assert [create_verifier(name).name for name in VERIFIER_NAMES] == list(VERIFIER_NAMES)


def test_an_unknown_name_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(UnknownVerifierError, match=r"'sequoia'; there are nss, naive, .*, coupled"):
        create_verifier("sequoia")
