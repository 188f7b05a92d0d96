"""The README's curl and Python examples run as they stand, against a server on another port."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server import RunningServer

pytestmark = [pytest.mark.weights, pytest.mark.slow, pytest.mark.timeout(600)]

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```(bash|python)\n(.*?)```", README.read_text(), re.DOTALL)


def test_there_are_examples() -> None:
    assert {language for language, _ in BLOCKS} == {"bash", "python"}


@pytest.mark.parametrize(("language", "code"), BLOCKS, ids=[language for language, _ in BLOCKS])
def test_example_runs(server: RunningServer, language: str, code: str) -> None:
    code = code.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
    command = ["bash", "-eu", "-o", "pipefail", "-c", code] if language == "bash" else [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert '"error"' not in done.stdout
