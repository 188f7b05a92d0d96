"""Each promise of docs/security.md, and each test that it names, has a mutant that can be applied."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant, mutated, verdict
from tests.unit.project.test_security_table import ROWS


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_every_named_test_has_a_mutant(row: list[str]):
    tests = {mutant.test for mutant in MUTANTS if mutant.promise == row[0]}
    assert tests == set(row[2].replace("`", "").split(", "))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.promise}: {mutant.replace}")
def test_each_mutant_can_be_applied(mutant: Mutant):
    text = (ROOT / mutant.file).read_text()
    changed = mutated(text, mutant)
    if mutant.file.endswith(".py"):
        compile(changed, mutant.file, "exec")


def test_every_mutant_is_of_a_promise():
    assert {mutant.promise for mutant in MUTANTS} == {row[0] for row in ROWS}


def test_an_ambiguous_search_text_is_refused():
    for text in ("", "aa"):
        with pytest.raises(ValueError, match="not once"):
            mutated(text, Mutant("p", "f", "a", "b", "t"))


@pytest.mark.slow
def test_a_survivor_is_reported(tmp_path: Path):
    (tmp_path / "limited.py").write_text("LIMIT = 1\n")
    (tmp_path / "test_limited.py").write_text("from limited import LIMIT\n\ndef test_it():\n    assert LIMIT < 3\n")
    mutant = Mutant("p", "limited.py", "LIMIT = 1", "LIMIT = 3", "test_limited.py")
    assert verdict(tmp_path, mutant) == "killed"
    assert verdict(tmp_path, replace(mutant, replace="LIMIT = 2")) == "SURVIVED"
    assert verdict(tmp_path, replace(mutant, test="no_such_file.py")) == "pytest ended with status 4"
    assert (tmp_path / "limited.py").read_text() == "LIMIT = 1\n"
