"""Folders for sockets outlive no owner for long, and none is taken from an owner that lives."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from engine.utils.run_folder import remove_abandoned, run_folder

OWNER = """
import sys, time
from engine.utils.run_folder import run_folder
with run_folder() as folder:
    (folder / "1").mkdir()
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def owner_in(parent: Path) -> tuple["subprocess.Popen[str]", Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(parent)}
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def test_a_killed_owners_folder_is_removed(temporary: Path):
    """After kill -9 of the front end its folder stayed for ever."""
    process, abandoned = owner_in(temporary)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (abandoned / "1").is_dir()
    with run_folder() as folder:
        assert not abandoned.exists()
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(temporary.iterdir()) == []


def check_living(temporary: Path) -> None:
    process, folder = owner_in(temporary)
    try:
        with run_folder() as own:
            remove_abandoned(temporary)
            assert own.is_dir()
            assert (folder / "1").is_dir()
    finally:
        end(process)


def test_a_living_owners_folder_stays(temporary: Path):
    check_living(temporary)


def test_a_stopped_owners_folder_stays(temporary: Path):
    process, folder = owner_in(temporary)
    process.send_signal(signal.SIGSTOP)
    remove_abandoned(temporary)
    assert folder.is_dir()
    end(process)


def test_folders_of_other_programs_stay(temporary: Path):
    others = [temporary / name for name in ("latebranch-abc12_xy", "other-run-1", "run")]
    for other in others:
        other.mkdir()
    (temporary / "latebranch-run-file").write_text("")
    (temporary / "elsewhere").mkdir()
    (temporary / "latebranch-run-link").symlink_to(temporary / "elsewhere")
    remove_abandoned(temporary)
    assert all(other.is_dir() for other in others)
    assert (temporary / "latebranch-run-file").exists()
    assert (temporary / "elsewhere").is_dir()


def test_an_unlocked_owner_kills(temporary: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    with pytest.raises(AssertionError):
        check_living(temporary)
