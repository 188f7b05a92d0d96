"""Clients, unchanged, against a server process with a small model: they behave as the table of docs/conformance.md lists.

They have environments of their own, which `make conformance` makes; without these the tests are skipped.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import RunningServer, running_server

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "clients"
ENVIRONMENTS = Path(os.environ.get("CLIENTS_VENV", ROOT / ".venv-clients"))
MODEL = "qwen2.5-coder-0.5b"
YES = "yes"
ABSENT = "absent"


def _table() -> dict[str, dict[str, str]]:
    """Return the cells of the table by client and feature."""
    section = (ROOT / "docs" / "conformance.md").read_text().partition("## Clients\n")[2]
    table = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert table is not None
    lines = [line.strip("| ").split(" | ") for line in table[0].splitlines()]
    header, _, *rows = lines
    return {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}


def _kind(cell: str) -> str:
    """Return a cell, but the same word for each reason why a feature fails."""
    return cell if cell in (YES, ABSENT) else "fails"


def _command(program: Path) -> tuple[list[str], Path]:
    """Return the command of a client's program, and where it runs."""
    if program.suffix == ".mjs":
        # Packages are looked for where a module from the standard input runs.
        return [shutil.which("node") or "node", "--input-type=module", "-"], ENVIRONMENTS / "node"
    environment = ENVIRONMENTS / ("instructor" if program.stem.startswith("instructor") else "python")
    return [str(environment / "bin" / "python"), str(program)], ENVIRONMENTS


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("log") / "log", "--model", MODEL) as running:
        yield running


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not ENVIRONMENTS.exists(), reason="the clients are not installed: `make conformance` does")
@pytest.mark.parametrize("program", [*sorted(PROGRAMS.glob("*_client.py")), PROGRAMS / "vercel.mjs"], ids=lambda path: path.stem)
def test_client_behaves_as_documented(program: Path, server: RunningServer, tmp_path: Path) -> None:
    command, folder = _command(program)
    if not Path(command[0]).exists():
        pytest.skip(f"{command[0]} is not installed")
    # Without these a client fetches model costs from the internet, and aborts or waits.
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HOME": str(tmp_path)}
    done = subprocess.run(
        [*command, server.url, MODEL],
        input=program.read_text() if program.suffix == ".mjs" else None,
        cwd=folder,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    found = json.loads(done.stdout.splitlines()[-1])
    table, features = _table(), found["features"]
    cells = {feature: features.get(feature, ABSENT) for feature in next(iter(table.values()))}
    row = f"| {found['client']} | {' | '.join(cells.values())} |"
    assert found["client"] in table, row
    written = table[found["client"]]
    assert {name: _kind(cell) for name, cell in cells.items()} == {name: _kind(cell) for name, cell in written.items()}, row
