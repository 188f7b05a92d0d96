"""An entry of the weights cache is whole or absent, and is made once, by any number of processes and however a maker ends."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from engine.weights.cache import WeightsCache, default_root
from tests.unit.weights.weights_wheels import python_command

# Makes an entry slowly: half is written, a signal file marks that, the rest never comes.
STUCK = """
import sys, time
from pathlib import Path
from engine.weights.cache import WeightsCache
root = Path(sys.argv[1])
cache = {cache}(root)
def make(target, scratch):
    target.write_text("half")
    (root / "begun").touch()
    time.sleep(60)
cache.obtain(cache.gguf("a"), make)
"""

# Makes an entry while writing down when it began and ended.
OVERLAP = """
import os, sys, time
from pathlib import Path
from engine.weights.cache import WeightsCache
root = Path(sys.argv[1])
class Unlocked(WeightsCache):
    from contextlib import contextmanager
    @contextmanager
    def _locked(self, entry):
        yield
def make(target, scratch):
    with (root / "made").open("a") as log:
        log.write("x")
    while {until_both_began}: time.sleep(0.01)
    target.write_text("whole")
cache = {cache}(root)
cache.obtain(cache.gguf("a"), make)
"""


class InPlace(WeightsCache):
    """A mutant: makes the entry at its final path."""

    def _make(self, entry, make):
        entry.parent.mkdir(parents=True, exist_ok=True)
        make(entry, entry.parent)


class Untidy(WeightsCache):
    """A mutant: leaves what a killed process left."""

    def _delete_leftovers(self, entry):
        pass


def _whole(target: Path, scratch: Path) -> None:
    target.write_text("whole")


def _fail_half_way(target: Path, scratch: Path) -> None:
    target.write_text("half")
    (scratch / "litter").write_text("x")
    raise ValueError("cut")


def _files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.suffix != ".lock")


def _leftovers(cache: WeightsCache) -> list[Path]:
    return list((cache.root / "tmp").iterdir())


def _keeps_nothing_half_made(cache: WeightsCache) -> bool:
    with pytest.raises(ValueError, match="cut"):
        cache.obtain(cache.gguf("a"), _fail_half_way)
    return _files(cache.root) == []


def test_a_failure_leaves_nothing(tmp_path):
    assert _keeps_nothing_half_made(WeightsCache(tmp_path / "cache"))
    assert not _keeps_nothing_half_made(InPlace(tmp_path / "mutant"))


def test_an_entry_is_made_once(tmp_path):
    cache = WeightsCache(tmp_path)
    entry = cache.obtain(cache.gguf("a"), _whole)
    assert entry.read_text() == "whole"
    assert cache.obtain(cache.gguf("a"), _fail_half_way) == entry


def test_a_folder_is_an_entry_too(tmp_path):
    cache = WeightsCache(tmp_path)

    def make(target: Path, scratch: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("{}")

    assert _files(cache.obtain(cache.model("b"), make)) == ["config.json"]
    assert _leftovers(cache) == []


def _kill_half_way(root: Path) -> None:
    process = subprocess.Popen([*python_command(STUCK.format(cache="WeightsCache")), str(root)])
    while not (root / "begun").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize(("kind", "is_clean"), [(WeightsCache, True), (Untidy, False)])
def test_killed_maker_is_cleaned_up_later(tmp_path, kind, is_clean):
    cache = kind(tmp_path)
    _kill_half_way(tmp_path)
    assert not cache.gguf("a").exists()
    assert len(_leftovers(cache)) == 1
    assert cache.obtain(cache.gguf("a"), _whole).read_text() == "whole"  # the lock went with its process
    assert (_leftovers(cache) == []) is is_clean


def test_leftovers_of_other_entries_stay(tmp_path):
    """Their makers may be alive: only the lock of one's own entry is held."""
    cache = WeightsCache(tmp_path)
    other = tmp_path / "tmp" / "a.gguf-other.gguf-12345678"
    other.mkdir(parents=True)
    cache.obtain(cache.gguf("a"), _whole)
    assert other.exists()


def _num_makers(root: Path, cache: str, until_both_began: str) -> int:
    program = OVERLAP.format(cache=cache, until_both_began=until_both_began)
    root.mkdir()
    processes = [subprocess.Popen([*python_command(program), str(root)], stderr=subprocess.DEVNULL) for _ in range(2)]
    for process in processes:
        process.wait()
    assert (root / "gguf" / "a.gguf").read_text() == "whole"
    return len((root / "made").read_text())


def test_two_processes_make_an_entry_once(tmp_path):
    assert _num_makers(tmp_path / "locked", "WeightsCache", "False") == 1
    # The mutant's makers wait for each other, so that they meet whatever the machine does.
    assert _num_makers(tmp_path / "mutant", "Unlocked", "len((root / 'made').read_text()) < 2") == 2


def test_the_root_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("LATEBRANCH_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_root() == tmp_path / "own"
    monkeypatch.delenv("LATEBRANCH_CACHE")
    assert default_root() == tmp_path / "xdg" / "latebranch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_root() == tmp_path / ".cache" / "latebranch"
