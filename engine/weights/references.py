"""Resolves a user's reference to a model into a folder that transformers loads.

A reference is one of these, tried in this order: a preset's name, a folder, a GGUF file, a hub id.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from engine.utils.did_you_mean import did_you_mean
from engine.utils.progress_bar import long_work
from engine.weights.cache import WeightsCache, default_root
from engine.weights.errors import UnusableReference, WeightsError
from engine.weights.fetch import fetch_gguf
from engine.weights.hub import is_hub_id, snapshot
from engine.weights.presets import EXACT, Preset, load_presets

# Part of a converted folder's name. Raise it when engine/weights/convert.py changes its output, or a preset its `weights`.
RECIPE = 2

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


@dataclass(frozen=True, slots=True)
class LocalWeights:
    """Weights on this machine: safetensors, configuration and tokenizer in `folder`, converted from the file `gguf` if set."""

    name: str
    folder: Path
    gguf: Path | None = None


def resolve(reference: str, *, cache: Path | None = None, progress: bool = True) -> LocalWeights:
    """Return the local weights of a reference; fetch and convert them if they are not cached.

    `cache` is the cache's root folder, by default the user's. Progress is written to stderr. Raises WeightsError.
    """
    presets = load_presets()
    _require_usable(reference, presets)
    store = WeightsCache(cache or default_root())
    path = Path(reference).expanduser()
    if reference in presets:
        return resolve_preset(presets[reference], store, progress=progress)
    if path.is_dir():
        return _from_folder(path)
    if path.suffix == ".gguf":
        return _from_gguf(path, store, progress)
    return LocalWeights(reference, _checked(snapshot(reference)))


def require_usable(reference: str) -> None:
    """Raise UnusableReference for a reference of no kind, or for a folder that lacks files. Fetches and reads nothing."""
    _require_usable(reference, load_presets())


def _require_usable(reference: str, presets: Mapping[str, Preset]) -> None:
    path = Path(reference).expanduser()
    if reference in presets:
        return
    if reference and path.is_dir():  # an empty reference would be the working folder
        _checked(path.resolve())
        return
    is_gguf = path.suffix == ".gguf"
    if path.is_file() if is_gguf else is_hub_id(reference):
        return
    raise UnusableReference(
        f"{reference!r} is no model: not one of the presets ({', '.join(presets)}), "
        f"no folder and no .gguf file at {path.absolute()}, and not a hub id like org/name{did_you_mean(reference, presets)}"
    )


def find_preset(preset: Preset, cache: WeightsCache) -> LocalWeights | None:
    """Return the preset's weights if the cache has them. Their GGUF file may have been deleted to save space."""
    folder, gguf = _preset_folder(preset, cache), cache.gguf(preset.key)
    return LocalWeights(preset.name, folder, gguf if gguf.exists() else None) if folder.exists() else None


def resolve_preset(preset: Preset, cache: WeightsCache, *, progress: bool = True) -> LocalWeights:
    """As `resolve`, for a preset that may be missing from configs/models.yaml."""
    if found := find_preset(preset, cache):
        return found
    gguf = cache.obtain(cache.gguf(preset.key), lambda target, scratch: fetch_gguf(preset, target, scratch, progress=progress))
    folder = cache.obtain(_preset_folder(preset, cache), lambda target, _: _convert(gguf, target, preset.weights, progress))
    return LocalWeights(preset.name, folder, gguf)


def _preset_folder(preset: Preset, cache: WeightsCache) -> Path:
    return cache.model(f"{preset.key}-r{RECIPE}")


def _from_folder(path: Path) -> LocalWeights:
    folder = _checked(path.resolve())
    return LocalWeights(folder.name, folder)


def _from_gguf(path: Path, cache: WeightsCache, progress: bool) -> LocalWeights:
    gguf = path.resolve()
    folder = cache.model(f"{gguf.stem}-{_fingerprint(gguf)}-r{RECIPE}")
    cache.obtain(folder, lambda target, _: _convert(gguf, target, EXACT, progress))
    return LocalWeights(gguf.stem, folder, gguf)


def _fingerprint(path: Path) -> str:
    """Return eight characters that change with the file's path, size or time. A checksum would read gigabytes at each start."""
    stat = path.stat()
    return hashlib.sha256(f"{path}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:8]


def _checked(folder: Path) -> Path:
    """Return the folder; raise WeightsError if it lacks a file that transformers needs."""
    missing = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        missing.append("a tokenizer (" + ", ".join(_TOKENIZER_FILES) + ")")
    if missing:
        pickled = sorted(path.name for kind in _PICKLES for path in folder.glob(kind))
        hint = f"; {pickled[0]} is a pickle, which could run code and is never read: convert it to safetensors" if pickled else ""
        raise UnusableReference(f"{folder} is no model folder: it lacks {' and '.join(missing)}{hint}")
    return folder


def _convert(gguf: Path, target: Path, weights: str, progress: bool) -> None:
    """Run engine/weights/convert.py. Its stderr is progress, shown or discarded; its stdout is the reason for a failure."""
    command = [sys.executable, "-P", "-m", "engine.weights.convert", str(gguf), str(target), weights]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}  # the conversion needs only the file
    environment["TQDM_DISABLE"] = "1"  # its bars are of single steps
    stderr = None if progress else subprocess.DEVNULL
    with long_work(f"converting {gguf.name}") if progress else nullcontext():
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, env=environment, text=True, check=False
        )
    if done.returncode != 0:
        raise WeightsError(f"cannot convert {gguf}: {done.stdout.strip() or f'exit status {done.returncode}'}")
