"""The training data of a selector: features of roots and the outcome of every tree of a menu there, in shards on disk.

A shard is a safetensors file with the roots of one prompt. Shards can be added to a folder at any time. An interrupted run
continues with the prompts that have no shard.

Shape key: R examples (a root under one rule), M entries, D target width, W width of the drafter's input, S scalars.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from engine.core.tree import parse_expansion
from selector.menu import Menu
from selector.network.features import SCALARS, SelectorFeatures

_FORMAT = "latebranch-examples-1"
_ARRAYS = ("target_RD", "draft_RW", "scalars_RS", "counted_RM", "tokens_RM", "nodes_RM", "temperature_R", "context_R")


@dataclass(frozen=True)
class Examples:
    """R examples over one menu, with the names of their rules, kinds and prompts. States are float16, the rest float32.

    `tokens_RM` is E[tau + 1 | tree], the mean over sampled trees, and `nodes_RM` their mean number of drafted nodes. `counted_RM`
    are the tokens that the counting estimator expected.
    """

    menu: Menu
    rules: tuple[str, ...]
    kinds: tuple[str, ...]
    prompts: tuple[str, ...]
    target_RD: NDArray[np.float16]
    draft_RW: NDArray[np.float16]
    scalars_RS: NDArray[np.float32]
    counted_RM: NDArray[np.float32]
    tokens_RM: NDArray[np.float32]
    nodes_RM: NDArray[np.float32]
    temperature_R: NDArray[np.float32]
    context_R: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.rules)

    @property
    def features(self) -> SelectorFeatures:
        """The inputs of a network."""
        return SelectorFeatures(
            self.target_RD.astype(np.float32), self.draft_RW.astype(np.float32), self.scalars_RS, self.counted_RM
        )

    def at(self, rows: Sequence[int] | NDArray[np.int64]) -> Self:
        """Return some of the examples."""
        index = np.asarray(rows, dtype=np.int64)
        names: dict[str, Any] = {
            one: tuple(getattr(self, one)[row] for row in index.tolist()) for one in ("rules", "kinds", "prompts")
        }
        arrays: dict[str, Any] = {name: getattr(self, name)[index] for name in _ARRAYS}
        return type(self)(self.menu, **names, **arrays)

    def of_prompts(self, prompts: Sequence[str]) -> Self:
        """Return the examples of these prompts."""
        wanted = set(prompts)
        return self.at([row for row, prompt in enumerate(self.prompts) if prompt in wanted])

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return all examples of the parts; raise ValueError if their menus differ or there are no parts."""
        if not parts:
            raise ValueError("there are no examples")
        if any(part.menu.entries != parts[0].menu.entries for part in parts):
            raise ValueError("examples of different menus cannot be joined")
        names: dict[str, Any] = {
            one: tuple(name for part in parts for name in getattr(part, one)) for one in ("rules", "kinds", "prompts")
        }
        arrays: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS}
        return cls(parts[0].menu, **names, **arrays)


class ExampleFolder:
    """A folder of shards, one for each prompt. `notes` record the command, the number of prompts and the costs of a step.

    All shards have the same design. Shards of different runs have the notes of their run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def has(self, prompt: str) -> bool:
        """Return whether a prompt has a shard."""
        return self._path(prompt).is_file()

    def designs(self) -> set[str]:
        """Return the designs of its shards. Shards can be read together only if there is one design."""
        return {str(_notes(path).get("design")) for path in self.folder.glob("roots-*.safetensors")}

    def add(self, prompt: str, examples: Examples, notes: Mapping[str, object]) -> None:
        """Write a prompt's shard atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        names = {one: list(getattr(examples, one)) for one in ("rules", "kinds", "prompts")}
        header = {"entries": [str(entry) for entry in examples.menu.entries], "scalars": SCALARS, **names}
        metadata = {"format": _FORMAT, "header": json.dumps(header), "notes": json.dumps(notes)}
        partial = self._path(prompt).with_suffix(".partial")
        save_file({name: np.ascontiguousarray(getattr(examples, name)) for name in _ARRAYS}, partial, metadata=metadata)
        partial.rename(self._path(prompt))

    def read(self) -> tuple[Examples, dict[str, object]]:
        """Return all examples, and the notes of the run with the most prompts, which alone reproduces them all.

        Raises ValueError if there are no examples or their designs or menus differ.
        """
        read = [_read(path) for path in sorted(self.folder.glob("roots-*.safetensors"))]
        designs = {str(notes.get("design")) for _, notes in read}
        if len(designs) > 1:
            raise ValueError(f"{self.folder} has examples that were made differently: {'; '.join(sorted(designs))}")
        joined = Examples.joined([examples for examples, _ in read])
        return joined, max((notes for _, notes in read), key=_num_prompts)

    def _path(self, prompt: str) -> Path:
        return self.folder / f"roots-{prompt}.safetensors"


def _num_prompts(notes: Mapping[str, object]) -> int:
    wanted = notes.get("num_prompts")
    return wanted if isinstance(wanted, int) else 0  # absent in shards of earlier versions


def _notes(path: Path) -> dict[str, object]:
    with safe_open(path, framework="np") as file:
        notes: dict[str, object] = json.loads((file.metadata() or {}).get("notes", "{}"))
    return notes


def _read(path: Path) -> tuple[Examples, dict[str, object]]:
    with safe_open(path, framework="np") as file:
        metadata = file.metadata() or {}
        arrays: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    if metadata.get("format") != _FORMAT:
        raise ValueError(f"{path.name} has no examples of the format {_FORMAT}")
    header = json.loads(metadata["header"])
    if tuple(header["scalars"]) != SCALARS:
        raise ValueError(f"{path.name} has other scalars than this version; collect them anew")
    menu = Menu(tuple(parse_expansion(entry) for entry in header["entries"]))
    names: dict[str, Any] = {one: tuple(header[one]) for one in ("rules", "kinds", "prompts")}
    return Examples(menu, **names, **arrays), json.loads(metadata["notes"])
