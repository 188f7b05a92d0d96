"""The tests that docs/features.md names exist, and each supported feature names one."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in (ROOT / "docs" / "features.md").read_text().splitlines()
    if line.startswith("|") and not line.startswith(("| ---", "| feature |"))
]


def is_test(name: str) -> bool:
    file, _, function = name.partition("::")
    return (ROOT / file).exists() and re.search(rf"^(async )?def {function}\(", (ROOT / file).read_text(), re.M) is not None


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_every_supported_feature_has_a_test(row: list[str]):
    assert len(row) == 7
    shown_by = re.findall(r"`(tests/[^`]+)`", row[2])
    assert bool(shown_by) or row[1].startswith("no")
    assert all(map(is_test, shown_by)), shown_by


def test_missing_test_is_detected():
    assert not is_test("tests/unit/project/test_features.py::test_no_such")
    assert not is_test("tests/unit/no_such_file.py::test_it")
