"""Breaks each guard of docs/security.md in a copy of the project and runs the test of its promise: `python -m tests.mutants`.

Each mutant of tests/mutants.yaml must make its test fail. If the test passes, the mutant survives.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", ".*cache", ".hypothesis", "__pycache__", "build", "dist", "*.egg-info")
_LIMIT_S = 900.0
_PASSED, _FAILED = 0, 1  # exit statuses of pytest


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file that breaks a promise, and the test that must notice it."""

    promise: str
    file: str
    find: str
    replace: str
    test: str


MUTANTS = tuple(Mutant(**fields) for fields in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()))


def mutated(text: str, mutant: Mutant) -> str:
    """Return the text with the mutant's change. Raise ValueError unless the replaced text occurs once."""
    if text.count(mutant.find) != 1 or mutant.find == mutant.replace:
        raise ValueError(f"{mutant.file} has {mutant.find!r} {text.count(mutant.find)} times, not once")
    return text.replace(mutant.find, mutant.replace)


def status_of(project: Path, *tests: str) -> int:
    """Return pytest's exit status for some tests of a copy of the project."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(project), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, timeout=_LIMIT_S, check=False)
    return done.returncode


def verdict(project: Path, mutant: Mutant) -> str:
    """Return what became of a mutant in a copy of the project, which is as before afterwards."""
    path = project / mutant.file
    original = path.read_text()
    path.write_text(mutated(original, mutant))
    try:
        status = status_of(project, mutant.test)
    except subprocess.TimeoutExpired:
        status = _FAILED
    finally:
        path.write_text(original)
    return {_PASSED: "SURVIVED", _FAILED: "killed"}.get(status, f"pytest ended with status {status}")


def main() -> None:
    """Try the selected mutants; the exit status is 1 unless every one was killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="of the promises whose mutants are tried; default: all")
    words = parser.parse_args().words
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.promise for word in words)]
    num_alive = 0
    with tempfile.TemporaryDirectory() as folder:
        project = Path(shutil.copytree(ROOT, Path(folder) / "project", ignore=_LEFT_OUT))
        if status_of(project, *sorted({mutant.test for mutant in chosen})) != _PASSED:
            raise SystemExit("the tests fail without a mutant too")
        for mutant in chosen:
            outcome = verdict(project, mutant)
            num_alive += outcome != "killed"
            sys.stdout.write(f"{outcome}: {mutant.promise}: {mutant.file}: {mutant.find} -> {mutant.replace}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(chosen)} mutants, {num_alive} not killed\n")
    raise SystemExit(bool(num_alive))


if __name__ == "__main__":
    main()
