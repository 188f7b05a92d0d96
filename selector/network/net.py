"""The selector's network: from the features of a root to E[tau + 1] of every tree on the menu, or to scores of the trees.

Three inputs (the target's state, the drafter's input, scalars) are projected and normalised. An MLP of widths 512 and 32
follows, and a head for each rule that verifies trees. With the objective "tokens" a head, plus a linear map of the scalars,
corrects the counted increments. An increment is a level of the chain, or a further branch at a trunk up to some depth.
Increments are never negative, so a larger tree is never expected to bring less. An untrained network equals the counting
estimator. With the objective "policy" a head scores entries, as in the paper (Dynamic Delayed Tree Expansion, arXiv
2602.16994).

Shape key: B sequences, M entries of the menu, P increments, D target width, W width of the drafter's input, S scalars, R
examples.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from engine.core.tree import parse_expansion
from selector.menu import Menu
from selector.network.features import DRAFT_SCALARS, SCALARS, SelectorFeatures

_FORMAT = "latebranch-selector-2"
_WIDTH, _HIDDEN, _CODE = 128, 512, 32
_LEAST = 1e-3  # lower bound of a counted increment, in tokens
_DROPOUT = 0.1
_FARTHEST = 4.0  # bound of standardised scalars in the linear map

Objective = Literal["tokens", "policy"]


@dataclass(frozen=True, slots=True)
class NetShape:
    """The widths of a network's inputs, its rules and trees, and its objective. The fields are written to its file."""

    target_width: int
    draft_width: int
    rules: tuple[str, ...]
    entries: tuple[str, ...]
    objective: Objective = "tokens"
    scalars: tuple[str, ...] = SCALARS

    @property
    def menu(self) -> Menu:
        """The menu of its trees."""
        return Menu(tuple(parse_expansion(entry) for entry in self.entries))


def increments_of(menu: Menu) -> NDArray[np.float32]:
    """Return which increments each entry has, 0 or 1, [M, P]; raise ValueError if a tree finds its own shape.

    A tree has the levels of its longest chain, and for each branch after the first the depths on the menu up to its own.
    """
    if not all(entry.is_delayed for entry in menu.entries):
        raise ValueError("the network knows delayed trees only: chains, and trunks with branches")
    levels = [("level", level, 0, 0) for level in range(1, menu.deepest + 1)]
    forked = [entry for entry in menu.entries if entry.branches > 1]
    cells = sorted({("fork", one.trunk, rank, one.depth) for one in forked for rank in range(2, one.branches + 1)})
    has_MP = np.zeros((len(menu), len(levels) + len(cells)), dtype=np.float32)
    for place, entry in enumerate(menu.entries):
        has_MP[place, : entry.max_depth] = 1.0
        if entry.branches > 1:
            for column, (_, trunk, rank, depth) in enumerate(cells, start=len(levels)):
                has_MP[place, column] = trunk == entry.trunk and rank <= entry.branches and depth <= entry.depth
    return has_MP


class SelectorNet(nn.Module):
    """The network. Dropout is active in training mode."""

    has_MP: Tensor
    to_increments_PM: Tensor
    most_M: Tensor
    mean_S: Tensor
    deviation_S: Tensor

    def __init__(self, shape: NetShape) -> None:
        super().__init__()
        self.shape = shape
        self.menu = shape.menu
        has_MP = increments_of(self.menu)
        self.register_buffer("has_MP", torch.from_numpy(has_MP), persistent=False)
        self.register_buffer("to_increments_PM", torch.from_numpy(np.linalg.pinv(has_MP)), persistent=False)
        self.register_buffer("most_M", torch.tensor(self.menu.depths, dtype=torch.float32) + 1.0, persistent=False)
        self.register_buffer("mean_S", torch.zeros(len(shape.scalars)))
        self.register_buffer("deviation_S", torch.ones(len(shape.scalars)))
        widths = (shape.target_width, shape.draft_width, len(shape.scalars))
        self.projections = nn.ModuleList(nn.Sequential(nn.Linear(width, _WIDTH), nn.LayerNorm(_WIDTH)) for width in widths)
        self.body = nn.Sequential(
            nn.Dropout(_DROPOUT),
            nn.Linear(len(widths) * _WIDTH, _HIDDEN),
            nn.GELU(),
            nn.Dropout(_DROPOUT),
            nn.Linear(_HIDDEN, _CODE),
            nn.GELU(),
        )
        num_outputs = has_MP.shape[1] if shape.objective == "tokens" else len(self.menu)
        self.heads = nn.ModuleList(nn.Linear(_CODE, num_outputs) for _ in shape.rules)
        straight = shape.rules if shape.objective == "tokens" else ()  # the paper's head has no linear map
        self.straight = nn.ModuleList(nn.Linear(len(shape.scalars), num_outputs, bias=False) for _ in straight)
        for parameter in (*self.heads.parameters(), *self.straight.parameters()):
            nn.init.zeros_(parameter)

    def standardise(self, scalars_RS: NDArray[np.float32]) -> None:
        """Take means and deviations of the scalars from examples, for DRAFT_SCALARS from examples with a draft distribution."""
        has_draft_R = scalars_RS[:, DRAFT_SCALARS.start] > 0.0
        for column in range(scalars_RS.shape[1]):
            is_of_draft = DRAFT_SCALARS.start < column < DRAFT_SCALARS.stop
            values = scalars_RS[has_draft_R, column] if is_of_draft else scalars_RS[:, column]
            if len(values):
                self.mean_S[column] = float(values.mean())
                self.deviation_S[column] = max(float(values.std()), 1e-2)

    def forward(self, features: "Inputs") -> Float[Tensor, "B M"]:
        """Return the expected tokens of every entry, or its score."""
        scalars_BS = (features.scalars_BS - self.mean_S) / self.deviation_S
        has_draft_B1 = features.scalars_BS[:, DRAFT_SCALARS.start : DRAFT_SCALARS.start + 1]
        of_draft = slice(DRAFT_SCALARS.start + 1, DRAFT_SCALARS.stop)
        scalars_BS[:, of_draft] = scalars_BS[:, of_draft] * has_draft_B1
        parts = (features.target_BD, features.draft_BW, scalars_BS)
        code_BC = self.body(
            torch.cat([projection(part) for projection, part in zip(self.projections, parts, strict=True)], dim=-1)
        )
        outputs_BP = self._by_rule(code_BC, scalars_BS, features.rules_B)
        return outputs_BP if self.shape.objective == "policy" else self._tokens(outputs_BP, features.counted_BM)

    def _by_rule(self, code_BC: Tensor, scalars_BS: Tensor, rules_B: Tensor) -> Tensor:
        found = sorted(set(rules_B.tolist()))
        outputs = [self.heads[rule](code_BC) for rule in found]
        if self.straight:
            known_BS = scalars_BS.clamp(-_FARTHEST, _FARTHEST)
            outputs = [one + self.straight[rule](known_BS) for one, rule in zip(outputs, found, strict=True)]
        if len(found) == 1:
            return outputs[0]  # type: ignore[no-any-return]
        stacked = torch.stack(outputs)
        place_B = torch.searchsorted(torch.tensor(found), rules_B)
        return stacked[place_B, torch.arange(len(rules_B))]

    def _tokens(self, outputs_BP: Tensor, counted_BM: Tensor) -> Tensor:
        """Return 1 plus the increments. Outputs correct the counted increments before the softplus, where any number is valid."""
        counted_BP = ((counted_BM - 1.0) @ self.to_increments_PM.T).clamp(min=_LEAST)
        increments_BP = functional.softplus(outputs_BP + counted_BP + torch.log(-torch.expm1(-counted_BP)))
        return torch.minimum(1.0 + increments_BP @ self.has_MP.T, self.most_M)

    def save(self, path: Path, recipe: Mapping[str, object]) -> None:
        """Write weights, shape and recipe to a safetensors file."""
        shape = {name: getattr(self.shape, name) for name in self.shape.__slots__}
        metadata = {"format": _FORMAT, "shape": json.dumps(shape), "recipe": json.dumps(recipe)}
        save_file({name: tensor.contiguous() for name, tensor in self.state_dict().items()}, path, metadata=metadata)

    @classmethod
    def load(cls, path: Path) -> tuple[Self, dict[str, object]]:
        """Read a network and its recipe; raise OSError, SafetensorError, or ValueError if it is no network."""
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"{path.name} is no selector of the format {_FORMAT}")
        try:
            fields: dict[str, Any] = json.loads(metadata["shape"])
            fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
            shape = NetShape(**fields)
            if shape.scalars != SCALARS:
                raise ValueError(f"{path.name} reads other scalars than this version has: {', '.join(shape.scalars)}")
            net = cls(shape)
            net.load_state_dict(tensors)
            return net.eval().requires_grad_(False), json.loads(metadata["recipe"])
        except (KeyError, TypeError, RuntimeError) as error:
            raise ValueError(f"{path.name} is a damaged selector: {error}") from error


@dataclass(frozen=True)
class Inputs:
    """Features as tensors. `rules_B` are the places of the sequences' rules in the network's."""

    target_BD: Float[Tensor, "B D"]
    draft_BW: Float[Tensor, "B W"]
    scalars_BS: Float[Tensor, "B S"]
    counted_BM: Float[Tensor, "B M"]
    rules_B: Int[Tensor, " B"]

    @classmethod
    def of(cls, features: SelectorFeatures, rules: Sequence[int]) -> "Inputs":
        """Return features and rules as tensors."""
        return cls(
            target_BD=torch.from_numpy(features.target_BD),
            draft_BW=torch.from_numpy(features.draft_BW),
            scalars_BS=torch.from_numpy(features.scalars_BS),
            counted_BM=torch.from_numpy(features.counted_BM),
            rules_B=torch.tensor(rules),
        )
