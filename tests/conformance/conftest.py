"""How long properties are looked for."""

import pytest


@pytest.fixture
def conformance_examples(pytestconfig: pytest.Config) -> int:
    """Examples of each property: --conformance-examples."""
    return int(pytestconfig.getoption("--conformance-examples"))
