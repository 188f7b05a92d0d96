"""What a test needs, as marks that skip it elsewhere."""

import pytest

from engine.native import library

needs_library = pytest.mark.skipif(not library.is_available(), reason="needs the library and a processor with AVX2")
