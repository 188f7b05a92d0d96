"""The protocol of growers, and the result of growing a step's trees. Shape key: V vocabulary."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.paged.completion import GrownNodes
from engine.core.enums import DraftSource, Origin
from engine.core.step_plan import Row
from engine.core.tree import TokenTree
from engine.draft.drafter import ModelPasses
from engine.draft.trees.calibration import Calibrations
from engine.draft.trees.sampling import ChildCandidates
from engine.native.growth import Offered
from engine.structured_output.masks import GrammarMasks
from engine.utils.device_clock import DeviceClock
from engine.verify.forest import Forest

T = TypeVar("T")

_FROM_MODEL = Origin(DraftSource.MODEL, False)
NO_CANDIDATES: Mapping[int, ChildCandidates] = MappingProxyType({})


class NodeValues(msgspec.Struct, frozen=True):
    """Values of a noise-aware tree's nodes without the root: `chances` are acceptance probabilities.

    `given_parent` are the uncorrected probabilities given that the parent is accepted. `is_cached` marks the nodes that were
    corrected as tokens of cached text.
    """

    chances: tuple[float, ...]
    given_parent: tuple[float, ...]
    is_cached: tuple[bool, ...]


class Growth(msgspec.Struct, frozen=True):
    """The step's trees, one for each decoding row.

    `fed[b]` are the nodes of tree b whose keys the drafter has cached. `candidates[b]` are candidate children by node, where the
    strategy kept them. `sources[b][v - 1]` is the source of the token of node v. `draft_probs[b]` has the nodes' draft
    probabilities if the row is traced, `node_values[b]` their values if the tree is noise-aware. Tree b took `rounds[b]` rounds.
    The step took `num_rounds` rounds and `passes` of the draft model.
    """

    forest: Forest
    fed: tuple[frozenset[int], ...]
    candidates: tuple[Mapping[int, ChildCandidates | Offered], ...]
    sources: tuple[tuple[DraftSource, ...], ...]
    draft_probs: tuple[tuple[float, ...], ...]
    rounds: tuple[int, ...]
    node_values: tuple[NodeValues | None, ...]
    num_rounds: int = 0
    passes: ModelPasses = ModelPasses()


@dataclass(frozen=True)
class UnreadGrowth:
    """Trees that a device grows and the host has not read. Valid until the next trees grow.

    `trees` are stars with room for the most nodes that each decoding row's tree may have. `nodes` are the nodes of the trees with
    more than a root, on the device. `read` turns the host's copies of `results` into the step's trees.
    """

    trees: tuple[TokenTree, ...]
    nodes: GrownNodes
    results: Sequence[Tensor]
    read: Callable[[Sequence[NDArray[np.float64]]], Growth]
    clock: DeviceClock


@runtime_checkable
class TreeGrower(Protocol):
    """One way to grow the trees of a step. All of them grow the same trees from the same rows.

    A grower may have a method `start`, which does as `grow` without waiting for the trees if that is possible (`start_of`).
    """

    def can_grow(self, rows: Sequence[Row]) -> bool:
        """Return whether all trees of a step can be grown in this way."""
        ...

    def grow(self, rows: Sequence[Row], calibrations: Calibrations, grammars: GrammarMasks | None) -> Growth:
        """Feed the drafter the missing tokens and grow every decoding row's tree. Rows with a grammar need `grammars`."""
        ...


def start_of(grower: TreeGrower) -> Callable[[Sequence[Row], Calibrations, GrammarMasks | None], Growth | UnreadGrowth]:
    """Return the function that grows a step's trees, without a wait if the grower can do without."""
    return getattr(grower, "start", grower.grow)


@cache
def no_distributions(vocab_size: int, device: torch.device) -> Float[Tensor, "0 V"]:
    """Return the draft distributions of a step in which nothing was sampled."""
    return torch.empty((0, vocab_size), device=device)


def plain_growth(rows: Sequence[Row], vocab_size: int, device: torch.device) -> Growth:
    """Return a root for each row: the step of an engine without a drafter."""
    trees = tuple([TokenTree.single(row.certain_ids[-1]) for row in rows if row.is_decoding])
    num_trees = len(trees)
    return Growth(
        forest=Forest(trees, no_distributions(vocab_size, device), ((None,),) * num_trees),
        fed=(frozenset(),) * num_trees,
        candidates=(NO_CANDIDATES,) * num_trees,
        sources=((),) * num_trees,
        draft_probs=((),) * num_trees,
        rounds=(0,) * num_trees,
        node_values=(None,) * num_trees,
    )


def origins_of(tree: TokenTree, origins: Mapping[tuple[int, ...], Mapping[int, Origin]]) -> tuple[Origin, ...]:
    """Return the origin of each node's token, without the root."""
    return lookup_by_path(tree, origins, _FROM_MODEL) if origins else (_FROM_MODEL,) * (tree.num_nodes - 1)


def lookup_by_path(tree: TokenTree, by_path: Mapping[tuple[int, ...], Mapping[int, T]], default: T) -> tuple[T, ...]:
    """Return the entry of each node's token after the drafted tokens before it, without the root."""
    path_ids: list[tuple[int, ...]] = [()]
    values = []
    for parent, token_id in zip(tree.parents[1:], tree.token_ids[1:], strict=True):
        values.append(by_path.get(path_ids[parent], {}).get(token_id, default))
        path_ids.append((*path_ids[parent], token_id))
    return tuple(values)
