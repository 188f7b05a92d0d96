"""The files of a drafter's checkpoint: configuration and tensors, by the names that this package uses."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FEATURE_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
_FLOATS = ("F32", "F16", "BF16", "F64")


class UnusableCheckpoint(ValueError):
    """A checkpoint cannot be read, does not fit its target, or needs something unsupported. The message is one sentence."""


@dataclass(frozen=True)
class Keys:
    """A JSON object of a configuration. `path` is where it is. It remembers which keys were read."""

    values: Mapping[str, Any]
    path: str = ""
    _read: set[str] = field(default_factory=set)

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a value of a type, or the default if it is missing or null."""
        self._read.add(key)
        value = self.values.get(key)
        if value is None:
            return default
        is_bool = isinstance(value, bool)
        if not isinstance(value, kind) or (is_bool and bool not in (kind if isinstance(kind, tuple) else (kind,))):
            raise UnusableCheckpoint(f"{self.name_of(key)} is {value!r}, which has the wrong type")
        return value

    def needed(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """Return a value that must be given."""
        value = self.get(key, kind)
        if value is None:
            raise UnusableCheckpoint(f"{self.name_of(key)} is missing")
        return value

    def size(self, key: str) -> int:
        """Return a positive integer that must be given."""
        value = self.needed(key, int)
        if value < 1:
            raise UnusableCheckpoint(f"{self.name_of(key)} is {value}, not a positive number")
        return int(value)

    def object(self, key: str) -> "Keys":
        """Return a nested object, empty if it is missing."""
        return Keys(self.get(key, dict, {}), f"{self.name_of(key)}.")

    def require(self, key: str, *allowed: Any) -> None:
        """Raise UnusableCheckpoint if a key is given with an unsupported value."""
        self._read.add(key)
        value = self.values.get(key)
        if value is not None and value not in allowed:
            only = " or ".join(map(repr, allowed))
            raise UnusableCheckpoint(f"{self.name_of(key)} is {value!r}; only {only} is supported")

    def skip(self, *keys: str) -> None:
        """Mark keys that do not change a drafter's network as read."""
        self._read.update(keys)

    def name_of(self, key: str) -> str:
        """Return the key with its path."""
        return f"{self.path}{key}"

    def unread(self) -> list[str]:
        """Return the keys that were never read."""
        return [self.name_of(key) for key in self.values if key not in self._read]


@dataclass(frozen=True)
class CheckpointFiles:
    """A checkpoint's folder. Tensors have the names of speculators, whichever the files use."""

    folder: Path
    config: Keys
    _places: Mapping[str, tuple[Path, str]]  # file and name in the file
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def open(cls, folder: Path) -> "CheckpointFiles":
        """Read the configuration and the headers of the tensors' files."""
        places: dict[str, tuple[Path, str]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        config = _read_json(folder / "config.json")
        if (folder / "mask_embedding.pt").exists():
            raise UnusableCheckpoint("mask_embedding.pt is a pickle, which could run code and is never read")
        for file in _tensor_files(folder):
            for name, shape, dtype in _headers(file):
                known = _canonical(name)
                if known in places:
                    raise UnusableCheckpoint(f"the tensors {name} and {places[known][1]} are two names of one tensor")
                if dtype not in _FLOATS and known not in ("d2t", "t2d", "token_map"):
                    raise UnusableCheckpoint(f"the tensor {name} has dtype {dtype}: quantised checkpoints are not supported")
                places[known], shapes[known] = (file, name), shape
        return cls(folder, Keys(config), places, shapes)

    @property
    def num_parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, float32 if it has floats."""
        file, stored = self._places[name]
        with safe_open(file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(stored)
        if not tensor.is_floating_point():
            return tensor
        if not bool(torch.isfinite(tensor).all()):
            raise UnusableCheckpoint(f"the tensor {stored} has a NaN or an infinity: its weights were never loaded")
        return tensor.float()

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise UnusableCheckpoint unless a tensor has this shape."""
        found = self.shapes.get(name)
        if found is None:
            raise UnusableCheckpoint(f"the tensor {name} is missing")
        if found != shape:
            raise UnusableCheckpoint(f"the tensor {name} has shape {list(found)}, its configuration means {list(shape)}")

    def require_no_others(self, known: set[str]) -> None:
        """Raise UnusableCheckpoint for a tensor that would not be used."""
        if others := sorted(set(self.shapes) - known):
            rest = f" and {len(others) - 1} more" if len(others) > 1 else ""
            raise UnusableCheckpoint(f"the tensor {self._places[others[0]][1]}{rest} has no place in this kind of drafter")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise UnusableCheckpoint(f"{path.name} cannot be read: {reason}") from error
    if not isinstance(content, dict):
        raise UnusableCheckpoint(f"{path.name} is not an object")
    return content


def _tensor_files(folder: Path) -> list[Path]:
    """Return the files with tensors: the files of the index if there is one."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if index.is_file():
        files = _read_json(index).get("weight_map", {})
        if not isinstance(files, dict) or not all(isinstance(one, str) and Path(one).name == one for one in files.values()):
            raise UnusableCheckpoint(f"{index.name} has no weight_map of file names")
        return [folder / name for name in sorted(set(files.values()))]
    if found := sorted(folder.glob("*.safetensors")):
        return found
    pickled = sorted(path.name for kind in _PICKLES for path in folder.glob(kind))
    hint = f"; {pickled[0]} is a pickle, which could run code and is never read: convert it to safetensors" if pickled else ""
    raise UnusableCheckpoint(f"it has no .safetensors file{hint}")


def _headers(file: Path) -> Iterator[tuple[str, tuple[int, ...], str]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a mapping)
                found = opened.get_slice(name)
                yield name, tuple(found.get_shape()), found.get_dtype()
    except (OSError, SafetensorError) as error:
        raise UnusableCheckpoint(f"{file.name} cannot be read: {error}") from error


def _canonical(name: str) -> str:
    """Return speculators' name of a tensor: `midlayer` is the only layer, and some projects add the prefix `model`."""
    name = name.removeprefix("model.").removeprefix("medusa_heads.")
    first, _, rest = name.partition(".")
    if first == "midlayer":
        return f"layers.0.{rest}"
    return f"{_FEATURE_NORMS[first]}.{rest}" if first in _FEATURE_NORMS else name
