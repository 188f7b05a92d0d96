"""The number and format of a folder's weights, read from the headers of its files."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

_NARROW = {"BF16": torch.bfloat16, "F16": torch.float16}


def num_parameters(folder: Path) -> int:
    """Return the number of parameters of a folder's weights."""
    return sum(parameters_in(path) for path in _weight_files(folder))


def parameters_in(path: Path) -> int:
    """Return the number of parameters in a file of weights."""
    return sum(math.prod(tensor.get_shape()) for tensor in _tensors(path))


def stored_dtype(folder: Path) -> torch.dtype:
    """Return the 16-bit format of a folder if all its weights have it, else float32, which holds all their values."""
    formats = {tensor.get_dtype() for path in _weight_files(folder) for tensor in _tensors(path)}
    return _NARROW.get(formats.pop(), torch.float32) if len(formats) == 1 else torch.float32


def _tensors(path: Path) -> Iterator[Any]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            yield file.get_slice(name)


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers would load. Other files may repeat these weights, or hold an adapter."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return sorted(folder.glob("*.safetensors"))
