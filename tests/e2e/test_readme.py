"""The curl and Python examples of README and quick start run unchanged, except for the server's port."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server import RunningServer

pytestmark = [pytest.mark.weights, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/quickstart.md")
BLOCKS = [found for page in PAGES for found in re.findall(r"```(bash|python)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)]


def test_there_are_examples() -> None:
    assert {language for language, _ in BLOCKS} == {"bash", "python"}


@pytest.mark.parametrize(("language", "code"), BLOCKS, ids=[language for language, _ in BLOCKS])
def test_example_runs(server: RunningServer, language: str, code: str, tmp_path: Path) -> None:
    code = code.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
    command = ["bash", "-eu", "-o", "pipefail", "-c", code] if language == "bash" else [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert '"error"' not in done.stdout
