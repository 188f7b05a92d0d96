"""A browser, a server with the default pair, and the accessibility rules of axe-core; what is missing skips the tests."""

import hashlib
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.e2e.server import RunningServer, running_server

_AXE = "axe-core-4.14.1"  # half a megabyte: fetched, not kept here
_AXE_DIGEST = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The system's Chromium. While it is open an event loop runs in this thread, so it ends with the module."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no chromium is installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A ready server, started only where there is a browser; it traces what it does."""
    folder = tmp_path_factory.mktemp("browser")
    with running_server(folder / "log", "--trace-file", str(folder / "trace")) as running:
        yield running


@pytest.fixture(scope="module")
def trace(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the server did so far."""
    return tmp_path_factory.getbasetemp() / "browser0" / "trace"


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The rules as a script, from the registry of npm or from where it was put before."""
    script = Path.home() / ".cache" / "latebranch" / f"{_AXE}.min.js"
    if not script.exists():
        folder = tmp_path_factory.mktemp("axe")
        name, _, version = _AXE.rpartition("-")
        try:
            subprocess.run(["npm", "pack", f"{name}@{version}"], cwd=folder, check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError):
            pytest.skip("axe-core cannot be fetched from npm's registry")
        with tarfile.open(folder / f"{_AXE}.tgz") as packed:
            member = packed.extractfile("package/axe.min.js")
            assert member is not None
            script.parent.mkdir(parents=True, exist_ok=True)
            script.write_bytes(member.read())
    assert hashlib.sha256(script.read_bytes()).hexdigest() == _AXE_DIGEST, "not the axe-core that was looked at"
    return script.read_text(encoding="utf-8")
