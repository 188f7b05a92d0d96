"""Policies by name."""

from typing import Any

import pytest

from engine.core.config import EngineConfig
from selector.build import adaptive_policy

UNUSED: Any = None


@pytest.mark.parametrize("name", ["fixd", "fixed", ""])
def test_unknown_policies_are_refused(name: str) -> None:
    """A name of the engine's own policies is none of these: the engine makes them itself."""
    with pytest.raises(ValueError, match="unknown policy"):
        adaptive_policy(EngineConfig("tiny", policy=name), UNUSED, UNUSED)
