"""Who chooses with the compiled part and who without: it serves where it was compiled, and numpy says what it must say."""

import pytest

from selector.native import library


@pytest.fixture(scope="module")
def by_numpy():
    """Have what a module's tests make be computed by numpy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "library", lambda: None)
        yield
