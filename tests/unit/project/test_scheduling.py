"""Groups of tests that stay in one process."""

import pytest

from tests.scheduling import group_of


@pytest.mark.parametrize(
    ("node_id", "group"),
    [
        ("tests/unit/core/test_tree.py::test_it", "tests/unit/core/test_tree.py"),
        ("tests/unit/core/test_tree.py::TestTree::test_it[a::b]", "tests/unit/core/test_tree.py"),
        ("tests/e2e/test_golden.py::test_alone[smollm2-135m]", "smollm2-135m"),
        ("tests/e2e/test_golden.py::test_in_a_batch[qwen2.5-coder-1.5b]", "qwen2.5-coder-1.5b"),
        ("tests/e2e/test_serve.py::test_bad_input[3]", "server"),
        ("tests/e2e/test_readme.py::test_example_runs[bash0]", "server"),
    ],
)
def test_expensive_fixtures_load_once(node_id: str, group: str):
    assert group_of(node_id) == group
