"""The registry of verifiers."""

import pytest

from engine.core.verifier_table import VERIFIER_NAMES, UnknownVerifierError
from engine.verify.registry import create_verifier


def test_names_create_the_verifiers_carrying_them() -> None:
    assert [create_verifier(name).name for name in VERIFIER_NAMES] == list(VERIFIER_NAMES)


def test_unknown_name_error_lists_known_names() -> None:
    with pytest.raises(UnknownVerifierError, match=r"'sequoia'; there are nss, naive, .*, coupled"):
        create_verifier("sequoia")
