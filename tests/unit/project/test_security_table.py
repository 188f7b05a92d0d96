"""Each promise of docs/security.md names tests that exist."""

import re
from pathlib import Path

import pytest

from tests.unit.project.test_features import is_test

TEXT = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
TABLE = TEXT[TEXT.index("| promise |") :].partition("\n\n")[0].splitlines()[2:]
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TABLE]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_each_promise_is_shown_by_a_test(row: list[str]):
    assert len(row) == 3
    shown_by = re.findall(r"`([^`]+)`", row[2])
    assert shown_by
    assert all(map(is_test, shown_by)), shown_by


def test_the_table_is_read():
    assert len(ROWS) > 25
